"""JSON schemas of the API's types, made from the structs that decode and encode them."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from msgspec import NODEFAULT, UNSET, Struct, inspect

from antiphon.protocol.unions import OpenUnion, UnionField, find_union_field

Schema = dict[str, Any]

_REF = "#/components/schemas/{name}"
_NULL = {"type": "null"}
# Default factories of fields that msgspec omits when they are empty, if the struct omits defaults.
_OMITTED_IF_EMPTY = (list, dict, set)


class Components:
    """The schemas of all types that the server reads or sends, and of the types within them.

    A type that is read is described as leniently as it is parsed: unknown fields are allowed, and a family includes its
    aliases and other forms. For a type that is only sent, the fields that are always present are required.
    """

    def __init__(self, *, read: Iterable[Any], sent: Iterable[Any]) -> None:
        self._read_types = _ReachableTypes(read, lenient=True)
        sent_types = _ReachableTypes(sent, lenient=False)
        structs = self._read_types.structs | sent_types.structs
        _, self.schemas = msgspec.json.schema_components(structs, ref_template=_REF)
        for info in structs.values():
            self._correct(info)
        for family in (self._read_types.families | sent_types.families).values():
            self.schemas |= _describe_family(family)
        for family in self._read_types.families.values():
            if _is_lenient(family):
                self.schemas |= self._describe_input(family)
        self.schemas = dict(sorted(self.schemas.items()))

    def describe(self, kind: Any, *, read: bool = False) -> Schema:
        """Return the schema of a type, usually a reference."""
        holds = find_union_field(inspect.type_info(kind))
        if holds is not None:
            return _describe_open(holds, lenient=read)
        (schema,), _ = msgspec.json.schema_components([kind], ref_template=_REF)
        return schema

    def _correct(self, info: inspect.StructType) -> None:
        """Add facts that msgspec does not have: the types in open fields, and that the codec allows unknown fields."""
        schema = self.schemas[info.cls.__name__]
        schema.pop("additionalProperties", None)
        is_read = info.cls in self._read_types.structs
        for field in info.fields:
            holds = find_union_field(field.type)
            if holds is not None:
                described = schema["properties"][field.encode_name]
                default = {"default": described["default"]} if "default" in described else {}
                schema["properties"][field.encode_name] = default | _describe_open(holds, lenient=is_read)
        if not is_read:
            schema["required"] = list(_list_always_sent(info))

    def _describe_input(self, family: OpenUnion[Any]) -> dict[str, Schema]:
        """Describe a member of the family in all forms that the codec accepts."""
        for tag, variant in family.variants.items():
            # An object with the mark is read as the variant, unless the member itself has a field of that name.
            self.schemas[family.members[tag].__name__]["properties"].setdefault(variant.marker, _NULL)
        forms = [_refer(family.name)]
        forms += [_describe_variant(family, tag) for tag in family.variants]
        forms += [self._retag(family.members[tag], {"enum": [alias]}) for alias, tag in family.aliases.items()]
        untagged = dict(self._describe_untagged(family))
        forms += [_refer(name) for name in untagged]
        return {f"Input{family.name}": {"title": f"Input{family.name}", "anyOf": forms}, **untagged}

    def _describe_untagged(self, family: OpenUnion[Any]) -> Iterator[tuple[str, Schema]]:
        earlier: dict[str, Schema] = {}
        for mark, tag in family.untagged.items():
            name = f"Untagged{family.members[tag].__name__}"
            schema = self._retag(family.members[tag], _NULL)
            schema["title"] = name
            schema["properties"] |= earlier
            schema["required"] = sorted({*schema["required"], mark} - {"type"})
            yield name, schema
            earlier[mark] = _NULL

    def _retag(self, member: type[Struct], tag: Schema) -> Schema:
        schema = self.schemas[member.__name__]
        return {**schema, "properties": {**schema["properties"], "type": tag}}


class _ReachableTypes:
    """All structs and families reachable from some types."""

    def __init__(self, kinds: Iterable[Any], *, lenient: bool) -> None:
        self.structs: dict[type[Struct], inspect.StructType] = {}
        self.families: dict[str, OpenUnion[Any]] = {}
        self._lenient = lenient
        self._visit_all(kinds)

    def _visit_all(self, kinds: Iterable[Any]) -> None:
        for node in inspect.multi_type_info(kinds):
            self._visit(node)

    def _visit(self, node: inspect.Type) -> None:
        holds = find_union_field(node)
        if holds is not None:
            self._visit_family(holds.get_union())
        elif isinstance(node, inspect.StructType):
            if node.cls not in self.structs:
                self.structs[node.cls] = node
                for field in node.fields:
                    self._visit(field.type)
        else:
            for child in _list_children(node):
                self._visit(child)

    def _visit_family(self, family: OpenUnion[Any]) -> None:
        if family.name not in self.families:
            self.families[family.name] = family
            forms = [variant.form for variant in family.variants.values()] if self._lenient else []
            self._visit_all([*family.members.values(), *forms])


def _list_children(node: inspect.Type) -> Iterator[inspect.Type]:
    for value in msgspec.structs.astuple(node):
        if isinstance(value, inspect.Type):
            yield value
        elif isinstance(value, tuple):
            yield from (child for child in value if isinstance(child, inspect.Type))


def _list_always_sent(info: inspect.StructType) -> Iterator[str]:
    if info.tag_field is not None:
        yield info.tag_field
    for field in info.fields:
        if field.default is UNSET:
            continue
        made = field.default_factory is not NODEFAULT and field.default_factory not in _OMITTED_IF_EMPTY
        if field.required or made or not info.cls.__struct_config__.omit_defaults:
            yield field.encode_name


def _refer(name: str) -> Schema:
    return {"$ref": _REF.format(name=name)}


def _is_lenient(family: OpenUnion[Any]) -> bool:
    return bool(family.aliases or family.untagged or family.variants)


def _describe_open(holds: UnionField, *, lenient: bool) -> Schema:
    family = holds.get_union()
    member = _refer(f"Input{family.name}" if lenient and _is_lenient(family) else family.name)
    most = {} if holds.max_items is None else {"maxItems": holds.max_items}
    forms: list[Schema] = [{"type": "array", "items": member, **most} if holds.many else member]
    if holds.text:
        forms.insert(0, {"type": "string"})
    if holds.words:
        forms.insert(0, {"enum": list(holds.words)})
    if holds.nullable:
        forms.append(_NULL)
    return forms[0] if len(forms) == 1 else {"anyOf": forms}


def _describe_family(family: OpenUnion[Any]) -> dict[str, Schema]:
    refs = {tag: _refer(member.__name__) for tag, member in family.members.items()}
    unknown = f"Unknown{family.name}"
    known = sorted({*family.members, *family.aliases})
    return {
        family.name: {
            "title": family.name,
            "oneOf": [*refs.values(), _refer(unknown)],
            "discriminator": {"propertyName": "type", "mapping": {tag: ref["$ref"] for tag, ref in refs.items()}},
        },
        unknown: {
            "title": unknown,
            "description": "An object of a type that this server does not know. It is passed through unchanged.",
            "type": "object",
            "properties": {"type": {"type": "string", "not": {"enum": known}}},
            "required": ["type"],
        },
    }


def _describe_variant(family: OpenUnion[Any], tag: str) -> Schema:
    tags = [tag, *(alias for alias, known in family.aliases.items() if known == tag)]
    form = _refer(family.variants[tag].form.__name__)
    return {"allOf": [form, {"properties": {"type": {"enum": tags}}, "required": ["type"]}]}

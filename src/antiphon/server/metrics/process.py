"""Metrics of the process, with the names that Prometheus clients of all languages use."""

import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path

from antiphon.server.metrics.registry import Collector, Metric, Reading, Readings

# The module is imported when the server starts. Reading the start time of the process is not portable.
_STARTED_AT = time.time()
_MEMORY = Path("/proc/self/statm")
_DESCRIPTORS = Path("/proc/self/fd")


def make_process_metrics() -> Iterator[Collector]:
    """Yield the metrics of this process. Memory and open files are known on Linux only."""
    yield Reading(
        Metric("process_cpu_seconds_total", "CPU time of the process, in user and system mode."), "counter", _read_cpu
    )
    yield Reading(
        Metric("process_start_time_seconds", "Unix time at which the server started."),
        "gauge",
        lambda: [((), round(_STARTED_AT, 3))],
    )
    if _MEMORY.exists():
        yield Reading(Metric("process_resident_memory_bytes", "Resident memory of the process."), "gauge", _read_memory)
        yield Reading(Metric("process_open_fds", "Open file descriptors of the process."), "gauge", _count_descriptors)


def _read_cpu() -> Readings:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return [((), round(usage.ru_utime + usage.ru_stime, 6))]


def _read_memory() -> Readings:
    pages = int(_MEMORY.read_bytes().split()[1])
    return [((), pages * os.sysconf("SC_PAGE_SIZE"))]


def _count_descriptors() -> Readings:
    return [((), sum(1 for _ in _DESCRIPTORS.iterdir()))]

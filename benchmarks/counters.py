"""Counters of executed work: instructions or function calls.

Unlike times, counts do not depend on the load of the machine. A counter runs in the process that it counts, and
counts all of its threads.
"""

import ctypes
import mmap
import os
import platform
import shutil
import struct
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Protocol


class Counter(Protocol):
    """A counter of this process."""

    def start(self) -> None: ...

    def stop(self) -> int:
        """Return the count since `start`."""


class CounterUnavailable(Exception):
    """This machine cannot count this. The message gives the reason."""


# Instructions, counted by the processor

_HARDWARE, _INSTRUCTIONS = 0, 1
_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
_ATTRIBUTES_SIZE = 112
# Bits of the attributes: count threads started later, and only user code.
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6


class PerfCounter:
    """Instructions of user code, as `perf stat` counts them. Create it before the threads of the process start.

    Raises CounterUnavailable if the processor or the kernel does not allow it, as in most virtual machines.
    """

    def __init__(self, kind: int = _HARDWARE, event: int = _INSTRUCTIONS) -> None:
        number = _PERF_EVENT_OPEN.get(platform.machine())
        if sys.platform != "linux" or number is None:
            raise CounterUnavailable(f"no perf events on {sys.platform} {platform.machine()}")
        flags = _INHERIT | _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR
        attributes = struct.pack("=IIQQQQQ", kind, _ATTRIBUTES_SIZE, event, 0, 0, 0, flags).ljust(
            _ATTRIBUTES_SIZE, b"\0"
        )
        libc = ctypes.CDLL(None, use_errno=True)
        self._file = libc.syscall(number, attributes, 0, -1, -1, 0)
        if self._file < 0:
            raise CounterUnavailable(f"perf_event_open: {os.strerror(ctypes.get_errno())}")

    def start(self) -> None:
        self._before = self._read()

    def stop(self) -> int:
        return self._read() - self._before

    def _read(self) -> int:
        return int.from_bytes(os.read(self._file, 8), sys.byteorder)


# Instructions, counted by callgrind

OUT_FILE = "callgrind.out"
# A client request of Valgrind as machine code, as its header valgrind.h has it: the rotations leave the register
# unchanged, and Valgrind recognises the sequence. The argument is the address of the request.
_CLIENT_REQUEST = {"x86_64": bytes.fromhex("4889f8 31d2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db 4889d0 c3")}
_RUNNING_ON_VALGRIND = 0x1001
_CALLGRIND = ord("C") << 24 | ord("T") << 16
_DUMP, _ZERO, _START = _CALLGRIND, _CALLGRIND + 1, _CALLGRIND + 4


def make_valgrind_command(folder: Path) -> list[str]:
    """Return the command prefix of a process that uses CallgrindCounter. Raises CounterUnavailable."""
    if platform.machine() not in _CLIENT_REQUEST:
        raise CounterUnavailable(f"no client requests on {platform.machine()}")
    if shutil.which("valgrind") is None:
        raise CounterUnavailable("valgrind is not installed")
    return [
        "valgrind",
        "--tool=callgrind",
        "--quiet",
        "--instr-atstart=no",
        f"--callgrind-out-file={folder / OUT_FILE}",
    ]


class CallgrindCounter:
    """Instructions, counted by callgrind. Counting slows the process down from the first `start` on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._dumps = 0
        self._page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._page.write(_CLIENT_REQUEST[platform.machine()])
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._page))
        self._call = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(address)
        if not self._request(_RUNNING_ON_VALGRIND):
            raise CounterUnavailable("this process does not run on Valgrind")

    def _request(self, number: int) -> int:
        arguments = (ctypes.c_uint64 * 6)(number)
        return int(self._call(ctypes.addressof(arguments)))

    def start(self) -> None:
        # Never stopped: every switch makes Valgrind translate all code again.
        if not self._dumps:
            self._request(_START)
        self._request(_ZERO)

    def stop(self) -> int:
        self._request(_DUMP)
        self._dumps += 1
        dump = (self._folder / f"{OUT_FILE}.{self._dumps}").read_text()
        return next(int(line.split()[1]) for line in dump.splitlines() if line.startswith("totals:"))


# Function calls


class CallCounter:
    """Calls of Python and C functions. Create it before the threads of the process start."""

    def __init__(self) -> None:
        self._count = 0
        self._before = 0
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            self._count += 1

    def start(self) -> None:
        self._before = self._count

    def stop(self) -> int:
        return self._count - self._before

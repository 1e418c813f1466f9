"""Native Python in a bubblewrap sandbox: no network, no other processes, and no files of the server.

The folder of a container is a file system in memory. The server copies the files in at the start, and takes the changed
ones after each job.
"""

import base64
import binascii
import os
import platform
import queue
import shutil
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from antiphon.tools.hosted.code_interpreter.folder import LimitedFolder
from antiphon.tools.hosted.code_interpreter.messages import DATA_PATH, CodeJob, CodeResult, SandboxSetup

PROGRAM = "bwrap"
_MODULES = "/opt/antiphon"
_START_SECONDS = 60.0
_SYSTEM_FOLDERS = ("/usr", "/bin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/fonts", "/etc/ssl/certs")
_PNG = b"\x89PNG\r\n\x1a\n"
# Base64 and JSON make a frame larger than its files.
_FRAME_FACTOR = 2
_FRAME_BYTES = 16 * 1024 * 1024


class _Reply(msgspec.Struct):
    logs: str
    is_truncated: bool
    images: list[str]
    figures: int
    changed: dict[str, str]
    deleted: list[str]


class BubblewrapInterpreter:
    """Python in bubblewrap. It keeps its variables from job to job, until a job takes too long."""

    def __init__(self, setup: SandboxSetup) -> None:
        self._setup = setup
        self._folder = LimitedFolder(Path(setup.folder), max_bytes=0, max_entries=setup.folder_entries)
        self._process: subprocess.Popen[bytes] | None = None
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._start()

    def run(self, job: CodeJob) -> CodeResult:
        if self._process is None or self._process.poll() is not None:
            self._start()
        self._folder.measure(job.folder_bytes)
        self._send(
            {
                "code": job.code,
                "output_bytes": job.output_bytes,
                "images": job.images,
                "image_bytes": job.image_bytes,
            }
        )
        try:
            frame = self._frames.get(timeout=job.seconds)
        except queue.Empty:
            self._end()
            return CodeResult(ending="timeout")
        if frame is None:
            self._end()
            return CodeResult(ending="crashed", reason="its process ended")
        try:
            reply = msgspec.json.decode(frame, type=_Reply)
        except msgspec.MsgspecError:
            self._end()
            return CodeResult(ending="crashed", reason="its output is not valid")
        return self._make_result(reply, job)

    def _make_result(self, reply: _Reply, job: CodeJob) -> CodeResult:
        result = CodeResult(ending="returned", logs=reply.logs, is_truncated=reply.is_truncated)
        for image in reply.images[: job.images]:
            with suppress(binascii.Error):
                data = base64.b64decode(image, validate=True)
                if data.startswith(_PNG):
                    result.images.append(data)
        result.skipped_images = max(0, reply.figures - len(result.images))
        for path in reply.deleted:
            with suppress(OSError):
                self._folder.remove(f"/{path}")
        for path, encoded in reply.changed.items():
            try:
                self._save(path, base64.b64decode(encoded, validate=True))
            except (OSError, binascii.Error, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else "invalid data"
                result.logs += f"\nThe file {path} was not saved: {reason}."
        return result

    def _save(self, path: str, data: bytes) -> None:
        *parents, _ = path.split("/")
        for count in range(1, len(parents) + 1):
            with suppress(FileExistsError):
                self._folder.mkdir("/" + "/".join(parents[:count]))
        self._folder.write(f"/{path}", data)

    def _start(self) -> None:
        self._end()
        filter_end, filter_start = os.pipe()
        with os.fdopen(filter_start, "wb") as pipe:
            pipe.write(make_seccomp_filter(platform.machine()))
        try:
            self._process = subprocess.Popen(
                make_command(self._setup, filter_end),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(filter_end,),
                env={},
            )
        finally:
            os.close(filter_end)
        assert self._process.stdout is not None
        self._frames = queue.SimpleQueue()
        largest = self._setup.folder_bytes * _FRAME_FACTOR + _FRAME_BYTES
        threading.Thread(target=_read_frames, args=(self._process.stdout, self._frames, largest), daemon=True).start()
        files = {path: base64.b64encode(data).decode() for path, data in self._folder.read_all()}
        self._send(
            {
                "folder": DATA_PATH,
                "files": files,
                "memory_bytes": self._setup.memory_bytes,
                "folder_entries": self._setup.folder_entries,
            }
        )
        try:
            ready = self._frames.get(timeout=_START_SECONDS)
        except queue.Empty:
            ready = None
        if ready is None:
            self._end()
            raise RuntimeError("bubblewrap does not start: it may not be allowed to create namespaces")

    def _send(self, message: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        data = msgspec.json.encode(message)
        with suppress(OSError):  # the reader notices the end of the process
            self._process.stdin.write(len(data).to_bytes(4) + data)
            self._process.stdin.flush()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def _read_frames(stream: BinaryIO, frames: "queue.SimpleQueue[bytes | None]", largest: int) -> None:
    with suppress(ValueError, OSError):  # closed
        while len(head := stream.read(4)) == 4 and int.from_bytes(head) <= largest:
            frames.put(stream.read(int.from_bytes(head)))
    frames.put(None)


def make_command(setup: SandboxSetup, seccomp: int) -> list[str]:
    """Return the command of a sandbox. `seccomp` is the descriptor with the filter of system calls."""
    folders = [folder for folder in (*_SYSTEM_FOLDERS, sys.base_prefix, sys.prefix) if Path(folder).exists()]
    command = [
        shutil.which(PROGRAM) or PROGRAM,
        "--unshare-all",
        "--unshare-user",
        "--die-with-parent",
        "--new-session",
    ]
    command += [
        "--clearenv",
        "--setenv",
        "PATH",
        "/usr/bin:/bin",
        "--setenv",
        "HOME",
        "/tmp",
        "--setenv",
        "LANG",
        "C.UTF-8",
    ]
    # First, because folders with packages may be below it.
    command += ["--size", str(setup.temporary_bytes), "--tmpfs", "/tmp"]
    for folder in dict.fromkeys(folders):
        command += ["--ro-bind", folder, folder]
    command += ["--proc", "/proc", "--dev", "/dev"]
    command += ["--size", str(setup.folder_bytes), "--tmpfs", DATA_PATH]
    command += ["--ro-bind", str(Path(__file__).with_name("guest")), _MODULES]
    # The file systems of these are in memory and have no limit.
    command += ["--remount-ro", "/dev", "--remount-ro", "/"]
    command += [
        "--uid",
        "65534",
        "--gid",
        "65534",
        "--cap-drop",
        "ALL",
        "--seccomp",
        str(seccomp),
        "--chdir",
        DATA_PATH,
    ]
    return [*command, "--", sys.executable, "-I", "-c", _START]


_START = f"import sys; sys.path.insert(0, {_MODULES!r}); import antiphon_native; antiphon_native.work()"

# System calls that code does not need: by their number on x86-64 and on AArch64, None if there is none.
_DENIED = {
    "fork": (57, None),
    "vfork": (58, None),
    "ptrace": (101, 117),
    "mount": (165, 40),
    "umount2": (166, 39),
    "swapon": (167, 224),
    "unshare": (272, 97),
    "setns": (308, 268),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "open_by_handle_at": (304, 265),
}
_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
_CLONE = (56, 220)
_CLONE3 = 435
_CLONE_THREAD = 0x00010000
_X32_BIT = 0x40000000
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_LOAD, _EQUAL, _GREATER_OR_EQUAL, _SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _FIRST_ARGUMENT_OFFSET = 0, 4, 16


def make_seccomp_filter(machine: str) -> bytes:
    """Return a filter that denies new processes, namespaces, debugging and kernel facilities. Threads are allowed.

    The filter is a BPF program: each instruction has a code, two jump distances and a constant.
    """
    if machine not in _ARCHITECTURES:
        raise RuntimeError(f"there is no filter of system calls for {machine}")
    architecture, column = _ARCHITECTURES[machine]
    program: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCHITECTURE_OFFSET),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_OFFSET),
    ]
    if machine == "x86_64":
        program += [(_GREATER_OR_EQUAL, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]
    for numbers in _DENIED.values():
        number = numbers[column]
        if number is not None:
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    # Without clone3, the C library uses clone, whose flags a filter can read.
    program += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    program += [
        (_EQUAL, 0, 3, _CLONE[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT_OFFSET),
        (_SET, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)

"""Messages between the server and the processes that run the code of one container or compile the interpreter.

Frames on stdin and stdout are msgpack with a length of four bytes. The first frame is a `SandboxSetup`, each further
one a `CodeJob`. The process answers with a `SandboxReady`, then with a `CodeResult` for each job. The compiler gets a
`CompilationJob` and answers with a `CompilationResult`.
"""

from typing import Literal

import msgspec

# The folder of a container as its code sees it.
DATA_PATH = "/mnt/data"


class SandboxSetup(msgspec.Struct, kw_only=True):
    """The container: its folder, and the limits that hold as long as the process lives.

    `cache_dir` has the compiled interpreter. `temporary_bytes` limits the files outside the folder.
    """

    sandbox: Literal["wasm", "bubblewrap"]
    folder: str
    cache_dir: str
    memory_bytes: int
    folder_bytes: int
    folder_entries: int
    temporary_bytes: int


class CompilationJob(msgspec.Struct, kw_only=True):
    """One stage of the compilation of the interpreter. The folder gets the result."""

    cache_dir: str
    stage: Literal["quick", "optimized"]


class CompilationResult(msgspec.Struct):
    """The folder has the compiled interpreter, or `error` says why not."""

    error: str = ""


class SandboxReady(msgspec.Struct):
    """The process can run jobs, or `error` says why not."""

    error: str = ""


class CodeJob(msgspec.Struct, kw_only=True):
    """Code, and the limits of its run. `folder_bytes` limits the files of the container."""

    code: str
    folder_bytes: int
    seconds: float
    output_bytes: int
    image_bytes: int
    images: int


Ending = Literal["returned", "timeout", "exited", "crashed"]


class CodeResult(msgspec.Struct, kw_only=True):
    """The result of a job.

    `logs` has the standard output and errors, with the traceback of an exception and the value of the last expression.
    `images` are PNG files. `reason` describes a crash. After an ending other than `returned`, the variables are lost.
    """

    ending: Ending
    logs: str = ""
    is_truncated: bool = False
    images: list[bytes] = []
    skipped_images: int = 0
    reason: str = ""

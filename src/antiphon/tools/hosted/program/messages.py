"""Messages between the server and the process that runs one program.

Frames on stdin and stdout are msgpack with a length of four bytes. The first frame is a `ProgramSetup`. The second one,
a `CallResults` without results, starts the program, and each further one continues it. The process answers each of
them with a `ProgramStep`.
"""

import msgspec


class ProgramSetup(msgspec.Struct, kw_only=True):
    """A program and its limits. `tools` are the names that it can call; those in `text_tools` take a string.

    `calls` is the number of calls, and `arguments_chars` the length of their arguments together.

    `clock_ms` is the time that the program reads, and `seed` that of its random numbers: a second run is the same.
    """

    code: str
    tools: list[str]
    text_tools: list[str]
    clock_ms: int
    seed: int
    memory_bytes: int
    output_chars: int
    error_chars: int = 10_000
    calls: int
    arguments_chars: int


class CallResult(msgspec.Struct, array_like=True):
    """The result of a call: its value as JSON, or the message of an error as JSON."""

    number: int
    value: str
    is_error: bool = False


class CallResults(msgspec.Struct):
    """Results of calls, in the order in which the program gets them."""

    results: list[CallResult]


class ToolRequest(msgspec.Struct, array_like=True):
    """A call that the program makes. `number` counts its calls from 0, and `arguments` is JSON."""

    number: int
    name: str
    arguments: str


class ProgramStep(msgspec.Struct, kw_only=True):
    """The state of a program that cannot continue by itself: its new calls, or its end.

    At the end, `output` is its text. `error` is the reason if it did not end normally.
    """

    calls: list[ToolRequest] = []
    is_done: bool = False
    output: str = ""
    is_truncated: bool = False
    error: str = ""

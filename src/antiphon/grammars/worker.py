"""The process that compiles grammars on trial. Its resources are limited, and a crash ends only this process.

`antiphon.grammars.trial` starts it. Frames on stdin and stdout are msgpack with a length of four bytes. The first frame
is a `Setup`, each further one a `Job`. The process ends with its stdin.
"""

import ctypes
import itertools
import os
import random
import resource
import signal
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import msgspec

from antiphon.grammars.messages import Job, Ready, Setup, TrialResult, Vocabulary
from antiphon.worker_frames import read_frame, write_frame

# Tokens that a trial generates: the first steps of a grammar can cost more than its compilation.
_STEPS = 24
_MEGABYTE = 1024 * 1024
# The part of the memory limit that a process may hold between two jobs.
_MAX_RETAINED = 0.5
_ERROR_BYTES = 400
# Longer tokens are not used to split a text. A trial does not reach the rest of a long text, which is split into bytes.
_MAX_TOKEN_BYTES = 16
_MAX_SPLIT_BYTES = _STEPS * _MAX_TOKEN_BYTES
# The part of an error of llguidance about the text that must follow.
_FORCED_TEXT = b"ff_tokens"
_TOO_MUCH_TEXT = "the text that it requires is too long."
# Nested grammars need stack space, and a thread of the server may have this little.
_STACK_BYTES = 512 * 1024


class Compiler(Protocol):
    """A grammar compiler."""

    def run(self, syntax: str, definition: str) -> str | None:
        """Compile a grammar and take some random steps in it. Return the error of the first step or None.

        An error of a later step may be caused by the random text before it.
        """


class PackageCompiler:
    """The Python package llguidance."""

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        from llguidance import LLTokenizer

        self._tokenizer = LLTokenizer("byte" if vocabulary is None else _TokenizerWrapper(vocabulary))  # type: ignore[arg-type]

    def run(self, syntax: str, definition: str) -> str | None:
        from llguidance import LLMatcher

        read = LLMatcher.grammar_from_regex if syntax == "regex" else LLMatcher.grammar_from_lark
        matcher = LLMatcher(self._tokenizer, read(definition), log_level=0)
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            return matcher.get_error().strip()
        chance = random.Random(0)
        for _ in range(_STEPS):
            token = choose_token(mask, self._tokenizer.eos_token, chance)
            if token is None or not matcher.consume_token(token) or matcher.is_stopped():
                break
            mask = matcher.compute_bitmask()
        return None


class _TokenizerWrapper:
    """The interface of a tokenizer that llguidance expects."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.eos_token_id = vocabulary.end

    def __call__(self, text: Any) -> list[int]:
        return []


class _TokenizerInit(ctypes.Structure):
    """`LlgTokenizerInit` of llguidance.h. The padding is for fields of later versions."""

    _fields_ = (
        ("vocab_size", ctypes.c_uint32),
        ("tok_eos", ctypes.c_uint32),
        ("token_lens", ctypes.POINTER(ctypes.c_uint32)),
        ("token_bytes", ctypes.c_char_p),
        ("tokenizer_json", ctypes.c_char_p),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", ctypes.c_void_p),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", ctypes.c_void_p),
        ("slices", ctypes.c_void_p),
        ("padding", ctypes.c_uint64 * 32),
    )


# size_t (user_data, bytes, length, tokens, room): writes at most `room` tokens, and returns the number of all.
_Tokenize = ctypes.CFUNCTYPE(
    ctypes.c_size_t,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint8),
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_uint32),
    ctypes.c_size_t,
)


class _LongestMatch:
    """Splits a text into the longest tokens. Only with such a function, llguidance computes the text that must follow.

    The embedded model has one, too: a grammar that requires a very long text fails only there.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = {token: index for index, token in enumerate(vocabulary.tokens) if len(token) <= _MAX_TOKEN_BYTES}
        self._bytes = [self._ids.get(bytes((byte,)), 0) for byte in range(256)]

    def split(self, text: bytes) -> list[int]:
        tokens: list[int] = []
        start = 0
        while start < min(len(text), _MAX_SPLIT_BYTES):
            sizes = range(min(_MAX_TOKEN_BYTES, len(text) - start), 1, -1)
            size = next((size for size in sizes if text[start : start + size] in self._ids), 1)
            tokens.append(self._ids[text[start : start + size]] if size > 1 else self._bytes[text[start]])
            start += size
        return tokens + [self._bytes[byte] for byte in text[start:]]

    def call(self, _: Any, text: Any, length: int, tokens: Any, room: int) -> int:
        found = self.split(ctypes.string_at(text, length))
        for index, token in enumerate(found[:room]):
            tokens[index] = token
        return len(found)


class NativeCompiler:
    """The copy of llguidance in xllamacpp, which compiles the grammars of the embedded model.

    It is not the version of the Python package, and has other costs. Raises OSError or AttributeError if the library
    does not export its functions.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        library = ctypes.CDLL(_find_library())
        self._new_matcher = library.llg_new_matcher
        self._compute_mask = library.llg_matcher_compute_mask
        self._get_mask = library.llg_matcher_get_mask
        self._get_mask_size = library.llg_matcher_get_mask_byte_size
        self._consume = library.llg_matcher_consume_token
        self._get_error = library.llg_matcher_get_error
        self._is_stopped = library.llg_matcher_is_stopped
        self._free = library.llg_free_matcher
        for function in (self._new_matcher, self._get_mask, self._get_error, library.llg_new_tokenizer):
            function.restype = ctypes.c_void_p
        self._get_mask_size.restype = ctypes.c_size_t
        self._is_stopped.restype = ctypes.c_bool
        self._end: int = vocabulary.end
        self._init = ctypes.create_string_buffer(1024)
        self._tokenize = _Tokenize(_LongestMatch(vocabulary).call)  # the library holds no reference
        tokenizer = _make_tokenizer(library, vocabulary, self._tokenize)
        library.llg_constraint_init_set_defaults(self._init, ctypes.c_void_p(tokenizer))
        # The log level of stderr follows the tokenizer and the level of the log buffer.
        ctypes.memset(ctypes.addressof(self._init) + 8, 0, 8)
        self._check()

    def run(self, syntax: str, definition: str) -> str | None:
        matcher = ctypes.c_void_p(self._new_matcher(self._init, syntax.encode(), definition.encode()))
        try:
            self._compute_mask(matcher)
            if error := self._get_error(matcher):
                return str(ctypes.string_at(error), errors="replace").strip()
            chance = random.Random(0)
            for _ in range(_STEPS):
                mask = ctypes.string_at(self._get_mask(matcher), self._get_mask_size(matcher))
                token = choose_token(mask, self._end, chance)
                if token is None:
                    break
                if self._consume(matcher, ctypes.c_uint32(token)):
                    error = self._get_error(matcher)
                    return _TOO_MUCH_TEXT if error and _FORCED_TEXT in ctypes.string_at(error) else None
                if self._is_stopped(matcher) or self._compute_mask(matcher):
                    break
            return None
        finally:
            self._free(matcher)

    def _check(self) -> None:
        """Raise OSError if the functions do not work as expected."""
        if self.run("lark", '%llguidance {}\nstart: "a"') is not None or self.run("lark", "start: missing") is None:
            raise OSError("the functions of llguidance do not work as expected")


def _find_library() -> str:
    spec = find_spec("xllamacpp")
    for folder in spec.submodule_search_locations or () if spec else ():
        for path in sorted(Path(folder).glob("xllamacpp*.so")):
            return str(path)
    raise OSError("xllamacpp is not installed")


def _make_tokenizer(library: ctypes.CDLL, vocabulary: Vocabulary, tokenize: Any) -> int:
    lengths = (ctypes.c_uint32 * len(vocabulary.tokens))(*map(len, vocabulary.tokens))
    init = _TokenizerInit(
        vocab_size=len(vocabulary.tokens),
        tok_eos=vocabulary.end,
        token_lens=lengths,
        token_bytes=b"".join(vocabulary.tokens),
        tokenize_fn=ctypes.cast(tokenize, ctypes.c_void_p).value,
    )
    error = ctypes.create_string_buffer(_ERROR_BYTES)
    tokenizer: Any = library.llg_new_tokenizer(ctypes.byref(init), error, ctypes.c_size_t(_ERROR_BYTES))
    if not tokenizer:
        raise OSError(error.value.decode(errors="replace"))
    return int(tokenizer)


def choose_token(mask: bytes, end: int, chance: random.Random) -> int | None:
    """Return a random token of a bit mask, but not the end token; None if there is no other."""
    start = chance.randrange(len(mask)) if mask else 0
    for index in itertools.chain(range(start, len(mask)), range(start)):
        for bit in range(8) if mask[index] else ():
            if mask[index] >> bit & 1 and index * 8 + bit != end:
                return index * 8 + bit
    return None


def make_compiler(vocabulary: Vocabulary | None) -> Compiler:
    if vocabulary is not None:
        try:
            return NativeCompiler(vocabulary)
        except (OSError, AttributeError):
            pass
    return PackageCompiler(vocabulary)


def read_memory() -> int:
    """Return the size of this process's address space in bytes. 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def run_job(compiler: Compiler, job: Job) -> str | None:
    """Return the fault of a grammar or None. Ends the process if that takes too long."""
    faults: list[str | None] = []

    def run() -> None:
        try:
            faults.append(compiler.run(job.syntax, job.definition))
        except (MemoryError, ValueError, OverflowError) as error:
            faults.append(str(error) or "out of memory")

    thread = threading.Thread(target=run)
    # The signal ends the process, even inside the compiler.
    signal.setitimer(signal.ITIMER_PROF, job.seconds)
    thread.start()
    thread.join()
    signal.setitimer(signal.ITIMER_PROF, 0)
    return faults[0]


def describe_fault(error: str) -> str:
    """Return an error of the compiler for clients, without the state of the compiler."""
    reason = error.partition("\n<state>")[0][:_ERROR_BYTES]
    return "no text matches it." if reason.startswith("NoExtension") else reason


def work(stdin: BinaryIO, stdout: BinaryIO) -> None:
    """Serve jobs until the end of stdin."""
    first = read_frame(stdin)
    if first is None:
        return
    setup = msgspec.msgpack.decode(first, type=Setup)
    compiler = make_compiler(setup.vocabulary)
    setup.vocabulary = None
    limit = setup.megabytes * _MEGABYTE
    base = read_memory()
    if base:
        resource.setrlimit(resource.RLIMIT_AS, (base + limit, base + limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    write_frame(stdout, Ready(isinstance(compiler, NativeCompiler)))
    while (frame := read_frame(stdin)) is not None:
        job = msgspec.msgpack.decode(frame, type=Job)
        fault = run_job(compiler, job)
        is_last = read_memory() - base > _MAX_RETAINED * limit
        write_frame(stdout, TrialResult(fault and describe_fault(fault), is_last))
        if is_last:
            return


if __name__ == "__main__":
    os.nice(5)
    threading.stack_size(_STACK_BYTES)
    work(sys.stdin.buffer, sys.stdout.buffer)

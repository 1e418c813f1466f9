"""`antiphon chat`: a conversation in the terminal."""

import contextlib
import importlib
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, TextIO

from antiphon.cli.server_client import Events, ServerClient, ServerUnreachable
from antiphon.cli.settings import load_settings, read_secret, server_url
from antiphon.errors import AntiphonError
from antiphon.protocol import events as wire
from antiphon.protocol.items import FunctionCall
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.unions import Unknown

if TYPE_CHECKING:
    from antiphon.config import Settings

HELP = """\
/new    start over: the model forgets the conversation
/help   this list
/exit   leave (Ctrl-D, or Ctrl-C on an empty line, leave too)
Ctrl-C  while the model answers: stop the answer"""
LEFT_OUT = "this turn is left out of the conversation"
# What could move the cursor, change colours or retitle the window has no place in an answer.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class ChatClient(Protocol):
    """Whom we talk to."""

    def models(self) -> list[str]: ...

    def stream(self, request: CreateRequest) -> Events: ...

    def close(self) -> None: ...


class AnswerWriter:
    """Writes answers to `out`. On a terminal reasoning is shown too, dimmed, and so are our own remarks."""

    def __init__(self, out: TextIO, *, live: bool) -> None:
        self._out = out
        self._live = live
        self._dim = False
        self._line_open = False

    def show(self, text: str, *, dim: bool = False) -> None:
        if dim and not self._live:
            return
        if dim != self._dim:
            self.end_line()
            self._out.write("\x1b[2m" if dim else "")
            self._dim = dim
        self._out.write(_CONTROLS.sub("", text) if self._live else text)
        self._out.flush()
        self._line_open = not text.endswith("\n") if text else self._line_open

    def end_line(self) -> None:
        """Finish what was being written."""
        self._out.write("\x1b[0m" if self._dim else "")
        self._out.write("\n" if self._line_open else "")
        self._out.flush()
        self._dim = self._line_open = False

    def remark(self, text: str) -> None:
        """Something that we say, not the model: for a person who watches."""
        self.end_line()
        self.show(text, dim=True)
        self.end_line()

    def warn(self, text: str) -> None:
        """Something to know about the answer, also for who reads it from a pipe."""
        if self._live:
            self.remark(text)
        else:
            print(f"antiphon: {text}", file=sys.stderr)


class Conversation:
    """Turns with one partner. Only an answer that came to its end is continued from."""

    def __init__(self, partner: ChatClient, screen: AnswerWriter, *, model: str, instructions: str | None) -> None:
        self._partner = partner
        self._screen = screen
        self._model = model
        self._instructions = instructions
        self._last_id: str | None = None

    def start_over(self) -> None:
        self._last_id = None

    def take_turn(self, text: str) -> None:
        """Ask, and show the answer as it comes. Raises AntiphonError when there is none."""
        request = CreateRequest(
            model=self._model,
            input=text,
            instructions=self._instructions,
            previous_response_id=self._last_id,
            stream=True,
        )
        terminal = None
        try:
            with contextlib.closing(self._partner.stream(request)) as events:
                for event in events:
                    self._show(event)
                    if isinstance(event, wire.TERMINAL):
                        terminal = event
        finally:
            self._screen.end_line()
        self._conclude(terminal)

    def _show(self, event: wire.Event | Unknown) -> None:
        match event:
            case wire.OutputTextDelta() | wire.RefusalDelta():
                self._screen.show(event.delta)
            case wire.ReasoningTextDelta() | wire.ReasoningSummaryTextDelta():
                self._screen.show(event.delta, dim=True)

    def _conclude(self, terminal: wire.Lifecycle | None) -> None:
        if terminal is None:
            raise AntiphonError("The answer broke off: the server closed the connection.")
        response = terminal.response
        if isinstance(terminal, wire.Failed):
            raise AntiphonError(response.error.message if response.error else "The model failed and did not say why.")
        for item in response.output:
            if isinstance(item, FunctionCall):
                # A call waits for its output, which we do not have: nothing could follow it.
                self._screen.warn(
                    f"the model calls {item.name}({item.arguments}), which nobody here answers; {LEFT_OUT}"
                )
                return
        self._last_id = response.id
        if response.incomplete_details is not None:
            self._screen.warn(f"the answer is cut short: {response.incomplete_details.reason}")


def converse(conversation: Conversation, screen: AnswerWriter, lines: Iterator[str], *, live: bool) -> int:
    """Turn after turn until the lines end. On a terminal a failed turn is not the end."""
    status = 0
    for line in lines:
        text = line.strip()
        if text in ("/exit", "/quit"):
            break
        if text == "/new":
            conversation.start_over()
            screen.remark("a new conversation")
        elif re.fullmatch(r"/\w+", text):
            screen.remark(HELP if text == "/help" else f"there is no {text}; /help lists what there is")
        elif text:
            status |= _take_turn(conversation, screen, text, live=live)
    return status


def _take_turn(conversation: Conversation, screen: AnswerWriter, text: str, *, live: bool) -> int:
    try:
        conversation.take_turn(text)
    except KeyboardInterrupt:
        if not live:
            raise
        screen.remark(f"stopped; {LEFT_OUT}")
    except AntiphonError as error:
        print(f"antiphon: {error.message}", file=sys.stderr)
        return 0 if live else 1
    return 0


def _read_lines(*, live: bool) -> Iterator[str]:
    if not live:
        # Bytes that are no text must not keep the rest from being asked.
        yield from (line.encode(errors="surrogateescape").decode(errors="replace") for line in sys.stdin)
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if not _half_typed():
                return


def _half_typed() -> bool:
    """Whether there was something on the line. Without readline nobody knows, and Ctrl-C leaves."""
    readline = sys.modules.get("readline")
    return readline is not None and bool(readline.get_line_buffer())


def _find_partner(arguments: Namespace, screen: AnswerWriter) -> ChatClient:
    """The server that was named, else the one that runs on this machine, else the engine in this process."""
    settings = load_settings(arguments, store="memory:")
    key = read_secret(arguments.key_env, option="--key-env") if arguments.key_env else None
    if arguments.url:
        return ServerClient(arguments.url, key=key)
    if not arguments.local:
        # Our own server's keys stand in our own settings; they go to no other address.
        own = settings.api_keys[0].key if settings.api_keys else None
        remote = ServerClient(server_url(settings), key=key or own)
        with contextlib.suppress(ServerUnreachable):
            remote.models()
            return remote
    screen.remark("loading the model into this process ...")
    return _start_engine(settings)


def _start_engine(settings: "Settings") -> ChatClient:
    from antiphon.cli.local_engine import LocalEngine

    return LocalEngine(settings)


def run(arguments: Namespace) -> int:
    live = sys.stdin.isatty() and sys.stdout.isatty()
    if live:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # this alone gives input() its editing keys
    screen = AnswerWriter(sys.stdout, live=live)
    with contextlib.closing(_find_partner(arguments, screen)) as partner:
        model = arguments.model or next(iter(partner.models()), None)
        if model is None:
            raise AntiphonError("The server has no model to talk to.")
        where = partner.url if isinstance(partner, ServerClient) else "this process"
        screen.remark(f"{model} in {where}. /help lists the commands.")
        conversation = Conversation(partner, screen, model=model, instructions=arguments.instructions)
        return converse(conversation, screen, _read_lines(live=live), live=live)

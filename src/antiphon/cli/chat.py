"""`antiphon chat`: chat with a model in the terminal."""

import contextlib
import importlib
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from antiphon.cli.answer_writer import AnswerWriter
from antiphon.cli.server_client import Events, ServerClient, find_running_server
from antiphon.cli.settings import load_settings, read_key
from antiphon.errors import AntiphonError
from antiphon.protocol import events as wire
from antiphon.protocol.items import FunctionCall
from antiphon.protocol.request import CreateRequest
from antiphon.protocol.unions import Unknown

if TYPE_CHECKING:
    from antiphon.config.settings import Settings

HELP = """\
/new    start a new conversation
/help   list the commands
/exit   leave (also Ctrl-D, and Ctrl-C on an empty line)
Ctrl-C  during an answer: stop the answer"""
NOT_ADDED = "this turn is not added to the conversation"


def run(arguments: Namespace) -> int:
    live = sys.stdin.isatty() and sys.stdout.isatty()
    if live:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # importing it gives input() its editing keys
    writer = AnswerWriter(sys.stdout, live=live)
    with contextlib.closing(_connect(arguments, writer)) as client:
        model = arguments.model or next(iter(client.models()), None)
        if model is None:
            raise AntiphonError("The server has no model.")
        where = client.shown_url if isinstance(client, ServerClient) else "this process"
        writer.note(f"{model} in {where}. /help lists the commands.")
        session = ChatSession(client, writer, model=model, instructions=arguments.instructions)
        return _run_session(session, writer, _read_lines(live=live), live=live)


class ChatClient(Protocol):
    """The server, or the engine in this process, that produces the responses."""

    def models(self) -> list[str]: ...

    def stream(self, request: CreateRequest) -> Events: ...

    def close(self) -> None: ...


class ChatSession:
    """The turns of a conversation. Each turn continues from the last response that completed."""

    def __init__(self, client: ChatClient, writer: AnswerWriter, *, model: str, instructions: str | None) -> None:
        self._client = client
        self._writer = writer
        self._model = model
        self._instructions = instructions
        self._last_id: str | None = None

    def start_over(self) -> None:
        self._last_id = None

    def take_turn(self, text: str) -> None:
        """Send a message and show the answer while it is generated. Raises AntiphonError if it fails."""
        request = CreateRequest(
            model=self._model,
            input=text,
            instructions=self._instructions,
            previous_response_id=self._last_id,
            stream=True,
        )
        terminal = None
        try:
            with contextlib.closing(self._client.stream(request)) as events:
                for event in events:
                    self._show_event(event)
                    if isinstance(event, wire.TERMINAL):
                        terminal = event
        finally:
            self._writer.end_line()
        self._finish_turn(terminal)

    def _show_event(self, event: wire.Event | Unknown) -> None:
        match event:
            case wire.OutputTextDelta() | wire.RefusalDelta():
                self._writer.write(event.delta)
            case wire.ReasoningTextDelta() | wire.ReasoningSummaryTextDelta():
                self._writer.write(event.delta, dim=True)

    def _finish_turn(self, terminal: wire.Lifecycle | None) -> None:
        if terminal is None:
            raise AntiphonError("The answer is incomplete: the server closed the connection.")
        response = terminal.response
        if isinstance(terminal, wire.Failed):
            raise AntiphonError(response.error.message if response.error else "The response failed without a reason.")
        for item in response.output:
            if isinstance(item, FunctionCall):
                # The next turn would need the output of the call, and chat runs no tools.
                self._writer.warn(f"the model calls {item.name}({item.arguments}), but chat runs no tools; {NOT_ADDED}")
                return
        self._last_id = response.id
        if response.incomplete_details is not None:
            self._writer.warn(f"the answer is incomplete: {response.incomplete_details.reason}")


def _run_session(session: ChatSession, writer: AnswerWriter, lines: Iterator[str], *, live: bool) -> int:
    """Take a turn for each line and return the exit status. On a terminal a failed turn does not count."""
    status = 0
    for line in lines:
        text = line.strip()
        if text in ("/exit", "/quit"):
            break
        if text == "/new":
            session.start_over()
            writer.note("new conversation")
        elif re.fullmatch(r"/\w+", text):
            writer.note(HELP if text == "/help" else f"unknown command {text}; /help lists the commands")
        elif text:
            status |= _take_turn(session, writer, text, live=live)
    return status


def _take_turn(session: ChatSession, writer: AnswerWriter, text: str, *, live: bool) -> int:
    try:
        session.take_turn(text)
    except KeyboardInterrupt:
        if not live:
            raise
        writer.note(f"stopped; {NOT_ADDED}")
    except AntiphonError as error:
        print(f"antiphon: {error.message}", file=sys.stderr)
        return 0 if live else 1
    return 0


def _read_lines(*, live: bool) -> Iterator[str]:
    if not live:
        # Bytes that are not UTF-8 are replaced, so that they do not end the chat.
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
            if not _has_partial_line():
                return


def _has_partial_line() -> bool:
    """Return True if text was typed on the current line. Without readline this is unknown, and Ctrl-C leaves."""
    readline = sys.modules.get("readline")
    return readline is not None and bool(readline.get_line_buffer())


def _connect(arguments: Namespace, writer: AnswerWriter) -> ChatClient:
    """Return the server that `--url` names, else the configured server if it runs, else an engine in this process."""
    settings = load_settings(arguments, store="memory:")
    key = read_key(arguments)
    if arguments.url:
        return ServerClient(arguments.url, key=key)
    client = None if arguments.local else find_running_server(settings, key=key)
    if client is not None:
        return client
    writer.note("loading the model into this process ...")
    return _start_engine(settings)


def _start_engine(settings: "Settings") -> ChatClient:
    from antiphon.cli.local_engine import LocalEngine

    return LocalEngine(settings)

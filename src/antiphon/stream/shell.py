"""The events that tell the commands of a shell call, one after the other."""

from collections.abc import Iterator

from antiphon.protocol.events import Event
from antiphon.protocol.hosted import ShellCall
from antiphon.protocol.hosted_events import ShellCommandAdded, ShellCommandDelta, ShellCommandDone


def tell_commands(call: ShellCall, output_index: int, numbers: Iterator[int]) -> Iterator[Event]:
    for index, command in enumerate(call.action.commands):
        yield ShellCommandAdded(next(numbers), output_index, index, "")
        yield ShellCommandDelta(next(numbers), output_index, index, command)
        yield ShellCommandDone(next(numbers), output_index, index, command)

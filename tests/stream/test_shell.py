"""A shell call that comes whole is told command by command."""

import itertools

from antiphon.protocol import events
from antiphon.protocol.hosted import LocalShellAction, LocalShellCall, ShellAction, ShellCall
from antiphon.protocol.hosted_events import ShellCommandAdded, ShellCommandDelta, ShellCommandDone
from antiphon.protocol.response import Response
from antiphon.stream.composer import Composer
from antiphon.stream.decompose import decompose_events
from antiphon.stream.deltas import Finish, WholeItem
from antiphon.stream.replay import ReplayFilter


def compose() -> Composer:
    numbers = itertools.count(1)
    composer = Composer(
        Response(id="r", created_at=0, model="m"), new_id=lambda kind: f"{kind}_{next(numbers)}", now=int
    )
    composer.start()
    return composer


def test_each_command_is_added_written_and_done() -> None:
    call = ShellCall("call_1", ShellAction(["ls", ""]), "sh_1")
    assert compose().compose([WholeItem(call)]) == [
        events.OutputItemAdded(2, 0, call),
        ShellCommandAdded(3, 0, 0, ""),
        ShellCommandDelta(4, 0, 0, "ls"),
        ShellCommandDone(5, 0, 0, "ls"),
        ShellCommandAdded(6, 0, 1, ""),
        ShellCommandDelta(7, 0, 1, ""),
        ShellCommandDone(8, 0, 1, ""),
        events.OutputItemDone(9, 0, call),
    ]


def test_ids_that_are_left_empty_are_given() -> None:
    composer = compose()
    composer.compose([WholeItem(LocalShellCall("", "", LocalShellAction(["ls"], {}), "completed")), Finish()])
    (item,) = composer.response.output
    assert isinstance(item, LocalShellCall)
    assert (item.id, item.call_id) == ("lsh_1", "call_1")


def test_a_second_run_may_call_by_another_id() -> None:
    told = compose().compose([WholeItem(ShellCall("call_1", ShellAction(["ls"])))])
    again = ReplayFilter(decompose_events(told))
    assert again.feed([WholeItem(ShellCall("call_2", ShellAction(["ls"]))), Finish()]) == [Finish()]

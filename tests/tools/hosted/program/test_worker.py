"""Programs in an isolate: their calls, results, output, limits, and attempts to leave the sandbox."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("py_mini_racer")

from antiphon.tools.hosted.program.messages import CallResult, CallResults, ProgramSetup, ProgramStep, ToolRequest
from antiphon.tools.hosted.program.worker import IsolatedProgram

CLOCK_MS = 1_700_000_000_000
MEGABYTE = 1024 * 1024


def make_setup(code: str, **fields: Any) -> ProgramSetup:
    values: dict[str, Any] = {
        "tools": ["get", "note"],
        "text_tools": ["note"],
        "clock_ms": CLOCK_MS,
        "seed": 7,
        "memory_bytes": 32 * MEGABYTE,
        "output_chars": 200,
        "error_chars": 100,
        "calls": 4,
        "arguments_chars": 100,
    }
    return ProgramSetup(code=code, **(values | fields))


@contextmanager
def open_program(code: str, **fields: Any) -> Iterator[IsolatedProgram]:
    program = IsolatedProgram(make_setup(code, **fields))
    try:
        yield program
    finally:
        program.close()


def run(code: str, *results: list[CallResult], **fields: Any) -> ProgramStep:
    """Return the last step of a program that gets these results, one list after the other."""
    with open_program(code, **fields) as program:
        step = program.start()
        for each in results:
            step = program.resume(CallResults(each))
        return step


def done(output: str = "", error: str = "", **fields: Any) -> ProgramStep:
    return ProgramStep(is_done=True, output=output, error=error, **fields)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("text('a', {b: 1}); text([2]); return 3", done('a {"b":1}\n[2]\n3')),
        ("", done()),
        ("image('data:image/png;base64,AA==')", done("![image](data:image/png;base64,AA==)")),
        ("image('file:///etc/passwd')", done(error="TypeError: image() takes the https or data URL of an image.")),
        ("text('x'.repeat(500))", done("x" * 200, is_truncated=True)),
        ("text('\\ud83d'); text('\\ud83d\\ude00')", done("\ufffd\n\U0001f600")),
        ("throw 'x'.repeat(500)", done(error=f"The program threw {'x' * 82}")),
        ("throw new Error('\\ud83d')", done(error="Error: \ufffd (line 1)")),
        ("text(Date.now(), new Date().getTime(), Date.UTC(1970))", done(f"{CLOCK_MS} {CLOCK_MS} 0")),
        ("\nboom()", done(error="ReferenceError: boom is not defined (line 2)")),
        ("let x = ;", done(error="SyntaxError: Unexpected token ';'")),
        ("throw {code: 1}", done(error='The program threw {"code":1}')),
        ("await new Promise(() => {})", done(error="The program waits for a promise that nothing settles.")),
        ("function f() { f(); } f()", done(error="RangeError: Maximum call stack size exceeded (line 1)")),
        ("await tools.get(1)", done(error="TypeError: tools.get takes one object with its arguments. (line 1)")),
        ("await tools.get('a')", done(error="TypeError: tools.get takes one object with its arguments. (line 1)")),
        ("tools.other({})", done(error="TypeError: There is no tool named 'other'. Tools: get, note. (line 1)")),
    ],
)
def test_program_ends_with_its_output_or_error(code: str, expected: ProgramStep) -> None:
    step = run(code)
    if "image()" in expected.error:
        step.error = step.error.partition(" (line")[0]
    assert step == expected


def test_parallel_calls_come_together_and_get_their_results() -> None:
    code = "const [a, b] = await Promise.all([tools.get({n: 1}), tools.note('hi')]); text(a.k + b)"
    with open_program(code) as program:
        assert program.start() == ProgramStep(calls=[ToolRequest(0, "get", '{"n":1}'), ToolRequest(1, "note", '"hi"')])
        assert program.resume(CallResults([CallResult(0, '{"k":1}'), CallResult(1, '"!"')])) == done("1!")


def test_failed_call_throws_an_error_that_can_be_caught() -> None:
    code = "try { await tools.get({}) } catch (error) { text('caught', error.message) }"
    assert run(code, [CallResult(0, '"no luck"', is_error=True)]) == done("caught no luck")
    assert run("await tools.get({})", [CallResult(0, '"no luck"', is_error=True)]) == done(error="Error: no luck")


def test_call_that_is_not_awaited_is_made() -> None:
    code = "tools.get({n: 1}); text('end')"
    assert run(code) == ProgramStep(calls=[ToolRequest(0, "get", '{"n":1}')])
    assert run(code, [CallResult(0, '"x"')]) == done("end")


def test_number_and_size_of_calls_are_limited() -> None:
    many = "await Promise.all([1, 2, 3, 4, 5].map((n) => tools.get({n})))"
    assert run(many).error == "RangeError: A program can make at most 4 calls. (line 1)"
    assert run("await tools.get({t: 'x'.repeat(200)})").error.startswith("RangeError: The arguments of all calls are")


def test_random_numbers_are_the_same_in_every_run() -> None:
    code = "text(Math.random(), Math.random())"
    first = run(code).output
    assert first == run(code).output
    assert first != run(code, seed=8).output


def test_program_has_no_functions_of_the_host() -> None:
    names = (
        "console setTimeout require process fetch WebAssembly Atomics SharedArrayBuffer Temporal XMLHttpRequest Deno"
    )
    code = f"text('{names}'.split(' ').filter((name) => globalThis[name] !== undefined).length)"
    assert run(code) == done("0")
    reach = (
        "text((await import('fs').catch((error) => error.message)), globalThis.constructor.constructor('return 1')())"
    )
    assert run(reach) == done("Not supported 1")


@pytest.mark.parametrize(
    "code",
    [
        "JSON.stringify = () => { throw 1 }; Map.prototype.get = () => 1; Array.prototype.push = () => 1; text(1)",
        "Promise.prototype.then = () => 1; text(1)",
        "Object.prototype.then = () => 1; text(1)",
        "globalThis.text = null; globalThis.tools = null; delete globalThis.Promise; return 1",
    ],
)
def test_program_that_changes_its_environment_harms_only_itself(code: str) -> None:
    assert run(code).is_done


@pytest.mark.parametrize(
    "step",
    [
        "{is_done: true, output: 'x'.repeat(201)}",
        "{is_done: true, error: 'x'.repeat(101)}",
        "{calls: Array.from({length: 5}, (_, i) => [i, 'get', '{}'])}",
        "{calls: [[0, 'get', 'x'.repeat(101)]]}",
        "{calls: [[0, 'get', '{}'], [0, 'get', '{}']]}",
        "{calls: [[0, 'other', '{}']]}",
    ],
)
def test_step_that_a_program_has_forged_ends_it(step: str) -> None:
    code = f"Object.prototype.toJSON = function () {{ return 'is_done' in this ? {step} : this }}"
    assert run(code) == done(error="The program broke its environment: ValueError")


def test_memory_limit_ends_the_program() -> None:
    step = run("const kept = []; while (true) kept.push(new Array(1000).fill(1.5))")
    assert step == done(error="The program needs more memory than it may use.")

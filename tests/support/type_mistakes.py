"""Lines of a program that type checkers must refuse. The names are those of `typed_agent.py`."""

from pathlib import Path

HEAD = """\
from typed_agent import Offer, Warehouse, count_stock, make_instructions

from antiphon import Agent, ToolContext


async def make_mistakes(
    agent: Agent[Warehouse, Offer], warehouse: Warehouse, context: ToolContext[Warehouse]
) -> None:
"""
MISTAKES = (
    'await agent.run("Go.", deps="Bern")',
    'await agent.run("Go.", dep=warehouse)',
    'agent.run_sync("Go.", deps=warehouse, ledgr=None)',
    'agent.run_stream("Go.", deps=warehouse, limits=3)',
    'agent.resume_sync("run_1", deps=warehouse, aprovals={})',
    'Agent(model="m", instrutions="Be brief.")',
    'Agent(model="m", deps_type=str, instructions=make_instructions)',
    '(await agent.run("Go.", deps=warehouse)).output.colour',
    'count_stock(context, product="chair", colour="red")',
    "count_stock(context, 7)",
    'Agent(model="m", output_type=Offer, output_mode="yaml")',
)
PROGRAM = HEAD + "".join(f"    {line}\n" for line in MISTAKES)
FIRST_LINE = HEAD.count("\n") + 1
"""The number of the line with the first mistake."""


def write_programs(folder: Path) -> tuple[Path, Path]:
    """Write the typed program and the one with mistakes to a folder, and return their paths."""
    typed, mistakes = folder / "typed_agent.py", folder / "mistakes.py"
    typed.write_text(Path(__file__).with_name("typed_agent.py").read_text("utf-8"), "utf-8")
    mistakes.write_text(PROGRAM, "utf-8")
    return typed, mistakes

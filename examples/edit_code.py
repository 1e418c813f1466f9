"""An agent that edits code and returns its changes as a FileBundle. It does not write to disk.

    python examples/edit_code.py --url http://127.0.0.1:8484/v1 --model NAME --folder src "Rename parse to read."

Its tools read the folder and write to a draft in memory. The example prints the draft as the envelope's `FileBundle`:
the action (create, update or delete) and the new contents of each file.

For real use it needs a model that edits code over many turns, such as gpt-5, Claude Sonnet 4.5 or Qwen3-Coder-30B. The
embedded model is too small for it.
"""

import argparse
import asyncio
import os
from pathlib import Path

from antiphon import Agent, Limits, Tool, tool
from antiphon.agent.execute.envelope import BundledFile, FileBundle, encode

INSTRUCTIONS = """\
You edit the code of one folder. Read a file before you change it, and write it whole. When everything is done, say in
one sentence what you have changed.
"""


class Draft:
    """A copy of the folder with the agent's changes. Paths outside the folder are rejected."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._changed: dict[str, str | None] = {}

    def resolve(self, path: str) -> Path:
        resolved = (self._root / path).resolve()
        if not resolved.is_relative_to(self._root):
            raise PermissionError(f"{path} is outside the folder")
        return resolved

    def list(self) -> list[str]:
        existing = {str(file.relative_to(self._root)) for file in self._root.rglob("*") if file.is_file()}
        return sorted((existing | set(self._changed)) - {path for path, text in self._changed.items() if text is None})

    def read(self, path: str) -> str:
        text = self._changed[path] if path in self._changed else self.resolve(path).read_text("utf-8")
        if text is None:
            raise FileNotFoundError(f"{path} was deleted")
        return text

    def change(self, path: str, text: str | None) -> None:
        self.resolve(path)
        self._changed[path] = text

    def bundle(self) -> FileBundle:
        return FileBundle(
            files=[
                BundledFile(action=self._action(path), path=path, contents=text)
                for path, text in sorted(self._changed.items())
            ]
        )

    def _action(self, path: str) -> str:
        if self._changed[path] is None:
            return "delete"
        return "update" if self.resolve(path).exists() else "create"


def make_tools(draft: Draft) -> list[Tool]:
    @tool(repeatable=True)
    def list_files() -> list[str]:
        """List the files of the folder."""
        return draft.list()

    @tool(repeatable=True)
    def read_file(path: str) -> str:
        """Read a file."""
        return draft.read(path)

    @tool
    def write_file(path: str, contents: str) -> str:
        """Write a complete file. An existing file is replaced."""
        draft.change(path, contents)
        return "written"

    @tool
    def delete_file(path: str) -> str:
        """Delete a file."""
        draft.change(path, None)
        return "deleted"

    return [list_files, read_file, write_file, delete_file]


async def edit(task: str, *, folder: Path, url: str, model: str, key: str | None) -> tuple[str, FileBundle]:
    draft = Draft(folder)
    agent = Agent(
        model=model,
        base_url=url,
        api_key=key,
        instructions=INSTRUCTIONS,
        tools=make_tools(draft),
        limits=Limits(turns=30, seconds=600),
    )
    try:
        outcome = await agent.run(task)
    finally:
        await agent.close()
    if outcome.error is not None:
        raise SystemExit(outcome.error.message)
    return outcome.text, draft.bundle()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("task")
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--url", default="http://127.0.0.1:8484/v1")
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    key = os.environ.get("OPENAI_API_KEY")
    text, bundle = asyncio.run(
        edit(arguments.task, folder=arguments.folder, url=arguments.url, model=arguments.model, key=key)
    )
    print(text)
    print(encode(bundle).decode())

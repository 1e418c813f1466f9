"""CONTRIBUTING.md: the layers and folders that it lists are those of the source."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text("utf-8")


def test_layers_are_those_that_import_linter_checks() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    _, _, after = TEXT.partition("Imports go down only:\n\n")
    block, _, _ = after.partition("\n\n")
    assert [line.strip() for line in block.splitlines()] == [layer for layer in layers if layer != "__main__"]


def test_layout_lists_every_top_level_module_of_the_package() -> None:
    _, _, after = TEXT.partition("    src/antiphon/\n")
    block, _, _ = after.partition("    tests/")
    listed = set(re.findall(r"^ {6}([\w.]+)/? ", block, re.MULTILINE)) | set(
        re.findall(r"^ {6}(\w+)/$", block, re.MULTILINE)
    )
    package = ROOT / "src" / "antiphon"
    modules = {path.name for path in package.glob("*.py") if not path.name.startswith("__")}
    packages = {path.parent.name for path in package.glob("*/__init__.py")}
    assert listed == modules | packages

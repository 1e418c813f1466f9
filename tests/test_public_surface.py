"""The public names of the package, and the modules that importing it loads."""

import subprocess
import sys

import antiphon


def test_public_names_equal_all() -> None:
    public = {name for name in vars(antiphon) if not name.startswith("_")} - {"TYPE_CHECKING", "Any"}
    modules = {name for name in public if type(getattr(antiphon, name)).__name__ == "module"}
    assert public - modules <= set(antiphon.__all__)
    assert all(hasattr(antiphon, name) for name in antiphon.__all__)


def test_importing_the_package_loads_no_server_and_no_model() -> None:
    heavy = "{'uvicorn', 'uvloop', 'asyncio', 'xllamacpp', 'sqlite3', 'argparse', 'httptools', 'cryptography'}"
    code = f"import sys, antiphon, antiphon.protocol.codec; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

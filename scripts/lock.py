"""Write requirements.lock: the exact version of every package, and the hashes of all files of its release.

    python scripts/lock.py [--upgrade | --upgrade-package NAME ...]

The resolver is uv, in a temporary environment. Locked versions stay, unless an option upgrades them. The result names
no index. It is written only if every supported platform can install it without compiling.
"""

import itertools
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

RESOLVER = "uv==0.13.7"
ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = (
    "x86_64-manylinux_2_31",
    "aarch64-manylinux_2_31",
    "aarch64-apple-darwin",
)


def install_resolver(directory: Path) -> Path:
    """Create an environment with the resolver in it, and return the path of the resolver."""
    venv.create(directory, with_pip=True)
    subprocess.run([directory / "bin" / "python", "-m", "pip", "install", "--quiet", RESOLVER], check=True)
    return directory / "bin" / "uv"


def compile_requirements(uv: Path, *options: str | Path) -> None:
    subprocess.run([uv, "pip", "compile", "--quiet", *options], cwd=ROOT, check=True)


def resolve(uv: Path, output: Path, options: list[str]) -> None:
    """Resolve for all platforms at once. If `output` exists, its versions stay."""
    content = (
        "--extra=embedded",
        "--extra=mcp",
        "--group=dev",
        "--group=weights",
        "--universal",
        f"--python-version={PYTHONS[0]}",
    )
    form = ("--generate-hashes", "--no-emit-index-url", "--custom-compile-command=make lock")
    compile_requirements(uv, "pyproject.toml", *content, *form, *options, "--output-file", output)


def check_wheels(uv: Path, lock: Path) -> None:
    """Exit with an error if a supported platform would have to compile a package."""
    for python, platform in itertools.product(PYTHONS, PLATFORMS):
        target = (f"--python-version={python}", f"--python-platform={platform}")
        compile_requirements(uv, lock, "--no-deps", "--only-binary=:all:", *target, "--output-file", os.devnull)
        print(f"  {platform}, Python {python}: a wheel for every package")


def check_addresses(lock: Path) -> None:
    """Exit with an error if the lock names an index. The index is a choice of the installing machine."""
    for number, line in enumerate(lock.read_text().splitlines(), start=1):
        if re.search(r"://|--(index|extra-index|find-links|trusted-host)", line):
            raise SystemExit(f"{lock.name}:{number}: the line names an index: {line.strip()}")


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        uv = install_resolver(Path(scratch) / "environment")
        draft = Path(scratch) / LOCK.name
        if LOCK.exists():
            draft.write_bytes(LOCK.read_bytes())
        resolve(uv, draft, sys.argv[1:])
        check_addresses(draft)
        check_wheels(uv, draft)
        LOCK.write_bytes(draft.read_bytes())
    print(f"wrote {LOCK.name}")


if __name__ == "__main__":
    main()

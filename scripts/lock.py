"""Write the lock files: the exact version of every package, and the hashes of all files of its release.

    python scripts/lock.py [--upgrade | --upgrade-package NAME ...]

requirements.lock has what `make setup` installs, and requirements-extras.lock what `make extras` adds to it. The
resolver is uv, in a temporary environment. Locked versions stay, unless an option upgrades them. The result names no
index. It is written only if every supported platform can install it without compiling.
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
EXTRAS_LOCK = ROOT / "requirements-extras.lock"
BASE_CONTENT = ("--extra=embedded", "--extra=mcp", "--group=dev", "--group=weights")
EXTRAS_CONTENT = ("--extra=search", "--extra=code", "--extra=postgres", "--extra=otel", "--group=extras")
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
    # The oldest macOS that onnxruntime has wheels for.
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}
    subprocess.run([uv, "pip", "compile", "--quiet", *options], cwd=ROOT, check=True, env=environment)


def resolve(uv: Path, output: Path, content: tuple[str, ...], options: list[str]) -> None:
    """Resolve for all platforms at once. If `output` exists, its versions stay."""
    form = ("--generate-hashes", "--no-emit-index-url", "--custom-compile-command=make lock")
    target = ("--universal", f"--python-version={PYTHONS[0]}")
    compile_requirements(uv, "pyproject.toml", *content, *target, *form, *options, "--output-file", output)


def remove_locked(lock: Path, base: Path) -> None:
    """Remove the packages from a lock that the base lock has, too."""
    locked = set(re.findall(r"^[A-Za-z0-9._-]+==[^ ]+", base.read_text(), flags=re.MULTILINE))
    header, *entries = re.split(r"^(?=[A-Za-z0-9])", lock.read_text(), flags=re.MULTILINE)
    lock.write_text(header + "".join(entry for entry in entries if entry.split(" ", 1)[0] not in locked))


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
        draft, extras = Path(scratch) / LOCK.name, Path(scratch) / EXTRAS_LOCK.name
        for lock, copy in ((LOCK, draft), (EXTRAS_LOCK, extras)):
            if lock.exists():
                copy.write_bytes(lock.read_bytes())
        options = sys.argv[1:]
        resolve(uv, draft, BASE_CONTENT, options)
        resolve(uv, extras, EXTRAS_CONTENT, [*options, "--constraint", str(draft)])
        remove_locked(extras, draft)
        for lock in (draft, extras):
            check_addresses(lock)
            check_wheels(uv, lock)
        LOCK.write_bytes(draft.read_bytes())
        EXTRAS_LOCK.write_bytes(extras.read_bytes())
    print(f"wrote {LOCK.name} and {EXTRAS_LOCK.name}")


if __name__ == "__main__":
    main()

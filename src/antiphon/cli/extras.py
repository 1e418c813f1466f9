"""Find the optional packages that are not installed."""

import re
from importlib.metadata import PackageNotFoundError, distribution

_REQUIREMENT = re.compile(r"(?P<package>[\w.-]+).*;.*\bextra\s*==\s*[\"'](?P<extra>[\w-]+)[\"']")


def find_missing_packages() -> dict[str, list[str]]:
    """Return the missing packages of each extra. An extra that is installed has none."""
    missing: dict[str, list[str]] = {}
    for requirement in distribution("antiphon").requires or []:
        match = _REQUIREMENT.match(requirement)
        if match is None:
            continue
        packages = missing.setdefault(match["extra"], [])
        if not _is_installed(match["package"]):
            packages.append(match["package"])
    return missing


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True

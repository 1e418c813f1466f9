"""The package xllamacpp, which contains llama.cpp."""

from importlib.util import find_spec
from typing import Any

from antiphon.errors import ConfigError

_COMMAND = "pip install 'antiphon[embedded]'"


def require_library() -> None:
    """Raise ConfigError if the package is not installed. It is not imported, because that takes long."""
    if find_spec("xllamacpp") is None:
        raise ConfigError(
            "The embedded model needs xllamacpp, which is not installed. Configure another backend, or install it "
            f"with: {_COMMAND}"
        )


def import_library() -> Any:
    """Return the module. Raises ConfigError with the remedy if the package, or a library of the system, is missing."""
    try:
        import xllamacpp
    except ModuleNotFoundError as error:
        raise ConfigError(f"The embedded model needs xllamacpp ({error}). Install it with: {_COMMAND}") from error
    except ImportError as error:
        remedy = ""
        if "libgomp" in str(error):
            remedy = " Install it with 'apt install libgomp1' (Debian, Ubuntu) or 'dnf install libgomp' (Fedora, RHEL)."
        raise ConfigError(f"The embedded model needs a library that this system lacks: {error}.{remedy}") from error
    return xllamacpp

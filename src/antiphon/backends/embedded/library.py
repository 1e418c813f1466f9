"""The package xllamacpp, which contains llama.cpp."""

from typing import Any

from antiphon.errors import ConfigError


def import_library() -> Any:
    """Return the module. Raises ConfigError with the remedy if the package, or a library of the system, is missing."""
    try:
        import xllamacpp
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"The embedded model needs xllamacpp ({error}). Install it with: pip install 'antiphon[embedded]'"
        ) from error
    except ImportError as error:
        remedy = ""
        if "libgomp" in str(error):
            remedy = " Install it with 'apt install libgomp1' (Debian, Ubuntu) or 'dnf install libgomp' (Fedora, RHEL)."
        raise ConfigError(f"The embedded model needs a library that this system lacks: {error}.{remedy}") from error
    return xllamacpp

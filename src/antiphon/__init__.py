"""Antiphon: the whole Responses API on any model, in one process."""

from antiphon.errors import AntiphonError, ConfigError, InvalidRequest, ServerError

__all__ = ["AntiphonError", "ConfigError", "InvalidRequest", "ServerError", "__version__"]


def __getattr__(name: str) -> str:
    # Reading the installed version takes longer than importing everything else here.
    if name == "__version__":
        from importlib.metadata import version

        return version("antiphon")
    raise AttributeError(f"module 'antiphon' has no attribute {name!r}")

"""Tools by name: out of the modules that settings and command lines point to."""

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from antiphon.errors import ConfigError
from antiphon.tools.base import Tool


def load_tools(names: Iterable[str], *, directory: Path | None = None) -> list[Tool]:
    """The tools of `module`, or the one of `module:name`. A module may also be the path of a file, `tools.py`.

    Modules and files are looked for in `directory` too, and in the working directory if there is none. Raises
    ConfigError.
    """
    root = (directory or Path.cwd()).absolute()
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    found: list[Tool] = []
    for name in names:
        place, _, attribute = name.partition(":")
        module = _load_file(root / place) if place.endswith(".py") else _load_module(place)
        found += [_find_one(module, attribute, name)] if attribute else _find_all(module, name)
    return found


def _load_module(place: str) -> ModuleType:
    if not place or not all(part.isidentifier() for part in place.split(".")):
        raise ConfigError(f"'{place}' is not the name of a module with tools: write module, module:name or file.py.")
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            raise ConfigError(f"There is no module '{place}' to load tools from.") from None
        raise _broken(place, error) from error
    except Exception as error:
        raise _broken(place, error) from error


def _load_file(path: Path) -> ModuleType:
    name = f"_tools_of_{path.stem}_{abs(hash(path)):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"There is no file {path} to load tools from.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _broken(str(path), error) from error
    return module


def _broken(place: str, error: Exception) -> ConfigError:
    return ConfigError(f"The tools of '{place}' cannot be loaded: {type(error).__name__}: {error}")


def _find_all(module: ModuleType, name: str) -> list[Tool]:
    """Each once, in the order in which the module has them."""
    found = {id(value): value for value in vars(module).values() if isinstance(value, Tool)}
    if not found:
        raise ConfigError(f"There are no tools in '{name}': decorate functions with @tool.")
    return list(found.values())


def _find_one(module: ModuleType, attribute: str, name: str) -> Tool:
    value: Any = getattr(module, attribute, None)
    if value is None:
        tools = [known for known, each in vars(module).items() if isinstance(each, Tool)]
        raise ConfigError(f"'{name}' is not there. Its module has the tools: {', '.join(tools) or 'none'}.")
    if not isinstance(value, Tool):
        raise ConfigError(f"'{name}' is not a tool: decorate it with @tool.")
    return value

"""Load tools from modules and files that settings and command lines name."""

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
    """Return all tools of `module`, or the one that `module:name` names. A module may also be a file, `tools.py`.

    Modules and files are also looked up in `directory` (default: the working directory). Raises ConfigError.
    """
    root = (directory or Path.cwd()).absolute()
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    found: list[Tool] = []
    for name in names:
        source, _, attribute = name.partition(":")
        module = _load_file(root / source) if source.endswith(".py") else _load_module(source)
        found += [_find_tool(module, attribute, name)] if attribute else _find_all_tools(module, name)
    return found


def _load_module(name: str) -> ModuleType:
    if not name or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"'{name}' is not a valid module name: use module, module:name or file.py.")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(f"There is no module '{name}' to load tools from.") from None
        raise _loading_error(name, error) from error
    except (Exception, SystemExit) as error:
        raise _loading_error(name, error) from error


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
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _loading_error(str(path), error) from error
    return module


def _loading_error(source: str, error: BaseException) -> ConfigError:
    return ConfigError(f"Cannot load tools from '{source}': {type(error).__name__}: {error}")


def _find_all_tools(module: ModuleType, name: str) -> list[Tool]:
    """Return each tool once, in the order of definition."""
    found = {id(value): value for value in vars(module).values() if isinstance(value, Tool)}
    if not found:
        raise ConfigError(f"There are no tools in '{name}': decorate functions with @tool.")
    return list(found.values())


def _find_tool(module: ModuleType, attribute: str, name: str) -> Tool:
    value: Any = getattr(module, attribute, None)
    if value is None:
        tools = [known for known, each in vars(module).items() if isinstance(each, Tool)]
        raise ConfigError(f"There is no tool '{name}'. Tools of this module: {', '.join(tools) or 'none'}.")
    if not isinstance(value, Tool):
        raise ConfigError(f"'{name}' is not a tool: decorate it with @tool.")
    return value

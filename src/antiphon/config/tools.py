"""The tables of the settings for hosted tools."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

Seconds = Annotated[float, Meta(gt=0, le=86400)]
Url = Annotated[str, Meta(pattern="^https?://[^\\s?#@]+$")]
Text = Annotated[str, Meta(min_length=1)]


class McpServerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[mcp_servers.NAME]`: an MCP server at `url`, or a program with `command`, `args` and `env`.

    `env` adds to the environment of the program. `timeout` is for one call of a tool, in seconds.
    """

    url: Url | None = None
    command: Text | None = None
    args: tuple[str, ...] = ()
    env: dict[str, str] = {}
    headers: dict[str, str] = {}
    authorization: Text | None = None
    description: str | None = None
    timeout: Seconds = 300.0

    def __post_init__(self) -> None:
        if (self.url is None) == (self.command is None):
            raise ValueError("set either url or command")
        if self.url is None and (self.headers or self.authorization is not None):
            raise ValueError("headers and authorization need url")
        if self.command is None and (self.args or self.env):
            raise ValueError("args and env need command")

    def __repr__(self) -> str:
        names = [name for name in self.__struct_fields__ if getattr(self, name)]
        return f"McpServerSettings(<{', '.join(names)}>)"


class WebSearchSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[web_search]`: the search provider. `base_url` is needed for searxng, `api_key` for the others.

    `timeout` is for one search or one page, in seconds. `page_bytes` limits the size of a page.
    """

    provider: Literal["searxng", "brave", "tavily", "exa"]
    base_url: Url | None = None
    api_key: Text | None = None
    timeout: Seconds = 20.0
    page_bytes: Annotated[int, Meta(ge=1024)] = 4 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.provider == "searxng" and self.base_url is None:
            raise ValueError("searxng needs base_url, the address of the instance")
        if self.provider != "searxng" and self.api_key is None:
            raise ValueError(f"{self.provider} needs api_key_env, the name of an environment variable with the key")

    def __repr__(self) -> str:
        return f"WebSearchSettings(provider={self.provider!r}, base_url={self.base_url!r})"


class ImageGenerationSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[image_generation]`: an OpenAI-compatible server with `/images/generations` and `/images/edits`.

    `model` is used unless a request names another one. With `stream` off, no partial images are requested.
    `timeout` is for one image, in seconds.
    """

    base_url: Url
    model: Text
    api_key: Text | None = None
    stream: bool = True
    timeout: Seconds = 300.0

    def __repr__(self) -> str:
        return f"ImageGenerationSettings(base_url={self.base_url!r}, model={self.model!r})"


class ProgramSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[programs]`: the limits of the programs of programmatic_tool_calling.

    `seconds` is the time in which a program itself runs, without its calls. `memory_bytes` is its heap.
    """

    enabled: bool = True
    seconds: Annotated[float, Meta(gt=0, le=3600)] = 10
    memory_bytes: Annotated[int, Meta(ge=16 * 1024 * 1024)] = 128 * 1024 * 1024
    output_chars: Annotated[int, Meta(ge=1, le=10 * 1024 * 1024)] = 256 * 1024
    calls: Annotated[int, Meta(ge=1, le=10_000)] = 256
    processes: Annotated[int, Meta(ge=1)] = 8
    queued: Annotated[int, Meta(ge=1)] = 64
    queue_seconds: Annotated[float, Meta(gt=0, le=86400)] = 300


class CodeInterpreterSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table `[code_interpreter]`: the sandbox, and the limits of code, containers and programs."""

    enabled: bool = True
    sandbox: Literal["wasm", "bubblewrap"] = "wasm"
    cache_dir: str = ""
    compile_at_start: bool = True
    call_seconds: Annotated[float, Meta(gt=0, le=3600)] = 60
    max_memory: Literal["1g", "4g", "16g", "64g"] = "4g"
    output_bytes: Annotated[int, Meta(ge=1)] = 256 * 1024
    images: Annotated[int, Meta(ge=0, le=100)] = 10
    image_bytes: Annotated[int, Meta(ge=0)] = 4 * 1024 * 1024
    idle_minutes: Annotated[int, Meta(ge=1, le=1440)] = 20
    interpreters: Annotated[int, Meta(ge=1)] = 8
    queued: Annotated[int, Meta(ge=1)] = 64
    queue_seconds: Annotated[float, Meta(gt=0, le=86400)] = 300
    containers: Annotated[int, Meta(ge=1)] = 100
    container_files: Annotated[int, Meta(ge=1)] = 1000
    container_bytes: Annotated[int, Meta(ge=1)] = 256 * 1024 * 1024
    project_bytes: Annotated[int, Meta(ge=1)] = 2 * 1024 * 1024 * 1024

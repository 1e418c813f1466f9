"""Stream events of the hosted tools: search, code, images, shell, MCP and audio."""

from typing import Any

from antiphon.protocol.events import Event, ItemEvent
from antiphon.protocol.json_text import JsonObject


class AudioDelta(Event, tag="response.audio.delta"):
    delta: str


class AudioDone(Event, tag="response.audio.done"):
    pass


class AudioTranscriptDelta(Event, tag="response.audio.transcript.delta"):
    delta: str


class AudioTranscriptDone(Event, tag="response.audio.transcript.done"):
    pass


class CodeInterpreterCodeDelta(ItemEvent, tag="response.code_interpreter_call_code.delta"):
    delta: str
    obfuscation: str | None = None


class CodeInterpreterCodeDone(ItemEvent, tag="response.code_interpreter_call_code.done"):
    code: str


class CodeInterpreterInProgress(ItemEvent, tag="response.code_interpreter_call.in_progress"):
    pass


class CodeInterpreterInterpreting(ItemEvent, tag="response.code_interpreter_call.interpreting"):
    pass


class CodeInterpreterCompleted(ItemEvent, tag="response.code_interpreter_call.completed"):
    pass


class FileSearchInProgress(ItemEvent, tag="response.file_search_call.in_progress"):
    pass


class FileSearchSearching(ItemEvent, tag="response.file_search_call.searching"):
    pass


class FileSearchCompleted(ItemEvent, tag="response.file_search_call.completed"):
    pass


class WebSearchInProgress(ItemEvent, tag="response.web_search_call.in_progress"):
    pass


class WebSearchSearching(ItemEvent, tag="response.web_search_call.searching"):
    pass


class WebSearchCompleted(ItemEvent, tag="response.web_search_call.completed"):
    pass


class ImageGenerationInProgress(ItemEvent, tag="response.image_generation_call.in_progress"):
    pass


class ImageGenerationGenerating(ItemEvent, tag="response.image_generation_call.generating"):
    pass


class ImageGenerationPartialImage(ItemEvent, tag="response.image_generation_call.partial_image"):
    partial_image_b64: str
    partial_image_index: int
    background: str | None = None
    output_format: str | None = None
    quality: str | None = None
    size: str | None = None


class ImageGenerationCompleted(ItemEvent, tag="response.image_generation_call.completed"):
    pass


class McpCallArgumentsDelta(ItemEvent, tag="response.mcp_call_arguments.delta"):
    delta: str
    obfuscation: str | None = None


class McpCallArgumentsDone(ItemEvent, tag="response.mcp_call_arguments.done"):
    arguments: str


class McpCallInProgress(ItemEvent, tag="response.mcp_call.in_progress"):
    pass


class McpCallCompleted(ItemEvent, tag="response.mcp_call.completed"):
    pass


class McpCallFailed(ItemEvent, tag="response.mcp_call.failed"):
    pass


class McpListToolsInProgress(ItemEvent, tag="response.mcp_list_tools.in_progress"):
    pass


class McpListToolsCompleted(ItemEvent, tag="response.mcp_list_tools.completed"):
    pass


class McpListToolsFailed(ItemEvent, tag="response.mcp_list_tools.failed"):
    pass


class CommandEvent(Event):
    """An event about one command of a shell call."""

    output_index: int
    command_index: int


class ShellCommandAdded(CommandEvent, tag="response.shell_call_command.added"):
    command: str


class ShellCommandDelta(CommandEvent, tag="response.shell_call_command.delta"):
    delta: str
    obfuscation: str | None = None


class ShellCommandDone(CommandEvent, tag="response.shell_call_command.done"):
    command: str


class ShellOutputDelta(CommandEvent, tag="response.shell_call_output_content.delta"):
    item_id: str
    delta: JsonObject


class ShellOutputDone(CommandEvent, tag="response.shell_call_output_content.done"):
    item_id: str
    output: list[JsonObject]


HOSTED_EVENTS: tuple[type[Any], ...] = (
    AudioDelta,
    AudioDone,
    AudioTranscriptDelta,
    AudioTranscriptDone,
    CodeInterpreterCodeDelta,
    CodeInterpreterCodeDone,
    CodeInterpreterInProgress,
    CodeInterpreterInterpreting,
    CodeInterpreterCompleted,
    FileSearchInProgress,
    FileSearchSearching,
    FileSearchCompleted,
    WebSearchInProgress,
    WebSearchSearching,
    WebSearchCompleted,
    ImageGenerationInProgress,
    ImageGenerationGenerating,
    ImageGenerationPartialImage,
    ImageGenerationCompleted,
    McpCallArgumentsDelta,
    McpCallArgumentsDone,
    McpCallInProgress,
    McpCallCompleted,
    McpCallFailed,
    McpListToolsInProgress,
    McpListToolsCompleted,
    McpListToolsFailed,
    ShellCommandAdded,
    ShellCommandDelta,
    ShellCommandDone,
    ShellOutputDelta,
    ShellOutputDone,
)

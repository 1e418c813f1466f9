"""Samples of parts, annotations, tools, tool choices and parameters."""

from typing import Any

from behaviour.item_samples import FUNCTION, FUNCTION_ECHO, SCREENSHOT, Json

ANNOTATIONS: dict[str, Json] = {
    "file_citation": {"type": "file_citation", "file_id": "file_1", "filename": "a.txt", "index": 1},
    "url_citation": {
        "type": "url_citation",
        "url": "https://example.org",
        "title": "t",
        "start_index": 0,
        "end_index": 1,
    },
    "container_file_citation": {
        "type": "container_file_citation",
        "container_id": "cntr_1",
        "file_id": "file_1",
        "filename": "a.txt",
        "start_index": 0,
        "end_index": 1,
    },
    "file_path": {"type": "file_path", "file_id": "file_1", "index": 1},
}

PARTS: dict[str, Json] = {
    "input_text": {"type": "input_text", "text": "t", "prompt_cache_breakpoint": {"mode": "explicit"}},
    "input_image": {"type": "input_image", "detail": "low", "image_url": "https://example.org/a.png"},
    "input_file": {"type": "input_file", "file_data": "AA==", "filename": "a.txt"},
    "input_audio": {"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}},
    "input_video": {"type": "input_video", "video_url": "https://example.org/a.mp4"},
    "output_text": {
        "type": "output_text",
        "text": "t",
        "annotations": [],
        "logprobs": [{"token": "t", "logprob": -1.0, "bytes": [116], "top_logprobs": []}],
    },
    "refusal": {"type": "refusal", "refusal": "no"},
    "text": {"type": "text", "text": "t"},
    "summary_text": {"type": "summary_text", "text": "t"},
    "reasoning_text": {"type": "reasoning_text", "text": "t"},
    "computer_screenshot": SCREENSHOT,
}

TOOLS: dict[str, Json] = {
    "custom": {"type": "custom", "name": "draw", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}},
    "namespace": {"type": "namespace", "name": "n", "description": "d", "tools": [FUNCTION]},
    "tool_search": {"type": "tool_search", "execution": "client"},
    "programmatic_tool_calling": {"type": "programmatic_tool_calling"},
    "computer": {"type": "computer"},
    "computer_use_preview": {
        "type": "computer_use_preview",
        "display_height": 1,
        "display_width": 1,
        "environment": "browser",
    },
    "local_shell": {"type": "local_shell"},
    "shell": {"type": "shell", "environment": {"type": "local"}},
    "apply_patch": {"type": "apply_patch"},
    "file_search": {"type": "file_search", "vector_store_ids": ["vs_1"]},
    "mcp": {"type": "mcp", "server_label": "l", "server_url": "https://example.org", "require_approval": "never"},
    "code_interpreter": {"type": "code_interpreter", "container": {"type": "auto"}},
    "image_generation": {"type": "image_generation", "size": "1024x1024"},
    "web_search": {"type": "web_search", "search_context_size": "low"},
    "web_search_2025_08_26": {"type": "web_search_2025_08_26"},
    "web_search_preview": {"type": "web_search_preview"},
    "web_search_preview_2025_03_11": {"type": "web_search_preview_2025_03_11"},
}

# By tool: the model's function call, and the type of the item that the client gets.
CALLED: dict[str, tuple[Json, str]] = {
    "custom": ({"name": "draw", "arguments": {"input": "aa"}}, "custom_tool_call"),
    "namespace": ({"name": "n__look_up", "arguments": {}}, "function_call"),
    "tool_search": ({"name": "tool_search", "arguments": {"query": "x"}}, "tool_search_call"),
    "computer": ({"name": "computer", "arguments": {"actions": [{"type": "wait"}]}}, "computer_call"),
    "computer_use_preview": ({"name": "computer", "arguments": {"action": {"type": "wait"}}}, "computer_call"),
    "local_shell": ({"name": "local_shell", "arguments": {"command": ["ls"]}}, "local_shell_call"),
    "shell": ({"name": "shell", "arguments": {"commands": ["ls"]}}, "shell_call"),
    "apply_patch": ({"name": "apply_patch", "arguments": {"type": "delete_file", "path": "a"}}, "apply_patch_call"),
}

# The forms of `tool_choice`. A form that is not listed has only its type.
CHOICES: dict[str, Any] = {
    "none": "none",
    "auto": "auto",
    "required": "required",
    "function": {"type": "function", "name": "look_up"},
    "allowed_tools": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look_up"}]},
    "custom": {"type": "custom", "name": "draw"},
    "mcp": {"type": "mcp", "server_label": "l", "name": "t"},
}

SCHEMA: Json = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
# No value is the default.
PARAMETERS: dict[str, Any] = {
    "access_programs": {"cyber": "standard"},
    "background": True,
    "client_metadata": {"session": "s"},
    "context_management": [{"type": "compaction", "compact_threshold": 1000}],
    "frequency_penalty": 0.5,
    "image": {"context_compression": "enabled"},
    "instructions": "Be kind.",
    "max_output_tokens": 99,
    "max_tool_calls": 3,
    "metadata": {"k": "v"},
    "model": "another",
    "moderation": {"model": "m"},
    "parallel_tool_calls": False,
    "presence_penalty": 0.5,
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "low", "summary": "auto"},
    "safety_identifier": "s",
    "service_tier": "flex",
    "store": False,
    "stream_options": {"include_obfuscation": False},
    "temperature": 0.5,
    "text": {"format": {"type": "json_object"}, "verbosity": "low"},
    "tool_choice": "none",
    "tools": [FUNCTION],
    "top_logprobs": 2,
    "top_p": 0.5,
    "truncation": "auto",
    "type": "response.create",
    "user": "u",
}
ECHOES: dict[str, Any] = {"tools": [FUNCTION_ECHO]}

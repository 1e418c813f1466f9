"""One item of every type as a client sends it, with optional fields."""

from typing import Any

Json = dict[str, Any]

FUNCTION: Json = {"type": "function", "name": "look_up", "description": "d", "parameters": {"type": "object"}}
FUNCTION_ECHO = FUNCTION | {"strict": None}
SCREENSHOT: Json = {"type": "computer_screenshot", "image_url": "data:image/png;base64,AA==", "detail": "auto"}

ITEMS: dict[str, Json] = {
    "message": {
        "type": "message",
        "id": "msg_s",
        "role": "assistant",
        "status": "completed",
        "phase": "commentary",
        "content": [{"type": "output_text", "text": "I look it up.", "annotations": []}],
    },
    "file_search_call": {
        "type": "file_search_call",
        "id": "fs_s",
        "status": "completed",
        "queries": ["q"],
        "results": [{"file_id": "file_1", "filename": "a.txt", "score": 0.5, "text": "t", "attributes": {"k": 1}}],
    },
    "computer_call": {
        "type": "computer_call",
        "id": "cu_s",
        "call_id": "call_computer",
        "status": "completed",
        "action": {"type": "click", "button": "left", "x": 1, "y": 2},
        "pending_safety_checks": [{"id": "sc_1", "code": "c", "message": "m"}],
    },
    "computer_call_output": {
        "type": "computer_call_output",
        "id": "cuo_s",
        "call_id": "call_computer",
        "status": "completed",
        "output": SCREENSHOT,
        "acknowledged_safety_checks": [{"id": "sc_1"}],
    },
    "web_search_call": {
        "type": "web_search_call",
        "id": "ws_s",
        "status": "completed",
        "action": {"type": "search", "query": "q", "sources": [{"type": "url", "url": "https://example.org"}]},
    },
    "function_call": {
        "type": "function_call",
        "id": "fc_s",
        "call_id": "call_function",
        "name": "look_up",
        "arguments": '{"a": 1}',
        "status": "completed",
        "namespace": "n",
    },
    "function_call_output": {
        "type": "function_call_output",
        "id": "fco_s",
        "call_id": "call_function",
        "status": "completed",
        "output": [{"type": "input_text", "text": "found"}],
    },
    "tool_search_call": {
        "type": "tool_search_call",
        "id": "ts_s",
        "call_id": "call_search",
        "execution": "client",
        "status": "completed",
        "arguments": {"q": ["x"]},
    },
    "tool_search_output": {
        "type": "tool_search_output",
        "id": "tso_s",
        "call_id": "call_search",
        "execution": "client",
        "status": "completed",
        "tools": [FUNCTION_ECHO],
    },
    "additional_tools": {"type": "additional_tools", "id": "at_s", "role": "developer", "tools": [FUNCTION_ECHO]},
    "configuration_update": {
        "type": "configuration_update",
        "id": "cfg_s",
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "text"}},
    },
    "reasoning": {
        "type": "reasoning",
        "id": "rs_s",
        "status": "completed",
        "summary": [{"type": "summary_text", "text": "s"}],
        "content": [{"type": "reasoning_text", "text": "r"}],
        "encrypted_content": "sealed",
    },
    "compaction": {"type": "compaction", "id": "cmp_s", "encrypted_content": "sealed"},
    "image_generation_call": {
        "type": "image_generation_call",
        "id": "ig_s",
        "status": "completed",
        "result": "AA==",
        "output_format": "png",
        "revised_prompt": "p",
    },
    "code_interpreter_call": {
        "type": "code_interpreter_call",
        "id": "ci_s",
        "status": "completed",
        "code": "1+1",
        "container_id": "cntr_1",
        "outputs": [{"type": "logs", "logs": "2"}],
    },
    "local_shell_call": {
        "type": "local_shell_call",
        "id": "lsh_s",
        "call_id": "call_local",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"], "env": {"A": "b"}, "timeout_ms": 1},
    },
    "local_shell_call_output": {
        "type": "local_shell_call_output",
        "id": "lsho_s",
        "call_id": "call_local",
        "status": "completed",
        "output": "a.txt",
    },
    "shell_call": {
        "type": "shell_call",
        "id": "sh_s",
        "call_id": "call_shell",
        "status": "completed",
        "action": {"commands": ["ls"], "timeout_ms": 1},
        "environment": {"type": "local"},
    },
    "shell_call_output": {
        "type": "shell_call_output",
        "id": "sho_s",
        "call_id": "call_shell",
        "status": "completed",
        "output": [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        "max_output_length": 9,
    },
    "apply_patch_call": {
        "type": "apply_patch_call",
        "id": "ap_s",
        "call_id": "call_patch",
        "status": "completed",
        "operation": {"type": "delete_file", "path": "a.txt"},
    },
    "apply_patch_call_output": {
        "type": "apply_patch_call_output",
        "id": "apo_s",
        "call_id": "call_patch",
        "status": "failed",
        "output": "no such file",
    },
    "mcp_list_tools": {
        "type": "mcp_list_tools",
        "id": "mcpl_s",
        "server_label": "l",
        "tools": [{"name": "t", "input_schema": {"type": "object"}, "description": "d", "annotations": {"a": 1}}],
    },
    "mcp_approval_request": {
        "type": "mcp_approval_request",
        "id": "mcpr_s",
        "name": "t",
        "arguments": "{}",
        "server_label": "l",
    },
    "mcp_approval_response": {
        "type": "mcp_approval_response",
        "id": "mcpa_s",
        "approval_request_id": "mcpr_s",
        "approve": False,
        "reason": "no",
    },
    "mcp_call": {
        "type": "mcp_call",
        "id": "mcp_s",
        "name": "t",
        "arguments": "{}",
        "server_label": "l",
        "status": "completed",
        "approval_request_id": "mcpr_s",
        "error": None,
        "output": "o",
    },
    "custom_tool_call_output": {
        "type": "custom_tool_call_output",
        "id": "ctco_s",
        "call_id": "call_custom",
        "status": "completed",
        "output": "done",
    },
    "custom_tool_call": {
        "type": "custom_tool_call",
        "id": "ctc_s",
        "call_id": "call_custom",
        "name": "draw",
        "input": "a cat",
        "status": "completed",
    },
    "compaction_trigger": {"type": "compaction_trigger", "id": "ct_s"},
    "program": {"type": "program", "id": "prg_s", "call_id": "call_program", "code": "f()", "fingerprint": "x"},
    "program_output": {
        "type": "program_output",
        "id": "prgo_s",
        "call_id": "call_program",
        "status": "completed",
        "result": "1",
    },
}

_PAIRS = {
    "mcp_approval_request": "mcp_approval_response",
    "computer_call": "computer_call_output",
    "function_call": "function_call_output",
    "shell_call": "shell_call_output",
    "local_shell_call": "local_shell_call_output",
    "tool_search_call": "tool_search_output",
    "apply_patch_call": "apply_patch_call_output",
    "custom_tool_call": "custom_tool_call_output",
}


def in_company(kind: str) -> list[Json]:
    """Return the item with the call or the output that belongs to it."""
    for call, output in _PAIRS.items():
        if kind in (call, output):
            return [ITEMS[call], ITEMS[output]]
    return [ITEMS[kind]]

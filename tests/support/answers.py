"""Answers of upstreams in two forms: as one JSON body, and as the stream of events that the same server would send."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from antiphon.stream.sse import SseDecoder

Json = dict[str, Any]


def cut_text(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def write_events(events: Iterable[Json], *, named: bool = False, done: bool = False) -> bytes:
    names = "event: {type}\n" if named else ""
    raw = "".join(names.format(**event) + f"data: {json.dumps(event)}\n\n" for event in events)
    return raw.encode() + (b"data: [DONE]\n\n" if done else b"")


def read_events(raw: bytes) -> list[Json]:
    decoder = SseDecoder()
    messages = [*decoder.feed(raw), *decoder.close()]
    return [json.loads(each.data) for each in messages if each.data.startswith(b"{")]


def normalize_response(events: list[Json]) -> Json:
    """Return the final response without ids and times. Arguments are parsed: their spelling may differ."""
    response: Json = events[-1]["response"]
    if response["status"] == "failed":  # a stream has shown its output before it fails
        return {"event": events[-1]["type"], "error": response["error"]}
    return {
        "event": events[-1]["type"],
        "status": response["status"],
        "incomplete_details": response["incomplete_details"],
        "usage": response["usage"],
        "served": response.get("served_by"),
        "model": response["model"],
        "output": [_normalize(item) for item in response["output"]],
    }


def _normalize(value: Any) -> Any:
    if isinstance(value, list):
        return [_normalize(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: _normalize_field(name, inner) for name, inner in value.items() if name != "id"}


def _normalize_field(name: str, value: Any) -> Any:
    if name in ("arguments", "encrypted_content") and isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError:
            return value
    if name == "call_id" and re.fullmatch(r"call_\d+", str(value)):  # made here, in order of arrival
        return "call"
    return _normalize(value)


# Chat Completions


def stream_chat(whole: Json, size: int) -> bytes:
    """Return the stream of a completion, with texts in pieces of `size` characters."""
    return write_events(_list_chunks(whole, size), done=True)


def _list_chunks(whole: Json, size: int) -> Iterator[Json]:
    (choice,) = whole["choices"]
    message = choice["message"]
    tokens = (choice.get("logprobs") or {}).get("content")
    yield _make_chunk(whole, {"role": "assistant", "content": ""})
    for name in ("reasoning_content", "content", "refusal"):
        pieces = cut_text(message.get(name) or "", size)
        if name == "content" and tokens:
            pieces = [token["token"] for token in tokens]
        for index, piece in enumerate(pieces):
            logprobs = {"content": [tokens[index]]} if name == "content" and tokens else None
            yield _make_chunk(whole, {name: piece}, logprobs=logprobs)
    for detail in message.get("reasoning_details") or ():
        yield _make_chunk(whole, {"reasoning_details": [detail]})
    if message.get("annotations"):
        yield _make_chunk(whole, {"annotations": message["annotations"]})
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        begin = {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
        yield _make_chunk(whole, {"tool_calls": [begin]})
        for piece in cut_text(function["arguments"], size):
            yield _make_chunk(whole, {"tool_calls": [{"index": index, "function": {"arguments": piece}}]})
    if message.get("function_call"):
        yield _make_chunk(whole, {"function_call": message["function_call"]})
    yield _make_chunk(whole, {}, finish_reason=choice["finish_reason"])
    if whole.get("usage"):
        yield {"choices": [], "model": whole["model"], "usage": whole["usage"]}


def _make_chunk(whole: Json, delta: Json, **fields: Any) -> Json:
    return {"model": whole["model"], "choices": [{"index": 0, "delta": delta, **fields}]}


def assemble_chat(raw: bytes) -> Json:
    """Return the completion of a stream that follows the specification, as clients assemble it."""
    message: Json = {"role": "assistant"}
    choice: Json = {"index": 0, "message": message}
    whole: Json = {"object": "chat.completion", "choices": [choice]}
    for chunk in read_events(raw):
        whole |= {name: chunk[name] for name in ("model", "usage", "error") if chunk.get(name) is not None}
        for part in chunk.get("choices") or ():
            if part.get("index"):
                continue
            choice |= {name: part[name] for name in ("finish_reason", "error") if part.get(name) is not None}
            if part.get("logprobs"):
                choice.setdefault("logprobs", {"content": []})["content"] += part["logprobs"]["content"]
            _merge(message, part.get("delta") or {})
            message |= {name: value for name, value in (part.get("message") or {}).items() if value}
    for call in message.get("tool_calls") or ():
        call.pop("index", None)
    return whole


def _merge(message: Json, delta: Json) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            for part in value:
                _merge_call(message.setdefault(name, []), part)
        elif isinstance(value, str) and name != "role":
            message[name] = (message.get(name) or "") + value
        elif isinstance(value, list):
            message[name] = [*(message.get(name) or []), *value]
        elif isinstance(value, dict):
            _merge(message.setdefault(name, {}), value)


def _merge_call(calls: list[Json], part: Json) -> None:
    known = next((call for call in calls if call.get("index") == part.get("index")), None)
    if known is None:
        function = {"name": "", "arguments": ""} | (part.get("function") or {})
        calls.append(part | {"function": function})
        return
    _merge(known["function"], {name: value for name, value in (part.get("function") or {}).items() if name != "name"})
    known |= {name: value for name, value in part.items() if name == "extra_content"}


# Anthropic Messages


def stream_message(whole: Json, size: int) -> bytes:
    """Return the stream of a message, with texts in pieces of `size` characters."""
    return write_events(_list_message_events(whole, size), named=True)


def _list_message_events(whole: Json, size: int) -> Iterator[Json]:
    usage = whole["usage"]
    yield {"type": "message_start", "message": {**whole, "content": [], "stop_reason": None}}
    yield {"type": "ping"}
    for index, block in enumerate(whole["content"]):
        empty, deltas = _open_block(block, size)
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ending = {"stop_reason": whole["stop_reason"], "stop_details": whole.get("stop_details")}
    yield {"type": "message_delta", "delta": ending, "usage": {"output_tokens": usage["output_tokens"]}}
    yield {"type": "message_stop"}


def _open_block(block: Json, size: int) -> tuple[Json, list[Json]]:
    """Return a block as it starts, and its deltas."""
    match block["type"]:
        case "text":
            deltas: list[Json] = [{"type": "text_delta", "text": piece} for piece in cut_text(block["text"], size)]
            deltas += [{"type": "citations_delta", "citation": each} for each in block.get("citations") or ()]
            return {"type": "text", "text": ""}, deltas
        case "thinking":
            deltas = [{"type": "thinking_delta", "thinking": piece} for piece in cut_text(block["thinking"], size)]
            deltas.append({"type": "signature_delta", "signature": block["signature"]})
            return {"type": "thinking", "thinking": "", "signature": ""}, deltas
        case "tool_use" | "server_tool_use":
            pieces = cut_text(json.dumps(block["input"]), size) if block["input"] else [""]
            return block | {"input": {}}, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]
        case _:
            return block, []


def assemble_message(raw: bytes) -> Json:
    """Return the message of a stream that follows the specification, as clients assemble it."""
    message: Json = {}
    inputs: dict[int, str] = {}
    for event in read_events(raw):
        match event["type"]:
            case "message_start":
                message = {"type": "message", **event["message"]}
            case "content_block_start":
                message["content"].append(dict(event["content_block"]))
            case "content_block_delta":
                _extend_block(message["content"][event["index"]], event, inputs)
            case "message_delta":
                message |= {name: value for name, value in event["delta"].items() if value is not None}
                message["usage"] = message.get("usage", {}) | (event.get("usage") or {})
    for index, written in inputs.items():
        message["content"][index]["input"] = json.loads(written)
    return message


def _extend_block(block: Json, event: Json, inputs: dict[int, str]) -> None:
    delta = event["delta"]
    for name in ("text", "thinking", "signature"):
        if name in delta:
            block[name] = (block.get(name) or "") + delta[name]
    if delta.get("partial_json"):
        inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
    if "citation" in delta:
        block["citations"] = [*(block.get("citations") or []), delta["citation"]]


# Responses


def stream_response(whole: Json, size: int) -> bytes:
    """Return the stream of a response, with texts in pieces of `size` characters."""
    return write_events(_list_response_events(whole, size), named=True)


def _list_response_events(whole: Json, size: int) -> Iterator[Json]:
    yield {"type": "response.created", "response": {**whole, "status": "in_progress", "output": [], "usage": None}}
    for index, item in enumerate(whole["output"]):
        at = {"item_id": item["id"], "output_index": index}
        empty = item | {
            name: type(item[name])() for name in ("content", "summary", "arguments", "input") if name in item
        }
        empty.pop("encrypted_content", None)
        yield {"type": "response.output_item.added", "output_index": index, "item": empty | {"status": "in_progress"}}
        for event in _list_item_events(item, size):
            yield at | event
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def _list_item_events(item: Json, size: int) -> Iterator[Json]:
    for name, event in (("arguments", "function_call_arguments"), ("input", "custom_tool_call_input")):
        for piece in cut_text(item.get(name, ""), size):
            yield {"type": f"response.{event}.delta", "delta": piece}
    for index, part in enumerate(item.get("summary") or ()):
        for piece in cut_text(part["text"], size):
            yield {"type": "response.reasoning_summary_text.delta", "summary_index": index, "delta": piece}
    for index, part in enumerate(item.get("content") or ()):
        yield from ({"content_index": index} | event for event in _list_part_events(part, size))


def _list_part_events(part: Json, size: int) -> Iterator[Json]:
    match part["type"]:
        case "output_text" if part.get("logprobs"):
            for token in part["logprobs"]:
                yield {"type": "response.output_text.delta", "delta": token["token"], "logprobs": [token]}
        case "output_text":
            for piece in cut_text(part["text"], size):
                yield {"type": "response.output_text.delta", "delta": piece}
        case "refusal":
            for piece in cut_text(part["refusal"], size):
                yield {"type": "response.refusal.delta", "delta": piece}
        case "reasoning_text":
            for piece in cut_text(part["text"], size):
                yield {"type": "response.reasoning_text.delta", "delta": piece}
    for index, annotation in enumerate(part.get("annotations") or ()):
        yield {
            "type": "response.output_text.annotation.added",
            "annotation_index": index,
            "annotation": annotation,
        }


def find_final_response(raw: bytes) -> Json:
    """Return the response in the last event of a stream."""
    response: Json = read_events(raw)[-1]["response"]
    return response

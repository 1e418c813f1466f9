"""The response as it begins: it repeats the request's parameters, with the defaults filled in."""

from typing import Any

import msgspec
from hypothesis import given

from antiphon.backends.base import Turn
from antiphon.engine.prepare.prepare import Prepared
from antiphon.engine.respond.ids import Mint
from antiphon.engine.respond.response import begin_response
from antiphon.engine.serve.routing import ModelRoute
from antiphon.protocol import codec
from antiphon.protocol.request import ConversationRef, CreateRequest, JsonSchemaFormat, TextConfig, TextFormat
from antiphon.protocol.response import Response
from support import strategies


def begin(request: CreateRequest) -> Response:
    return begin_response(
        Prepared(
            turn=Turn(request=request, items=[]),
            route=ModelRoute([]),
            input=[],
            mint=Mint("t"),
            created_at=5,
            warnings=(),
            repairs=(),
        )
    )


def echo_text(text: TextConfig | None) -> TextConfig:
    if text is None or text.format is None:
        return TextConfig(format=TextFormat(), verbosity=text.verbosity if text is not None else None)
    if isinstance(text.format, JsonSchemaFormat):
        return TextConfig(msgspec.structs.replace(text.format, strict=bool(text.format.strict)), text.verbosity)
    return text


@given(strategies.instances(CreateRequest))
def test_response_repeats_every_parameter_or_its_default(request: Any) -> None:
    conversation = request.conversation
    expected = Response(
        id="resp_t",
        created_at=5,
        model=request.model or "",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning=request.reasoning,
        service_tier="default" if request.service_tier in (None, "auto") else request.service_tier,
        store=request.store is not False,
        temperature=1.0 if request.temperature is None else request.temperature,
        text=echo_text(request.text),
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        truncation=request.truncation or "disabled",
        metadata=request.metadata or {},
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_options=msgspec.to_builtins(request.prompt_cache_options),
        prompt_cache_retention=request.prompt_cache_retention,
        safety_identifier=request.safety_identifier,
        user=request.user,
        background=bool(request.background),
        prompt=request.prompt,
        conversation=ConversationRef(conversation) if isinstance(conversation, str) else conversation,
    )
    assert codec.encode(begin(request)) == codec.encode(expected)


def test_responses_share_no_mutable_defaults() -> None:
    first = begin(CreateRequest(model="m"))
    before = codec.encode(begin(CreateRequest(model="m")))
    first.output.append(codec.decode_items(b'[{"role":"user","content":"hi"}]')[0])
    first.tools.append(first.output[0])
    assert first.metadata is not None
    first.metadata["a"] = "b"
    first.text = TextConfig()
    assert codec.encode(begin(CreateRequest(model="m"))) == before

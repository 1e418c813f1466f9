"""The response object before the model has answered: the request's settings, with the defaults filled in."""

import msgspec

from antiphon.engine.prepare.history import get_conversation_id
from antiphon.engine.prepare.prepare import Prepared
from antiphon.engine.serve.routing import Candidate
from antiphon.protocol.request import ConversationRef, JsonSchemaFormat, TextConfig, TextFormat
from antiphon.protocol.response import Response


def begin_response(prepared: Prepared, candidate: Candidate | None = None) -> Response:
    """Return the response as it begins. `candidate` is the one that serves it, if that is known."""
    request = prepared.turn.request
    conversation = get_conversation_id(request)
    return Response(
        id=prepared.mint.response_id,
        created_at=prepared.created_at,
        model=(request.model or "") if candidate is None else candidate.model.id,
        served_by=None if candidate is None else candidate.address,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning=request.reasoning,
        service_tier="default" if request.service_tier in (None, "auto") else request.service_tier,
        store=request.store is not False,
        temperature=1.0 if request.temperature is None else request.temperature,
        text=_echo_text(request.text),
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
        conversation=None if conversation is None else ConversationRef(conversation),
    )


def _echo_text(text: TextConfig | None) -> TextConfig:
    """Return the text settings as the response repeats them: with a format, and without the schema's body."""
    if text is None or text.format is None:
        return TextConfig(format=TextFormat(), verbosity=text.verbosity if text is not None else None)
    if isinstance(text.format, JsonSchemaFormat):
        echoed = msgspec.structs.replace(text.format, schema=None, strict=bool(text.format.strict))
        return TextConfig(format=echoed, verbosity=text.verbosity)
    return text

"""The response object before the model has answered: the request's settings, with the defaults filled in."""

from collections.abc import Sequence
from operator import attrgetter

import msgspec

from antiphon.engine.prepare.prepare import Prepared
from antiphon.engine.serve.routing import Candidate
from antiphon.protocol.request import ConversationRef, JsonSchemaFormat, TextConfig, TextFormat
from antiphon.protocol.response import Response
from antiphon.protocol.unions import copy_struct
from antiphon.stream.tool_usage import make_tool_usage

# Fields of the response that repeat a parameter of the request if it is set.
_ECHOED = (
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "parallel_tool_calls",
    "previous_response_id",
    "reasoning",
    "store",
    "temperature",
    "tool_choice",
    "top_p",
    "truncation",
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "user",
    "background",
    "prompt",
)
_get_echoed = attrgetter(*_ECHOED)
# A response to a request without parameters.
_DEFAULTS = Response(id="", created_at=0, model="")


def begin_response(prepared: Prepared, candidate: Candidate | None = None) -> Response:
    """Return the response as it begins. `candidate` is the one that serves it, if that is known."""
    request = prepared.turn.request
    response = copy_struct(_DEFAULTS)
    response.id = prepared.mint.response_id
    response.created_at = prepared.created_at
    response.model = (request.model or "") if candidate is None else candidate.model.id
    response.served_by = None if candidate is None else candidate.address
    response.output, response.tools, response.metadata = [], prepared.shown_tools or request.tools or [], {}
    if prepared.is_hosted:
        response.tool_usage = make_tool_usage()
    response.top_logprobs = request.top_logprobs or 0
    response.presence_penalty = request.presence_penalty or 0.0
    response.frequency_penalty = request.frequency_penalty or 0.0
    values = _get_echoed(request)
    left = len(values) - values.count(None)
    if left:  # most requests set only a few of them
        for name, value in zip(_ECHOED, values, strict=True):
            if value is not None:
                setattr(response, name, value)
                left -= 1
                if not left:
                    break
    if request.text is not None:
        response.text = _echo_text(request.text)
    if request.service_tier is not None and request.service_tier != "auto":
        response.service_tier = request.service_tier
    if request.prompt_cache_options is not None:
        response.prompt_cache_options = msgspec.to_builtins(request.prompt_cache_options)
    if request.conversation is not None:
        conversation = request.conversation
        response.conversation = ConversationRef(conversation) if isinstance(conversation, str) else conversation
    return response


def _echo_text(text: TextConfig) -> TextConfig:
    """Return the text settings as the response repeats them: with a format, and with `strict` as true or false."""
    if text.format is None:
        return TextConfig(format=TextFormat(), verbosity=text.verbosity)
    if isinstance(text.format, JsonSchemaFormat) and text.format.strict is None:
        return TextConfig(format=msgspec.structs.replace(text.format, strict=False), verbosity=text.verbosity)
    return text


def join_warnings(first: Sequence[str], then: Sequence[str]) -> Sequence[str]:
    """Return the warnings of both lists, each once."""
    return list(dict.fromkeys((*first, *then))) if first else then

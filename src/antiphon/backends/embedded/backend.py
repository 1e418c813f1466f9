"""The embedded backend: a small model in this process, with no key and no network."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from antiphon.backends.base import Capabilities, Model, Turn, list_hint_parameters, read_options
from antiphon.backends.embedded.grammar import Rules, build_grammar, input_grammar, read_rules, schema_grammar
from antiphon.backends.embedded.model import Llama
from antiphon.backends.embedded.output import Answer
from antiphon.backends.embedded.prompt import lay_out
from antiphon.backends.embedded.weights import DEFAULT_MODEL, find_weights
from antiphon.errors import ContextLengthExceeded, InvalidRequest, ModelError
from antiphon.protocol.items import CustomToolCall, FunctionCall
from antiphon.protocol.request import CreateRequest
from antiphon.stream.deltas import Deltas

Count = Annotated[int, Meta(ge=1)]

# What an answer may take when the request does not say: a small model that has lost its thread would fill its window.
LONGEST_ANSWER = 400


class Options(Struct, kw_only=True):
    """`context` is how many tokens one turn may take, prompt and answer together; `slots` how many turns run at once.

    `batch` is how many tokens are read before the model looks up to see whether it was cancelled: a slower model needs
    a smaller one. `tool_examples` shows the model a few calls first; one that was trained on tools can do without.
    """

    model: str = DEFAULT_MODEL
    weights: str | None = None
    context: Annotated[int, Meta(ge=256)] = 4096
    slots: Count = 2
    threads: Count = 1
    batch: Annotated[int, Meta(ge=8)] = 16
    tool_examples: bool = True


class EmbeddedBackend:
    """Answers turns with llama.cpp."""

    capabilities = Capabilities(
        tools=frozenset({"function", "custom"}),
        json_schema=True,
        logprobs=True,
        penalties=True,
        list_ignored=lambda request, _: list_hint_parameters(request),
    )

    def __init__(
        self,
        weights: Path,
        *,
        model: str = DEFAULT_MODEL,
        name: str = "embedded",
        context: int = 4096,
        slots: int = 2,
        threads: int = 1,
        batch: int = 16,
        tool_examples: bool = True,
    ) -> None:
        self._llama = Llama(weights, window=context, slots=slots, threads=threads, batch=batch)
        self._window = context
        self._examples = tool_examples
        created = int(weights.stat().st_mtime)
        self._models = [
            # A small model wanders at any higher temperature.
            Model(id=model, created=created, owned_by=name, context_window=context, temperature=0.1)
        ]

    async def start(self) -> None:
        await self._llama.load()

    async def close(self) -> None:
        await self._llama.close()

    def models(self) -> Sequence[Model]:
        return self._models

    async def count_tokens(self, turn: Turn) -> int:
        return len(await self._read(turn, read_rules(turn.request)))

    async def stream(self, turn: Turn) -> Deltas:
        rules = read_rules(turn.request)
        prompt = await self._read(turn, rules)
        room = self._check_length(len(prompt), turn.request.max_output_tokens)
        # A model that sees calls goes on to write some, even when there are no tools.
        guarded = bool(turn.request.tools) or any(
            isinstance(item, FunctionCall | CustomToolCall) for item in turn.items
        )
        grammar = build_grammar(rules, guarded=guarded)
        if grammar is not None:
            await self._check_grammar(grammar, rules)
        sampling = _sampling(turn.request)
        if turn.response_id:
            sampling["seed"] = _derive_seed(turn.response_id)
        if grammar is not None:
            sampling["grammar"] = grammar
        elif sampling["temperature"]:
            sampling |= _FREE_TEXT
        body = {"prompt": prompt, "max_tokens": room}
        return self._answer(body | sampling, Answer(tools={*rules.tools, *rules.inputs}, open_ended=rules.open_ended))

    async def _read(self, turn: Turn, rules: Rules) -> list[int]:
        return await self._llama.read(lay_out(turn, rules, examples=self._examples))

    def _check_length(self, prompt: int, max_output_tokens: int | None) -> int:
        """How many tokens the answer may have."""
        room = self._window - prompt
        if room < 1:
            asked = f" (max_output_tokens is {max_output_tokens})" if max_output_tokens is not None else ""
            raise ContextLengthExceeded(
                f"This model's context window is {self._window} tokens. The input is {prompt} tokens, which leaves no "
                f"room for an answer{asked}. Shorten the input.",
                param="input",
            )
        return min(room, max_output_tokens or LONGEST_ANSWER)

    async def _check_grammar(self, grammar: str, rules: Rules) -> None:
        if await self._llama.accepts(grammar):
            return
        for place, schema in rules.schemas.items():
            if not await self._llama.accepts(schema_grammar(schema)):
                raise InvalidRequest(
                    "The embedded model cannot be held to this schema: its grammar compiler does not take it.",
                    param=place,
                    code="unsupported_schema",
                )
        for place, input_rules in rules.grammars.items():
            if not await self._llama.accepts(input_grammar(input_rules)):
                raise InvalidRequest(
                    "The embedded model cannot be held to this grammar: its grammar compiler does not take it.",
                    param=place,
                    code="unsupported_grammar",
                )
        raise InvalidRequest(
            "The embedded model cannot be held to all of this at once: together it is too large a grammar.",
            param="tools" if rules.may_call else "text.format",
            code="unsupported_schema",
        )

    async def _answer(self, body: dict[str, Any], answer: Answer) -> Deltas:
        generation = self._llama.generate(body)
        try:
            async for chunks in generation:
                for chunk in chunks:
                    if chunk.error is not None:
                        raise ModelError(chunk.error.message)
                if deltas := [delta for chunk in chunks for delta in answer.read(chunk)]:
                    yield deltas
                if answer.finished:
                    return
        finally:
            await generation.aclose()
        raise ModelError("The model broke off.")


# Small models fall into loops. Not where a grammar holds them, and JSON repeats itself by nature; and whoever asks for
# temperature 0 gets the likeliest tokens and nothing else.
_FREE_TEXT = {"repeat_penalty": 1.05}


def _sampling(request: CreateRequest) -> dict[str, Any]:
    """How to pick each token. A small model's unlikely tokens are noise: `min_p` leaves them out at any temperature."""
    sampling: dict[str, Any] = {
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "top_k": 0,
        "min_p": 0.05,
        "presence_penalty": request.presence_penalty or 0.0,
        "frequency_penalty": request.frequency_penalty or 0.0,
    }
    if request.top_logprobs or "message.output_text.logprobs" in (request.include or ()):
        # llama.cpp tells the chosen token's own probability only along with those of the top ones.
        sampling["logprobs"] = max(1, request.top_logprobs or 0)
    return sampling


def _derive_seed(response_id: str) -> int:
    """Chance that can be repeated. It is a byte shorter than llama.cpp's seeds, of which the highest means any."""
    return int.from_bytes(blake2b(response_id.encode(), digest_size=3).digest())


def create(name: str, options: Mapping[str, Any], data_dir: Path) -> EmbeddedBackend:
    """What the registry calls."""
    chosen = read_options(options, Options, name=name)
    path = Path(chosen.weights) if chosen.weights is not None else None
    return EmbeddedBackend(
        find_weights(chosen.model, path=path, folder=data_dir / "models"),
        model=chosen.model,
        name=name,
        context=chosen.context,
        slots=chosen.slots,
        threads=chosen.threads,
        batch=chosen.batch,
        tool_examples=chosen.tool_examples,
    )

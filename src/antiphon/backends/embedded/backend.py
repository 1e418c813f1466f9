"""The embedded backend: a small model in this process, without a key or a network connection."""

import logging
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Self

from msgspec import Meta, Struct

from antiphon.backends.base import Capabilities, Model, Turn, list_hint_parameters, read_options
from antiphon.backends.embedded.grammar import (
    OutputRules,
    build_grammar,
    build_input_grammar,
    build_schema_grammar,
    check_schemas,
    load_rules,
)
from antiphon.backends.embedded.model import Generation, Llama
from antiphon.backends.embedded.output import OutputReader
from antiphon.backends.embedded.prompt import TemplateMessage, build_messages
from antiphon.backends.embedded.tokenizer import PromptTooLong
from antiphon.backends.embedded.vocabulary import GgufError, read_vocabulary
from antiphon.backends.embedded.weights import DEFAULT_MODEL, find_weights
from antiphon.errors import ContextLengthExceeded, InvalidRequest, ModelError
from antiphon.grammars.messages import Vocabulary
from antiphon.grammars.trial import GrammarTrial
from antiphon.protocol.items import CustomToolCall, FunctionCall
from antiphon.protocol.request import CreateRequest
from antiphon.stream.deltas import Delta, Deltas

logger = logging.getLogger(__name__)

Count = Annotated[int, Meta(ge=1)]

# The limit of an answer if the request has none. Small models sometimes do not stop by themselves.
DEFAULT_MAX_OUTPUT_TOKENS = 400
# Tokens between two wake-ups of the event loop in a turn that is not streamed. A repeated call ends the turn this late.
_UNSTREAMED_BATCH = 16
# Small models tend to repeat themselves. The penalty applies to free text only: JSON is repetitive, and temperature 0
# must give the most likely tokens.
_FREE_TEXT_SAMPLING = {"repeat_penalty": 1.05}


class EmbeddedOptions(Struct, kw_only=True):
    """The options of one backend.

    `context` is the number of tokens of one turn, prompt and answer together. `slots` is the number of concurrent
    turns. `batch` is the number of tokens that are read before the model checks for cancellation; a slower model needs
    a smaller one. `tool_examples` adds examples of calls to the prompt, for models that were not trained on tools.
    """

    model: str = DEFAULT_MODEL
    weights: str | None = None
    context: Annotated[int, Meta(ge=256)] = 4096
    slots: Count = 2
    threads: Count = 1
    batch: Annotated[int, Meta(ge=8)] = 16
    tool_examples: bool = True


class EmbeddedBackend:
    """Runs turns on llama.cpp."""

    capabilities = Capabilities(
        tools=frozenset({"function", "custom"}),
        json_schema=True,
        logprobs=True,
        penalties=True,
        list_ignored=lambda request, _: list_hint_parameters(request),
        check_schemas=check_schemas,
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
        self._trial = GrammarTrial(load_vocabulary=lambda: _load_vocabulary(weights))
        self._window = context
        self.queue = self._llama.queue
        self._tool_examples = tool_examples
        created = int(weights.stat().st_mtime)
        self._models = [
            # Small models drift off the subject at a higher temperature.
            Model(id=model, created=created, owned_by=name, context_window=context, temperature=0.1)
        ]

    async def start(self) -> None:
        await self._llama.load()

    async def close(self) -> None:
        await self._trial.close()
        await self._llama.close()

    def models(self) -> Sequence[Model]:
        return self._models

    async def count_tokens(self, turn: Turn) -> int:
        rules = await load_rules(turn.request, turn.grammar_limits)
        messages = self._build_messages(turn, rules)
        return await self._llama.tokenizer.count(messages, turn=turn, exact_up_to=self._window)

    async def stream(self, turn: Turn) -> Deltas:
        if not turn.background:
            self.queue.check_room(turn.project)
        rules = await load_rules(turn.request, turn.grammar_limits)
        prompt = await self._read_prompt(turn, rules)
        # A model that reads calls tends to write some, even without tools.
        forbid_calls = bool(turn.request.tools) or any(
            isinstance(item, FunctionCall | CustomToolCall) for item in turn.items
        )
        grammar = build_grammar(rules, forbid_calls=forbid_calls)
        if grammar is not None and (turn.is_suspect or not rules.is_simple):
            await self._try_grammars(grammar, rules, turn)
        sampling = _make_sampling(turn.request)
        if turn.response_id:
            sampling["seed"] = _derive_seed(turn.response_id)
        if grammar is not None:
            sampling["grammar"] = grammar
        elif sampling["temperature"]:
            sampling |= _FREE_TEXT_SAMPLING
        room = min(self._window - len(prompt), turn.request.max_output_tokens or DEFAULT_MAX_OUTPUT_TOKENS)
        body = {"prompt": prompt, "max_tokens": room} | sampling
        reader = OutputReader(tools={*rules.tools, *rules.custom_tools}, open_ended=rules.open_ended)
        slot = await self.queue.acquire(turn.project, background=turn.background, weight=len(prompt) + room)
        try:
            if grammar is not None:
                await self._check_grammar(grammar, rules)
            batch = 1 if turn.streamed else _UNSTREAMED_BATCH
            return _Answer(self._llama.begin(body, batch=batch, on_end=slot.release), reader)
        except BaseException:
            slot.release()
            raise

    def _build_messages(self, turn: Turn, rules: OutputRules) -> list[TemplateMessage]:
        return build_messages(turn, rules, examples=self._tool_examples)

    async def _read_prompt(self, turn: Turn, rules: OutputRules) -> list[int]:
        """Return the tokens of the prompt. Raises ContextLengthExceeded if they leave no room for an answer."""
        messages = self._build_messages(turn, rules)
        try:
            return await self._llama.tokenizer.tokenize(messages, turn=turn, limit=self._window - 1)
        except PromptTooLong as error:
            limit = turn.request.max_output_tokens
            reserved = f" (max_output_tokens is {limit})" if limit is not None else ""
            raise ContextLengthExceeded(
                f"This model's context window is {self._window} tokens. The input is {error}, which leaves no room for "
                f"an answer{reserved}. Shorten the input.",
                param="input",
            ) from None

    async def _try_grammars(self, grammar: str, rules: OutputRules, turn: Turn) -> None:
        """Compile the grammar in a process of its own. Raises InvalidRequest if that fails or takes too much."""
        fault = await self._try_grammar(grammar, turn)
        if fault is None:
            return
        parts = {path: build_schema_grammar(schema) for path, schema in rules.schemas.items()}
        parts |= {path: build_input_grammar(input_rules) for path, input_rules in rules.grammars.items()}
        if len(parts) > 1:
            for path, part in parts.items():
                if (part_fault := await self._try_grammar(part, turn)) is not None:
                    raise _make_grammar_error(part_fault, path, is_schema=path in rules.schemas)
            param = "tools" if rules.may_call else "text.format"
            raise InvalidRequest(
                f"The embedded model cannot enforce all tools and the format together: {fault}",
                param=param,
                code="unsupported_schema",
            )
        for path in parts:
            raise _make_grammar_error(fault, path, is_schema=path in rules.schemas)
        raise InvalidRequest(f"The embedded model cannot enforce the output format: {fault}", code="unsupported_schema")

    async def _try_grammar(self, grammar: str, turn: Turn) -> str | None:
        return await self._trial.find_fault(
            "lark", grammar, turn.grammar_limits, project=turn.project, is_repeated=turn.is_suspect
        )

    async def _check_grammar(self, grammar: str, rules: OutputRules) -> None:
        if await self._llama.accepts_grammar(grammar):
            return
        for path, schema in rules.schemas.items():
            if not await self._llama.accepts_grammar(build_schema_grammar(schema)):
                raise InvalidRequest(
                    "The embedded model cannot enforce this schema: its grammar compiler rejects it.",
                    param=path,
                    code="unsupported_schema",
                )
        for path, input_rules in rules.grammars.items():
            if not await self._llama.accepts_grammar(build_input_grammar(input_rules)):
                raise InvalidRequest(
                    "The embedded model cannot enforce this grammar: the grammar compiler rejects it.",
                    param=path,
                    code="unsupported_grammar",
                )
        raise InvalidRequest(
            "The embedded model cannot enforce all tools and the format together: the combined grammar is too large.",
            param="tools" if rules.may_call else "text.format",
            code="unsupported_schema",
        )


class _Answer:
    """The deltas of a turn. The model is running already, and stops if this is closed or dropped."""

    def __init__(self, generation: Generation, reader: OutputReader) -> None:
        self._generation = generation
        self._reader = reader

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[Delta]:
        generation, reader = self._generation, self._reader
        while not reader.finished:
            try:
                chunks = await generation.read()
                if not chunks:
                    raise ModelError("The model stopped before the end of its output.")
                for chunk in chunks:
                    if chunk.error is not None:
                        raise ModelError(chunk.error.message)
            except BaseException:
                generation.cancel()
                raise
            reader.sliced_tokens = generation.sliced_tokens
            if deltas := reader.read_all(chunks):
                return deltas
        generation.cancel()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._generation.cancel()

    def __del__(self) -> None:
        self._generation.cancel()


def _make_grammar_error(fault: str, path: str, *, is_schema: bool) -> InvalidRequest:
    kind = "schema" if is_schema else "grammar"
    message = f"The embedded model cannot enforce this {kind}: {fault}"
    return InvalidRequest(message, param=path, code=f"unsupported_{kind}")


def _load_vocabulary(weights: Path) -> Vocabulary:
    """Return the tokens of the model. If they cannot be read, the tokens are the bytes."""
    try:
        return read_vocabulary(weights)
    except (GgufError, OSError) as error:
        logger.warning("the tokens of the embedded model cannot be read, so grammars are tried with bytes: %s", error)
        return Vocabulary([*(bytes([byte]) for byte in range(256)), b"\xff<end>"], 256)


def _make_sampling(request: CreateRequest) -> dict[str, Any]:
    """Return the sampling parameters. `min_p` excludes unlikely tokens, which are noise in a small model."""
    sampling: dict[str, Any] = {
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "top_k": 0,
        "min_p": 0.05,
        "presence_penalty": request.presence_penalty or 0.0,
        "frequency_penalty": request.frequency_penalty or 0.0,
    }
    if request.top_logprobs or "message.output_text.logprobs" in (request.include or ()):
        # llama.cpp reports the chosen token's probability only together with the top ones.
        sampling["logprobs"] = max(1, request.top_logprobs or 0)
    return sampling


def _derive_seed(response_id: str) -> int:
    """Return a seed that depends on the response id, so a repeated attempt gives the same output.

    It has three bytes: llama.cpp takes the highest four-byte seed as random.
    """
    return int.from_bytes(blake2b(response_id.encode(), digest_size=3).digest())


def create(name: str, options: Mapping[str, Any], data_dir: Path) -> EmbeddedBackend:
    """Create the backend from its configuration. The registry calls this."""
    parsed = read_options(options, EmbeddedOptions, name=name)
    path = Path(parsed.weights) if parsed.weights is not None else None
    return EmbeddedBackend(
        find_weights(parsed.model, path=path, folder=data_dir / "models"),
        model=parsed.model,
        name=name,
        context=parsed.context,
        slots=parsed.slots,
        threads=parsed.threads,
        batch=parsed.batch,
        tool_examples=parsed.tool_examples,
    )

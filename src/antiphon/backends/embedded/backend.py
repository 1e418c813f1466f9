"""The embedded backend: a small model in this process, without a key or a network connection."""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Self

from msgspec import Meta, Struct

from antiphon.backends.base import Capabilities, Model, Turn, list_hint_parameters, read_options
from antiphon.backends.embedded.decision import CallDecision, OutputRequest, read_candidates
from antiphon.backends.embedded.grammar import (
    OutputRules,
    build_grammar,
    build_input_grammar,
    build_schema_grammar,
    check_schemas,
    load_rules,
)
from antiphon.backends.embedded.library import require_library
from antiphon.backends.embedded.model import CompletionChunk, Generation, Llama, Timings, TokenCandidate
from antiphon.backends.embedded.output import OutputReader
from antiphon.backends.embedded.prompt import TemplateMessage, build_messages, needs_examples
from antiphon.backends.embedded.tokenizer import PromptTooLong
from antiphon.backends.embedded.vocabulary import GgufError, read_vocabulary
from antiphon.backends.embedded.weights import DEFAULT_MODEL, find_weights
from antiphon.errors import ContextLengthExceeded, InvalidRequest, ModelError
from antiphon.grammars.messages import Vocabulary
from antiphon.grammars.trial import GrammarTrial
from antiphon.protocol.items import CustomToolCall, FunctionCall
from antiphon.protocol.request import CreateRequest
from antiphon.stream.deltas import Delta, Deltas
from antiphon.turn_queue import Slot

logger = logging.getLogger(__name__)

Count = Annotated[int, Meta(ge=1)]

# The limit of an answer if the request has none. Small models sometimes do not stop by themselves.
DEFAULT_MAX_OUTPUT_TOKENS = 400
# Tokens between two wake-ups of the event loop in a turn that is not streamed. A repeated call ends the turn at the
# next wake-up.
_UNSTREAMED_BATCH = 16
# Tokens that a decision adds to the prompt. Without room for them, the output decides by itself.
_DECISION_ROOM = 32
# Small models tend to repeat themselves. The penalty applies to free text only: JSON is repetitive, and temperature 0
# must give the most likely tokens.
_FREE_TEXT_SAMPLING = {"repeat_penalty": 1.05}


class EmbeddedOptions(Struct, kw_only=True):
    """The options of one backend.

    `context` is the number of tokens of one turn, prompt and answer together. `slots` is the number of concurrent
    turns. `batch` is the number of tokens that are read before the model checks for cancellation; a slower model needs
    a smaller one. `tool_examples` adds examples of calls to the prompt, for models that were not trained on tools. The
    default depends on the model's name.
    """

    model: str = DEFAULT_MODEL
    weights: str | None = None
    context: Annotated[int, Meta(ge=256)] = 4096
    slots: Count = 2
    threads: Count = 1
    batch: Annotated[int, Meta(ge=8)] = 16
    tool_examples: bool | None = None


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
        tool_examples: bool | None = None,
    ) -> None:
        self._llama = Llama(weights, window=context, slots=slots, threads=threads, batch=batch)
        self._trial = GrammarTrial(load_vocabulary=lambda: _load_vocabulary(weights))
        self._window = context
        self.queue = self._llama.queue
        self._tool_examples = tool_examples if tool_examples is not None else needs_examples(model)
        created = int(weights.stat().st_mtime)
        self._models = [
            # Small models lose the subject at a higher temperature.
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
            await self._try_grammar(grammar, rules, turn)
        sampling = _make_sampling(turn.request)
        if turn.may_be_repeated:
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
                await self._probe_grammar(grammar, rules)
            run = _TurnRun(self._llama, slot, batch=1 if turn.streamed else _UNSTREAMED_BATCH)
            if rules.may_call and rules.may_answer and len(prompt) + _DECISION_ROOM <= self._window:
                return _Answer(run, decision=CallDecision(turn, rules, body, examples=self._tool_examples))
            return _Answer(run, output=OutputRequest(body, reader))
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
            raise ContextLengthExceeded(  # LiteLLM recognises the error by the first words
                f"This model's maximum context length is {self._window} tokens. The input is {error}, which leaves no "
                f"room for an answer{reserved}. Shorten the input.",
                param="input",
            ) from None

    async def _try_grammar(self, grammar: str, rules: OutputRules, turn: Turn) -> None:
        """Compile the grammar in a process of its own. Raises InvalidRequest if that fails or takes too much."""

        async def find_fault(tried: str) -> str | None:
            return await self._trial.find_fault(
                "lark", tried, turn.grammar_limits, project=turn.project, is_repeated=turn.is_suspect
            )

        await _check_grammar(grammar, rules, find_fault)
        # The steps of the trial above are random: they may lead into another tool, or into an answer.
        for path, lark in rules.grammars.items():
            if fault := await find_fault(build_input_grammar(lark)):
                raise _make_grammar_error(f"this grammar: {fault}", path, code="unsupported_grammar")

    async def _probe_grammar(self, grammar: str, rules: OutputRules) -> None:
        """Raise InvalidRequest if the model ignores the grammar, because it does not compile here."""

        async def find_fault(probed: str) -> str | None:
            return None if await self._llama.accepts_grammar(probed) else "the grammar compiler rejects it."

        await _check_grammar(grammar, rules, find_fault)


class _TurnRun:
    """The generations of a turn, one after the other, in one slot.

    The slot is released when the last generation ends, even if its output has not been read yet.
    """

    def __init__(self, llama: Llama, slot: Slot, *, batch: int) -> None:
        self._llama = llama
        self._slot = slot
        self._batch = batch
        self._generation: Generation | None = None
        self._is_last = False

    def begin(self, body: dict[str, Any], *, is_last: bool) -> Generation:
        """Start a generation, instead of the one before it."""
        if self._generation is not None:
            self._generation.cancel()
        self._is_last = is_last
        generation = self._llama.begin(body, batch=self._batch, on_end=lambda: self._end(generation))
        self._generation = generation
        return generation

    def settle(self) -> None:
        """Let the slot be released: the current generation is the last one."""
        self._is_last = True
        if self._generation is None or self._generation.is_done:
            self._slot.release()

    def close(self) -> None:
        if self._generation is not None:
            self._generation.cancel()
        self.settle()

    def _end(self, generation: Generation) -> None:
        if self._is_last and generation is self._generation:
            self._slot.release()


class _Answer:
    """The deltas of a turn. The model is running already, and stops if this is closed or dropped."""

    def __init__(
        self, run: _TurnRun, *, output: OutputRequest | None = None, decision: CallDecision | None = None
    ) -> None:
        self._run = run
        self._decision = decision
        self._reader: OutputReader | None = None
        self._earlier_tokens = 0
        if output is not None:
            self._begin(output)
        elif decision is not None:
            self._generation = run.begin(decision.request, is_last=False)

    def _begin(self, output: OutputRequest) -> None:
        self._reader = output.reader
        self._generation = self._run.begin(output.body, is_last=not output.reader.may_print_call)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Sequence[Delta]:
        try:
            if self._reader is None:
                await self._decide()
            while self._reader is not None and not self._reader.finished:
                if deltas := await self._read(self._reader):
                    return deltas
        except BaseException:
            self._run.close()
            raise
        self._run.close()
        raise StopAsyncIteration

    async def _decide(self) -> None:
        assert self._decision is not None
        timings: Timings | None = None
        candidates: list[TokenCandidate] = []
        while chunks := await self._read_chunks():
            candidates = candidates or read_candidates(chunks)
            timings = next((chunk.timings for chunk in reversed(chunks) if chunk.timings is not None), timings)
        if timings is not None:
            self._earlier_tokens = self._generation.sliced_tokens + timings.prompt_n
        self._begin(self._decision.decide(candidates))

    async def _read(self, reader: OutputReader) -> list[Delta]:
        chunks = await self._read_chunks()
        if not chunks:
            raise ModelError("The model stopped before the end of its output.")
        reader.earlier_tokens = self._earlier_tokens + self._generation.sliced_tokens
        deltas = reader.read_all(chunks)
        if reader.printed_tool is not None:
            assert self._decision is not None
            self._begin(self._decision.require_tool(reader.printed_tool))
        elif not reader.may_print_call:
            self._run.settle()
        return deltas

    async def _read_chunks(self) -> list[CompletionChunk]:
        chunks = await self._generation.read()
        for chunk in chunks:
            if chunk.error is not None:
                raise ModelError(chunk.error.message)
        return chunks

    async def aclose(self) -> None:
        self._run.close()

    def __del__(self) -> None:
        self._run.close()


async def _check_grammar(grammar: str, rules: OutputRules, find_fault: Callable[[str], Awaitable[str | None]]) -> None:
    """Raise InvalidRequest if the grammar has a fault. The error names the schema or grammar that causes it."""
    fault = await find_fault(grammar)
    if fault is None:
        return
    parts = {path: (build_schema_grammar(schema), "schema") for path, schema in rules.schemas.items()}
    parts |= {path: (build_input_grammar(lark), "grammar") for path, lark in rules.grammars.items()}
    for path, (part, kind) in parts.items():
        # Finding the faulty part may take seconds. If there is only one part, it is the faulty one.
        part_fault = fault if len(parts) == 1 else await find_fault(part)
        if part_fault is not None:
            raise _make_grammar_error(f"this {kind}: {part_fault}", path, code=f"unsupported_{kind}")
    param = "tools" if rules.may_call else "text.format"
    raise _make_grammar_error(f"all tools and the format together: {fault}", param, code="unsupported_schema")


def _make_grammar_error(subject: str, path: str, *, code: str) -> InvalidRequest:
    return InvalidRequest(f"The embedded model cannot enforce {subject}", param=path, code=code)


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
    require_library()  # before the weights: to download them would be useless without it
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

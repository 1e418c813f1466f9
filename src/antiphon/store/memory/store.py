"""The memory store: responses, background runs and prompts. Its data is lost when the process ends."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from antiphon.errors import InvalidRequest, NotFound, ServerError
from antiphon.protocol.response import Response
from antiphon.store.base import (
    NO_LIMITS,
    ClaimedRun,
    LeaseLost,
    Link,
    PromptVersion,
    QueueFull,
    RunKey,
    StoredPrompt,
    StoredResponse,
)
from antiphon.store.limits import START_WINDOW, SUSPECT_INTERRUPTIONS, Admission, RunLimits, choose_in_turns
from antiphon.store.memory.conversations import MemoryConversations
from antiphon.store.memory.tables import Key, MemoryEventLog, MemoryReferences, MemoryTables, PromptRow, RunRow
from antiphon.store.record import (
    EventBatch,
    ResponseRecord,
    add_tools,
    build_chain,
    find_foreign_items,
    pack_events,
    pack_items,
    pack_response,
    unpack_bare_response,
    unpack_response,
)


class MemoryResponses(MemoryConversations, MemoryReferences, MemoryEventLog):
    async def save(
        self,
        project: str,
        stored: StoredResponse,
        *,
        conversation: str | None = None,
        owner: str | None = None,
        events: tuple[int, Sequence[bytes]] | None = None,
    ) -> None:
        record = pack_response(stored)
        foreign = find_foreign_items(stored)
        batches = [] if events is None else pack_events(*events)
        key = project, record.id
        if owner is not None and not self._is_owned(key, owner):
            raise LeaseLost(f"{owner} does not own the run of {record.id}.")
        earlier = self._tables.responses.get(key)
        if earlier is not None and earlier.final and not record.final:
            return
        self._check_number(key, batches)
        if conversation is not None:
            row = self._find_conversation(project, conversation)
            if row is None:
                raise NotFound(f"Conversation with id '{conversation}' not found.", param="conversation")
            self._append_block(row, record.id, pack_items(stored.input), pack_items(stored.response.output))
            self._extend_expiry(row, stored.expires_at)
        self._write_response(key, record, batches)
        self._index_items(key, foreign)

    async def load(self, project: str, response_id: str) -> StoredResponse | None:
        record = self._find_response(project, response_id)
        if record is None:
            return None
        return unpack_response(record.id, record.expires_at, record.input, record.output, record.body)

    async def load_response(self, project: str, response_id: str) -> Response | None:
        record = self._find_response(project, response_id)
        return None if record is None else unpack_bare_response(record.id, record.body, record.output)

    async def load_bare_response(self, project: str, response_id: str) -> Response | None:
        record = self._find_response(project, response_id)
        return None if record is None else unpack_bare_response(record.id, record.body)

    async def delete(self, project: str, response_id: str) -> bool:
        if self._find_response(project, response_id) is None:
            return False
        self._delete_response((project, response_id))
        return True

    async def load_chain(self, project: str, response_id: str, *, with_tools: bool = False) -> list[Link]:
        newest = self._find_response(project, response_id)
        if newest is None:
            return []
        links = build_chain(response_id, lambda each: self._tables.responses.get((project, each))).links
        if with_tools:
            links[-1] = add_tools(links[-1], newest.body)
        return links

    async def expire(self, now: int) -> int:
        tables = self._tables
        responses = _find_expired(tables.responses, now)
        for key in responses:
            self._delete_response(key)
        conversations = [key for key, row in tables.conversations.items() if _has_expired(row.expires_at, now)]
        for key in conversations:
            del tables.conversations[key]
        return len(responses) + len(conversations)

    async def shrink(self) -> int:
        _ = self._tables  # raises Unavailable unless the store is open
        return 0

    def _find_response(self, project: str, response_id: str) -> ResponseRecord | None:
        record = self._tables.responses.get((project, response_id))
        return record if record is not None and self._is_live(record) else None

    def _write_response(self, key: Key, record: ResponseRecord, batches: list[EventBatch]) -> None:
        self._tables.responses[key] = record
        if record.final:
            self._tables.runs.pop(key, None)
        if batches:
            self._tables.events.setdefault(key, []).extend(batches)

    def _delete_response(self, key: Key) -> None:
        del self._tables.responses[key]
        self._tables.foreign.pop(key, None)
        self._tables.runs.pop(key, None)
        self._tables.events.pop(key, None)


class _FreeRun(NamedTuple):
    """A run that can be claimed."""

    position: int
    attempt: int
    key: RunKey


class MemoryRunQueue(MemoryReferences):
    async def enqueue(
        self, project: str, stored: StoredResponse, request: bytes, *, limits: RunLimits = NO_LIMITS
    ) -> None:
        record = pack_response(stored)
        if limits.counts_waiting:
            self._check_waiting(project, limits)
        key = project, record.id
        if key in self._tables.responses:
            raise ServerError(f"The store already has a response {record.id}.")
        self._tables.responses[key] = record
        self._tables.runs[key] = RunRow(request=request, model=stored.response.model, free_since=self._now())
        self._index_items(key, find_foreign_items(stored))

    async def claim(
        self,
        owner: str,
        *,
        as_of: float,
        lease: float,
        limit: int,
        wait_by_model: Mapping[str, float] | None = None,
        limits: RunLimits = NO_LIMITS,
    ) -> list[ClaimedRun]:
        # All runs in memory were enqueued by this process, so `wait_by_model` applies to none.
        admission, active = self._open_admission(owner, as_of, limit, limits)
        chosen: list[_FreeRun] = []
        waiting: dict[str, list[_FreeRun]] = {}
        runs = self._tables.runs.values()
        has_suspect = any(run.owner == owner and run.interruptions >= SUSPECT_INTERRUPTIONS for run in runs)
        for position, (key, run) in enumerate(self._tables.runs.items()):
            if _is_free(run, owner, as_of):
                free = _FreeRun(position, run.attempt, RunKey(*key))
                if run.cancelled:
                    chosen.append(free)
                    continue
                is_suspect = run.interruptions + (run.owner is not None) >= SUSPECT_INTERRUPTIONS
                if not (is_suspect and has_suspect):
                    has_suspect |= is_suspect
                    waiting.setdefault(free.key.project, []).append(free)
        in_order = {project: (runs[0].position, iter(runs)) for project, runs in waiting.items()}
        started = choose_in_turns(in_order, admission, active)
        if limits.starts_per_minute is not None:
            self._tables.run_starts += [self._now() for run in started if run.attempt == 0]
        return [self._take(run.key, self._tables.runs[run.key], owner, lease) for run in sorted([*chosen, *started])]

    async def renew(self, owner: str, *, lease: float) -> dict[RunKey, bool]:
        now = self._now()
        for run in self._tables.runs.values():
            if run.owner == owner:
                run.leased_until, run.lease = now + lease, lease
            run.leased_until = min(run.leased_until, now + run.lease)
        return {RunKey(*key): run.cancelled for key, run in self._tables.runs.items() if run.owner == owner}

    async def release(self, owner: str) -> None:
        for run in self._tables.runs.values():
            if run.owner == owner:
                run.owner, run.free_since = None, self._now()

    async def return_run(self, owner: str, project: str, response_id: str, *, free_since: float) -> None:
        if self._is_owned((project, response_id), owner):
            run = self._tables.runs[project, response_id]
            run.owner, run.free_since = None, free_since

    async def stop_renewing(self, owner: str, project: str, response_id: str) -> None:
        if self._is_owned((project, response_id), owner):
            self._tables.runs[project, response_id].owner = ""  # clears the owner and keeps the expiry

    async def mark_watched(self, project: str, response_id: str) -> bool:
        run = self._tables.runs.get((project, response_id))
        if run is not None:
            run.watched = True
        return run is not None

    async def request_cancel(self, project: str, response_id: str) -> bool:
        run = self._tables.runs.get((project, response_id))
        if run is not None:
            run.cancelled = True
        return run is not None

    def _check_waiting(self, project: str, limits: RunLimits) -> None:
        """Raise QueueFull if the project or the whole queue has as many waiting runs as allowed."""
        waiting = [key for key, run in self._tables.runs.items() if run.owner is None and not run.cancelled]
        own = sum(1 for owner, _ in waiting if owner == project)
        if limits.queued_per_project is not None and own >= limits.queued_per_project:
            raise QueueFull(own, is_project=True)
        if limits.queued is not None and len(waiting) >= limits.queued:
            raise QueueFull(len(waiting), is_project=False)

    def _open_admission(
        self, owner: str, as_of: float, limit: int, limits: RunLimits
    ) -> tuple[Admission, Mapping[str, int]]:
        """Return the limits of a claim, and the number of runs in progress by project."""
        active = Counter(
            project for (project, _), run in self._tables.runs.items() if run.owner and not _is_free(run, owner, as_of)
        )
        now = self._now()
        # A start later than now was recorded before the clock was set back.
        recent = (min(each, now) for each in self._tables.run_starts)
        self._tables.run_starts = [each for each in recent if each > now - START_WINDOW]
        return Admission(limits, slots=limit, active=active, starts=len(self._tables.run_starts)), active

    def _take(self, key: RunKey, run: RunRow, owner: str, lease: float) -> ClaimedRun:
        if run.owner is not None:
            run.interruptions, run.free_since = run.interruptions + 1, run.leased_until
        run.owner, run.leased_until, run.lease, run.attempt = owner, self._now() + lease, lease, run.attempt + 1
        return ClaimedRun(
            *key,
            run.request,
            run.attempt,
            run.watched,
            run.cancelled,
            run.interruptions,
            run.model,
            same_configuration=True,
            free_since=run.free_since,
        )


class MemoryPrompts(MemoryTables):
    async def save_prompt(self, project: str, prompt_id: str, version: str, body: bytes, created_at: int) -> None:
        versions = self._tables.prompts.setdefault((project, prompt_id), {})
        if version in versions:
            raise InvalidRequest(
                f"The prompt '{prompt_id}' already has a version '{version}'.", param="version", code="invalid_value"
            )
        versions[version] = PromptRow(body=body, created_at=created_at)

    async def load_prompt(self, project: str, prompt_id: str, version: str | None) -> StoredPrompt | None:
        versions = self._tables.prompts.get((project, prompt_id), {})
        wanted = next(reversed(versions), "") if version is None else version
        row = versions.get(wanted)
        return None if row is None else StoredPrompt(wanted, row.created_at, row.body)

    async def list_prompts(self, project: str) -> list[PromptVersion]:
        return [
            PromptVersion(prompt_id, version, row.created_at)
            for (owner, prompt_id), versions in sorted(self._tables.prompts.items(), key=lambda entry: entry[0])
            if owner == project
            for version, row in versions.items()
        ]

    async def delete_prompt(self, project: str, prompt_id: str) -> bool:
        return self._tables.prompts.pop((project, prompt_id), None) is not None


class MemoryStore(MemoryResponses, MemoryRunQueue, MemoryPrompts):
    """All parts of a store on one set of tables."""


def _find_expired(responses: dict[Key, ResponseRecord], now: int) -> list[Key]:
    """Return the expired responses that only expired responses continue."""
    expired = []
    continued: set[Key] = set()
    for key, record in reversed(responses.items()):  # newest first, so that each is checked once
        if _has_expired(record.expires_at, now) and key not in continued:
            expired.append(key)
        elif record.previous_response_id is not None:
            continued.add((key[0], record.previous_response_id))
    return expired


def _has_expired(expires_at: int | None, now: int) -> bool:
    return expires_at is not None and expires_at <= now


def _is_free(run: RunRow, owner: str, as_of: float) -> bool:
    return run.owner is None or (run.owner != owner and run.leased_until <= as_of)

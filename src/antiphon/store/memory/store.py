"""The memory store: responses, background runs and prompts. Its data is lost when the process ends."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from antiphon import offload
from antiphon.errors import InvalidRequest, NotFound, ServerError
from antiphon.offload import is_large, run_in_thread, run_sized
from antiphon.protocol.response import Response
from antiphon.store.base import (
    NO_LIMITS,
    ClaimedRun,
    ItemRows,
    LeaseLost,
    Link,
    Order,
    QueueFull,
    RunKey,
    StoredResponse,
)
from antiphon.store.changes import Announcement
from antiphon.store.claims import is_delayed
from antiphon.store.event_batches import EventBatch, pack_events
from antiphon.store.history_budget import HistoryShare
from antiphon.store.limits import (
    MAX_UNCOUNTED_ATTEMPT,
    START_WINDOW,
    SUSPECT_INTERRUPTIONS,
    Admission,
    RunLimits,
    SuspectFilter,
    choose_in_turns,
)
from antiphon.store.memory.containers import MemoryContainers
from antiphon.store.memory.conversations import MemoryConversations
from antiphon.store.memory.keys import MemoryKeys
from antiphon.store.memory.tables import Key, MemoryEventLog, MemoryReferences, MemoryTables, PromptRow, RunRow
from antiphon.store.memory.usage import MemoryUsage
from antiphon.store.object_limits import check_number
from antiphon.store.prompts import PromptVersion, StoredPrompt
from antiphon.store.record import (
    ForeignItem,
    ItemRecord,
    ResponseRecord,
    add_tools,
    finish_chain,
    measure_records,
    pack_items,
    pack_with_foreign_items,
    unpack_bare_response,
    unpack_links,
    unpack_page,
    unpack_response,
    walk_chain,
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
        if is_large():
            # It is saved even if the caller is cancelled while a thread encodes it.
            await asyncio.shield(asyncio.ensure_future(self._save_large(project, stored, conversation, owner, events)))
            return
        self._save(project, _pack(stored, conversation, events), conversation, owner)

    async def _save_large(
        self,
        project: str,
        stored: StoredResponse,
        conversation: str | None,
        owner: str | None,
        events: tuple[int, Sequence[bytes]] | None,
    ) -> None:
        packed = await run_in_thread(_pack, stored, conversation, events)
        self._save(project, packed, conversation, owner)

    def _save(self, project: str, packed: "_Packed", conversation: str | None, owner: str | None) -> None:
        record, foreign, batches, items = packed
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
            self._append_block(row, record.id, *items)
            self._extend_expiry(row, record.expires_at)
        self._write_response(key, record, batches)
        self._index_items(key, foreign)

    async def load(self, project: str, response_id: str) -> StoredResponse | None:
        record = self._find_response(project, response_id)
        if record is None:
            return None
        size = len(record.input) + len(record.output) + len(record.body)
        fields = (record.id, record.expires_at, record.input, record.output, record.body)
        return await run_sized(size, unpack_response, *fields)

    async def list_input_items(
        self, project: str, response_id: str, *, after: str | None, limit: int, order: Order
    ) -> ItemRows | None:
        record = self._find_response(project, response_id)
        if record is None:
            return None
        unpack = partial(unpack_page, after=after, limit=limit, order=order)
        return await run_sized(len(record.input), unpack, record.id, record.input)

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

    async def load_chain(
        self, project: str, response_id: str, *, with_tools: bool = False, share: HistoryShare | None = None
    ) -> list[Link]:
        newest = self._find_response(project, response_id)
        if newest is None:
            return []
        walk = walk_chain(response_id, lambda each: self._tables.responses.get((project, each)))
        size = measure_records(walk.records)
        if share is not None:
            await share.reserve(size)
        decoded = await run_sized(size, unpack_links, walk.records)
        links = finish_chain(walk, decoded).links
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
        for key in [key for key, expires_at in tables.effect_claims.items() if _has_expired(expires_at, now)]:
            del tables.effect_claims[key]
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
            self._tables.hosted_steps.pop(key, None)
        if batches:
            self._tables.events.setdefault(key, []).extend(batches)

    def _delete_response(self, key: Key) -> None:
        del self._tables.responses[key]
        self._tables.foreign.pop(key, None)
        self._tables.runs.pop(key, None)
        self._tables.hosted_steps.pop(key, None)
        self._tables.events.pop(key, None)


class _FreeRun(NamedTuple):
    """A run that can be claimed."""

    position: int
    attempt: int
    key: RunKey


class MemoryRunQueue(MemoryReferences):
    def announce(self, announcement: Announcement) -> None:
        pass  # no other process has this store

    async def enqueue(
        self,
        project: str,
        stored: StoredResponse,
        request: bytes,
        *,
        limits: RunLimits = NO_LIMITS,
        watched: bool = False,
    ) -> None:
        record, foreign = await offload.run(pack_with_foreign_items, stored)
        if limits.counts_waiting:
            self._check_waiting(project, limits)
        key = project, record.id
        if key in self._tables.responses:
            raise ServerError(f"The store already has a response {record.id}.")
        self._tables.responses[key] = record
        run = RunRow(request=request, model=stored.response.model, free_since=self._now(), watched=watched)
        self._tables.runs[key] = run
        self._index_items(key, foreign)

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
        runs, now = self._tables.runs.values(), max(self._now(), as_of)
        held = [run.interruptions for run in runs if run.owner == owner and run.interruptions >= SUSPECT_INTERRUPTIONS]
        suspects = SuspectFilter(held)
        for position, (key, run) in enumerate(self._tables.runs.items()):
            if _is_free(run, owner, as_of):
                free = _FreeRun(position, run.attempt, RunKey(*key))
                if run.cancelled:
                    chosen.append(free)
                    continue
                if run.owner is None and is_delayed(run.free_since, now):
                    continue
                if suspects.admit(run.interruptions + (run.owner is not None)):
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

    async def end_leases(self, owner: str) -> None:
        for run in self._tables.runs.values():
            if run.owner == owner:
                run.leased_until = min(run.leased_until, self._now())

    async def return_run(self, owner: str, project: str, response_id: str, *, free_since: float) -> None:
        if self._is_owned((project, response_id), owner):
            run = self._tables.runs[project, response_id]
            run.owner, run.free_since = None, free_since

    async def stop_renewing(self, owner: str, project: str, response_id: str) -> None:
        if self._is_owned((project, response_id), owner):
            self._tables.runs[project, response_id].owner = ""  # clears the owner and keeps the expiry

    async def withdraw_interruption(self, project: str, response_id: str, *, attempt: int) -> bool:
        run = self._tables.runs.get((project, response_id))
        if run is None or not run.interruptions or not attempt < run.attempt <= MAX_UNCOUNTED_ATTEMPT:
            return False
        run.interruptions -= 1
        return True

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

    async def count_waiting(self) -> int:
        return sum(1 for run in self._tables.runs.values() if run.owner is None and not run.cancelled)

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


class MemoryHostedSteps(MemoryTables):
    async def append_hosted_steps(
        self, project: str, response_id: str, first: int, steps: Sequence[bytes], *, owner: str
    ) -> bool:
        key = project, response_id
        if not self._is_owned(key, owner):
            return False
        stored = self._tables.hosted_steps.setdefault(key, [])
        if len(stored) != first:
            if stored[first:] == list(steps):
                return True
            raise ServerError(f"The response {response_id} has {len(stored)} hosted steps, not {first}.")
        stored += steps
        return True

    async def load_hosted_steps(self, project: str, response_id: str) -> list[bytes]:
        return list(self._tables.hosted_steps.get((project, response_id), ()))

    async def claim_effect(self, project: str, key: str, *, expires_at: int | None = None) -> bool:
        if (project, key) in self._tables.effect_claims:
            return False
        self._tables.effect_claims[project, key] = expires_at
        return True


class MemoryPrompts(MemoryTables):
    async def save_prompt(self, project: str, prompt_id: str, version: str, body: bytes, created_at: int) -> None:
        number = sum(len(versions) for (owner, _), versions in self._tables.prompts.items() if owner == project)
        check_number(number, self._limits.max_prompts, "versions of prompts", setting="max_prompts")
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


class MemoryStore(
    MemoryResponses, MemoryRunQueue, MemoryHostedSteps, MemoryPrompts, MemoryKeys, MemoryUsage, MemoryContainers
):
    """All parts of a store on one set of tables."""


class _Packed(NamedTuple):
    """A response with its related rows, as `MemoryResponses.save` writes them."""

    record: ResponseRecord
    foreign: list[ForeignItem]
    batches: list[EventBatch]
    items: tuple[list[ItemRecord], list[ItemRecord]]


def _pack(stored: StoredResponse, conversation: str | None, events: tuple[int, Sequence[bytes]] | None) -> _Packed:
    items = ([], []) if conversation is None else (pack_items(stored.input), pack_items(stored.response.output))
    batches = [] if events is None else pack_events(*events)
    return _Packed(*pack_with_foreign_items(stored), batches, items)


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

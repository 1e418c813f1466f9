"""Comparison of the settings and clocks of the nodes that share a database. Differences are logged at the start."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec import Struct

from antiphon.config.settings import Settings
from antiphon.engine.sealing import Sealer
from antiphon.entry_points import find_own_version
from antiphon.errors import AntiphonError
from antiphon.store.peer_link import StorePeerLink
from antiphon.tasks import cancel_tasks

logger = logging.getLogger(__name__)

SETTINGS_QUESTION = "settings"
# Settings that should be the same on all nodes. Their names are in the messages.
_COMPARED = (
    "api_keys",
    "backends",
    "background_lease_seconds",
    "data_dir",
    "files",
    "limits",
    "mcp_servers",
    "models",
    "prices",
    "projects",
    "retention_days",
)
_SEAL_KEYS = "seal_keys"
_MAX_CLOCK_OFFSET = 5.0


class NodeDescription(Struct, frozen=True):
    """A node as it answers others. `digests` are keyed digests of its settings, by their names."""

    name: str
    version: str
    time: float
    digests: Mapping[str, str]


def make_setting_digests(settings: Settings, sealer: Sealer) -> dict[str, str]:
    """Return a digest of each setting that nodes share. Only a holder of the newest seal key can compute it."""
    digests = {_SEAL_KEYS: sealer.digest(b"")[:16]}
    for name in _COMPARED:
        value = msgspec.json.encode((name, getattr(settings, name)), enc_hook=str, order="sorted")
        digests[name] = sealer.digest(value)[:16]
    return digests


def describe_node(digests: Mapping[str, str]) -> NodeDescription:
    """Return the description of this process."""
    name = f"{socket.gethostname()} (process {os.getpid()})"
    return NodeDescription(name, find_own_version(), time.time(), digests)


def compare_nodes(own: NodeDescription, others: Sequence[NodeDescription], *, seconds: float) -> Iterator[str]:
    """Yield the differences between this node and others. Their answers took up to `seconds`."""
    for other in others:
        if other.version != own.version:
            yield f"the node {other.name} has version {other.version}, and this one {own.version}"
        if other.digests.get(_SEAL_KEYS) != own.digests.get(_SEAL_KEYS):
            # The digests of the other settings cannot be compared.
            yield f"the node {other.name} has another newest key in {_SEAL_KEYS}: set the same on all nodes"
        else:
            names = sorted(name for name, digest in own.digests.items() if other.digests.get(name) != digest)
            if names:
                yield f"the node {other.name} has other settings: {', '.join(names)}"
        offset = other.time - own.time
        if offset > seconds + _MAX_CLOCK_OFFSET or offset < -_MAX_CLOCK_OFFSET:
            yield f"the clock of the node {other.name} differs by {offset:+.0f} seconds"


class NodeSettings:
    """Answers other nodes with the settings of this one, and compares them once at the start."""

    def __init__(self) -> None:
        self.digests: Mapping[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self, link: StorePeerLink) -> None:
        link.answers[SETTINGS_QUESTION] = self._answer
        self._task = asyncio.create_task(self._compare(link))

    async def close(self) -> None:
        await cancel_tasks(self._task)

    async def _answer(self, _: bytes) -> bytes:
        return msgspec.json.encode(describe_node(self.digests)) if self.digests else b""

    async def _compare(self, link: StorePeerLink) -> None:
        if not self.digests:
            return
        await link.wait_connected()
        try:
            for difference in await ask_nodes(link, self.digests):
                logger.warning("%s", difference)
        except AntiphonError as error:  # the store logs its failures
            logger.debug("the nodes were not compared: %s", error)


async def ask_nodes(link: StorePeerLink, digests: Mapping[str, str]) -> list[str]:
    """Return the differences between a node with these settings and all others."""
    own = describe_node(digests)
    started = time.monotonic()
    answers = await link.ask_all(SETTINGS_QUESTION)
    return list(compare_nodes(own, decode_nodes(answers), seconds=time.monotonic() - started))


def decode_nodes(answers: Sequence[bytes]) -> list[NodeDescription]:
    """Return the readable answers, by name. A node of another version may answer differently."""
    nodes = []
    for answer in answers:
        try:
            nodes.append(msgspec.json.decode(answer, type=NodeDescription))
        except msgspec.DecodeError:
            logger.debug("the description of a node cannot be read")
    return sorted(nodes, key=lambda node: node.name)

"""Compaction with the embedded model."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from antiphon.backends.embedded.backend import EmbeddedBackend
from antiphon.backends.embedded.weights import DEFAULT_MODEL
from antiphon.engine.engine import Engine
from antiphon.engine.sealing import Sealer
from antiphon.engine.serve.compaction.compaction_item import unseal_content
from antiphon.protocol import codec
from antiphon.protocol.items import Compaction
from antiphon.store.memory.store import MemoryStore
from support.engine_harness import judge

WINDOW = 768
SEALER = Sealer([bytes(32)])


@pytest.fixture
async def engine(shallow_weights: Path) -> AsyncIterator[Engine]:
    backend = EmbeddedBackend(shallow_weights, context=WINDOW, slots=1, batch=256)
    engine = Engine(backends={"local": backend}, store=MemoryStore(), sealer=SEALER)
    await engine.start()
    yield engine
    await engine.close()


async def test_embedded_model_summarises_a_long_conversation(engine: Engine) -> None:
    received = [
        item
        for number in range(1, 6)
        for item in (
            {"role": "user", "content": f"What is on page {number} of the report about the bridge in Bern?"},
            {"role": "assistant", "content": f"Page {number} tells how the bridge was painted red. " * 4},
        )
    ]
    body = {
        "model": DEFAULT_MODEL,
        "input": [*received, {"role": "user", "content": "Which colour is the bridge?"}],
        "context_management": [{"type": "compaction", "compact_threshold": 256}],
        "max_output_tokens": 16,
        "temperature": 0,
    }
    run = await engine.create(codec.decode_request(codec.encode(body)).body, project="default")
    response = judge([event async for batch in run.events() for event in batch])
    compaction, answer = response.output
    assert isinstance(compaction, Compaction)
    memory = unseal_content(compaction, SEALER, project="default")
    assert memory is not None
    assert memory.summary
    assert not memory.summary.startswith("(No summary could be written.")
    assert (answer.type, response.status in ("completed", "incomplete")) == ("message", True)
    assert response.usage is not None
    # The summary and the answer each were read and written by the model.
    assert response.usage.output_tokens > 16

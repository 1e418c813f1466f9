"""Sealed reasoning: who does not make it, who cannot read it, and what stays of it then."""

import pytest

from antiphon.agent.history import cannot_decrypt, drop_encrypted, refuses_encryption
from antiphon.errors import AntiphonError, InvalidRequest, RateLimited, UnsupportedParameter, UpstreamError

OPEN = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
HOLLOW = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]}
SAID = {"role": "assistant", "content": "Well."}
COMPACTED = {"type": "compaction", "encrypted_content": "y"}


def seal(item: dict[str, object]) -> dict[str, object]:
    return item | {"encrypted_content": "x"}


@pytest.mark.parametrize(
    ("error", "about_it"),
    [
        (InvalidRequest("Encrypted content is not supported with this model.", param="include"), True),
        (InvalidRequest("400: Encrypted content is not supported with this model."), True),
        (InvalidRequest("Invalid value: 'reasoning.encrypted_content'."), True),
        (InvalidRequest("Unknown value.", param="include[0]"), True),
        (UnsupportedParameter("Unknown parameter: 'include'.", param="include"), True),
        (InvalidRequest("No.", param="input"), False),
        (InvalidRequest("The encrypted content could not be verified.", code="invalid_encrypted_content"), False),
        (UpstreamError("Encrypted content is not supported with this model."), False),
        (RateLimited("Slow down.", param="include"), False),
    ],
)
def test_a_model_that_does_not_seal_is_known_by_what_it_says(error: AntiphonError, about_it: bool) -> None:
    assert refuses_encryption(error) is about_it


def test_a_seal_that_does_not_open_is_known_by_its_code() -> None:
    assert cannot_decrypt(InvalidRequest("No.", code="invalid_encrypted_content"))
    assert not cannot_decrypt(InvalidRequest("No.", param="input"))


def test_what_anybody_can_read_stays_and_so_does_what_was_not_sealed() -> None:
    items = [SAID, seal(OPEN), seal(HOLLOW), HOLLOW, OPEN, COMPACTED]
    assert drop_encrypted(items) == [SAID, OPEN, HOLLOW, OPEN, COMPACTED]

import pytest

from antiphon.errors import AntiphonError, ConfigError, InvalidRequest, ModelError


@pytest.mark.parametrize("kind", [InvalidRequest, ModelError])
def test_message_with_a_long_value_keeps_its_start_and_end(kind: type[AntiphonError]) -> None:
    error = kind(f"The name '{'x' * 1_000_000}' is unknown: use another.", param="name", code="unknown")
    assert (error.message[:20], error.message[-27:]) == ("The name 'xxxxxxxxxx", "x' is unknown: use another.")
    assert (len(error.message) < 2000, str(error), error.param, error.code) == (True, error.message, "name", "unknown")


def test_param_with_a_long_name_is_shortened() -> None:
    error = InvalidRequest("Wrong.", param=f"filters.{'x' * 1_000_000}")
    assert (str(error.param)[:12], len(str(error.param)) < 2000) == ("filters.xxxx", True)


def test_message_for_the_operator_is_complete() -> None:
    assert ConfigError("x" * 50_000).message == "x" * 50_000

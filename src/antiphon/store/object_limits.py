"""Limits on the number of objects of a project. They are checked in the transaction that creates an object."""

from antiphon.errors import InvalidRequest, QuotaExceeded
from antiphon.store.sql_steps import SqlStep, Steps


def check_number(number: int, maximum: int, objects: str, *, setting: str, hint: str = "Delete some first.") -> None:
    """Raise QuotaExceeded if a project has the maximum number of objects."""
    if number >= maximum:
        raise QuotaExceeded(
            f"This project has {number} {objects}, and at most {maximum} are allowed (setting {setting}). {hint}",
        )


def check_file_number(
    statement: str,
    parameters: tuple[object, ...],
    *,
    maximum: int,
    objects: str,
    setting: str,
    param: str,
    added: int = 1,
    hint: str = "Delete some first.",
) -> Steps[None]:
    """Raise InvalidRequest if the number that a statement returns would exceed the maximum."""
    ((number,),) = yield SqlStep(statement, parameters)
    if number + added > maximum:
        raise InvalidRequest(
            f"There would be {number + added} {objects}, and at most {maximum} are allowed (setting files.{setting}). "
            f"{hint}",
            param=param,
            code="file_quota_exceeded",
        )

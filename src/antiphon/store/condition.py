"""The condition of the database of a store, found without changing it."""

from msgspec import Struct


class StoreCondition(Struct, frozen=True, kw_only=True):
    """The facts about a database.

    `schema` is its version, 0 for a new database, and `newest` the version that this program needs. `refusal` is the
    reason why nothing can be written now. `clock_offset` is the number of seconds by which the database's clock is
    ahead of ours. `has_keys`: there are API keys in it, valid or not. `other_tables` are tables of another program with
    names of ours, which a new database must not have.
    """

    schema: int
    newest: int
    refusal: str | None = None
    clock_offset: float = 0.0
    has_keys: bool = False
    other_tables: tuple[str, ...] = ()

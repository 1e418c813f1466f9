"""The driver of PostgreSQL, a package of the extra `postgres`."""

from antiphon.errors import ConfigError

try:
    import asyncpg
except ImportError:
    raise ConfigError("The PostgreSQL store needs the package asyncpg: pip install 'antiphon[postgres]'") from None

__all__ = ["asyncpg"]

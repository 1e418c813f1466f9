"""Ids: time-ordered, so that they sit together in an index, and unguessable, so that knowing one gives no other."""

import secrets
import time


def new_id(prefix: str) -> str:
    return f"{prefix}_{time.time_ns() // 1_000_000:012x}{secrets.token_hex(16)}"

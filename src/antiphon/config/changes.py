"""The settings that a running server can change, and those that need a restart."""

from typing import NamedTuple

import msgspec

from antiphon.config.settings import Settings

RELOADABLE = frozenset(
    {
        "allowed_hosts",
        "api_keys",
        "background_concurrency",
        "background_concurrency_per_project",
        "background_queued",
        "background_queued_per_project",
        "background_slots",
        "background_starts_per_minute",
        "backends",
        "body_timeout_seconds",
        "grammars",
        "head_timeout_seconds",
        "history_budget_bytes",
        "history_wait_seconds",
        "hosted_tools",
        "idle_timeout_seconds",
        "image_generation",
        "inherit_tools",
        "insecure",
        "limits",
        "log_format",
        "log_level",
        "max_answer_bytes",
        "max_answer_events",
        "max_answer_items",
        "max_answer_text_bytes",
        "max_connections",
        "max_content_parts",
        "max_hosted_calls",
        "max_input_items",
        "max_prompt_bytes",
        "max_tools",
        "max_unauthenticated",
        "max_unauthenticated_per_address",
        "mcp_servers",
        "models",
        "opening_seconds",
        "outbound_allow",
        "prices",
        "projects",
        "queue_seconds",
        "queued",
        "queued_per_project",
        "retention_days",
        "shutdown_drain_seconds",
        "shutdown_grace_seconds",
        "unsupported_tools",
        "web_search",
    }
)
"""Settings that take effect with a reload. A setting that is missing here needs a restart."""

# Settings that a server does not use, and messages for its start.
_UNUSED = frozenset({"run_currency", "run_prices", "run_retention_days", "warnings"})


class SettingChanges(NamedTuple):
    """The difference between two settings.

    `settings` are the new ones, with the old values where a restart is needed. `changed` and `ignored` are the names of
    the settings that take effect, and of those that need a restart.
    """

    settings: Settings
    changed: list[str]
    ignored: list[str]


def compare_settings(old: Settings, new: Settings) -> SettingChanges:
    """Compare the settings of a running server with those that it has read again."""
    names = [name for name in old.__struct_fields__ if getattr(old, name) != getattr(new, name)]
    names = [name for name in names if name not in _UNUSED]
    ignored = [name for name in names if name not in RELOADABLE]
    settings = msgspec.structs.replace(new, **{name: getattr(old, name) for name in ignored})
    return SettingChanges(settings, [name for name in names if name in RELOADABLE], ignored)

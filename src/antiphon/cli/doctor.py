"""`antiphon doctor`: check the settings and the surroundings of a server, and show what to do about problems."""

import asyncio
from argparse import Namespace
from collections.abc import Sequence

import msgspec

from antiphon.cli.doctor_checks import Finding, check_clock, check_server, problem
from antiphon.cli.secrets import hide_secrets
from antiphon.cli.settings import read_settings
from antiphon.config.readers import ConfigProblems
from antiphon.text_table import measure_text, pad_text


def run(arguments: Namespace) -> int:
    try:
        settings = read_settings(arguments)
    except ConfigProblems as error:
        advice = "Correct the setting. docs/configuration.md describes all of them."
        findings = [problem("settings", text, advice) for text in error.problems] + [check_clock()]
    else:
        findings = [
            msgspec.structs.replace(finding, message=hide_secrets(finding.message, settings))
            for finding in asyncio.run(check_server(settings, arguments.config))
        ]
    has_problem = any(finding.status == "problem" for finding in findings)
    if arguments.json:
        report = {"status": _summarize(findings), "checks": findings}
        print(msgspec.json.encode(report).decode())
    else:
        _print_findings(findings)
    return 1 if has_problem else 0


def _summarize(findings: Sequence[Finding]) -> str:
    statuses = {finding.status for finding in findings}
    return next((status for status in ("problem", "warning") if status in statuses), "ok")


def _print_findings(findings: Sequence[Finding]) -> None:
    width = max(measure_text(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.status:8} {pad_text(finding.name, width)}  {finding.message}")
        if finding.advice:
            print(f"{'':8} {'':{width}}  {finding.advice}")

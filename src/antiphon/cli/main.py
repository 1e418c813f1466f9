"""The command line. Each command is a module of this package with a function `run`, imported when it is used."""

import importlib
import os
import sys
from collections.abc import Sequence

from antiphon.cli.arguments import build_parser
from antiphon.errors import AntiphonError

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 success, 1 failure, 2 invalid arguments, 130 interrupted.

    `antiphon run` has further exit statuses.
    """
    _open_closed_streams()
    try:
        given = sys.argv[1:] if argv is None else argv
        arguments = build_parser(given[0] if given else None).parse_args(given)
        if arguments.command == "run" and arguments.force and arguments.resume is None:
            arguments.report_usage_error("argument --force: a new run has no other process; use it with --resume")
        command = importlib.import_module(f"antiphon.cli.{arguments.command}")
        status: int = command.run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return 1
    except (AntiphonError, OSError) as error:
        print(f"antiphon: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    finally:
        _discard_unwritable_output()
    return status


def _open_closed_streams() -> None:
    """Open the null device for closed standard streams: a socket could get their descriptors, here or in a worker."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


def _discard_unwritable_output() -> None:
    """Replace a closed pipe or terminal. Python flushes both at exit, and exits with status 120 if that fails."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

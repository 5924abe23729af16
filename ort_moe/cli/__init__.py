"""The command `ort-moe`: one module a verb, over the public API.

Nothing heavy is imported before a verb runs, so that `ort-moe --help` is immediate.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from ort_moe.cli.app import app
from ort_moe.cli.exit_codes import ExitCode
from ort_moe.errors import EnvironmentUnfitError, LeftoverWarning, OrtMoeError, VerificationError

_usual_format = warnings.formatwarning


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits with an `ExitCode`."""
    # As an exception, so that what is half-written is cleaned up.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _exit_on_signal)
    warnings.formatwarning = _format_warning
    interrupted: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        interrupted.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="ort-moe")
    except Exception as error:
        if interrupted:  # and packages made something else of it, as while they were being imported
            sys.exit(128 + signal.SIGINT)
        _exit_on_error(error)
    sys.exit(ExitCode.DONE)


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """Tells of what is left behind in one line, and of all else as Python does."""
    if issubclass(category, LeftoverWarning):
        return f"ort-moe: warning: {message}\n"
    return _usual_format(message, category, filename, lineno, line)


def _exit_on_error(error: Exception) -> NoReturn:
    """Tells of an error in a sentence, where it is one that a user can do something about."""
    if isinstance(error, OrtMoeError):
        print(f"ort-moe: error: {error}", file=sys.stderr)
        if isinstance(error, VerificationError):
            sys.exit(ExitCode.VERIFICATION_FAILED)
        if isinstance(error, EnvironmentUnfitError):
            sys.exit(ExitCode.ENVIRONMENT_UNFIT)
        sys.exit(ExitCode.ERROR)
    if isinstance(error, OSError):  # a full disk behind stdout, a working folder that is gone
        print(f"ort-moe: error: {error}", file=sys.stderr)
        sys.exit(ExitCode.ERROR)
    raise error


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)

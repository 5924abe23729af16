"""The command `ort-moe`: one module a verb, over the public API.

Nothing heavy is imported before a verb runs, so that `ort-moe --help` is immediate.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from ort_moe.cli.app import app
from ort_moe.cli.exit_codes import ExitCode
from ort_moe.errors import EnvironmentUnfitError, OrtMoeError, VerificationError


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command and exits with an `ExitCode`."""
    # As an exception, so that what is half-written is cleaned up.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _exit_on_signal)
    try:
        app(args=None if arguments is None else list(arguments), prog_name="ort-moe")
    except OrtMoeError as error:
        print(f"ort-moe: error: {error}", file=sys.stderr)
        if isinstance(error, VerificationError):
            sys.exit(ExitCode.VERIFICATION_FAILED)
        if isinstance(error, EnvironmentUnfitError):
            sys.exit(ExitCode.ENVIRONMENT_UNFIT)
        sys.exit(ExitCode.ERROR)
    except OSError as error:  # a full disk behind stdout, a working folder that is gone
        print(f"ort-moe: error: {error}", file=sys.stderr)
        sys.exit(ExitCode.ERROR)
    sys.exit(ExitCode.DONE)


def _exit_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)

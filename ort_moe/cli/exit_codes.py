"""What the exit codes of `ort-moe` mean."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """An exit code; scripts rely on the numbers."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    NOTHING_MATCHED = 3
    VERIFICATION_FAILED = 4
    ENVIRONMENT_UNFIT = 5

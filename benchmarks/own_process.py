"""Code run in a process of its own, for switches of the library that are read once in a process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

_MARK = "TIMES "


def times_printed_by(code: str, environment: Mapping[str, str]) -> list[Any]:
    """What the code prints as JSON behind TIMES, line by line.

    Raises:
        CalledProcessError: It fails.
    """
    run = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line.removeprefix(_MARK)) for line in run.stdout.splitlines() if line.startswith(_MARK)]

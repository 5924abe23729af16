"""Where a verb prints: results on stdout; progress, warnings and what goes beside JSON on stderr."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH_IN_A_PIPE = 120
"""Columns where no terminal and no COLUMNS says how many."""
_PATIENCE = 1.0
"""Seconds before a spinner is worth its flicker."""


def stdout() -> Console:
    """The console on stdout."""
    return _console(sys.stdout)


def stderr() -> Console:
    """The console on stderr."""
    return _console(sys.stderr)


def print_json(document: Mapping[str, object]) -> None:
    """Prints JSON, alone, on stdout."""
    print(json.dumps(document, indent=2))


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Shows on a terminal, after a second, that work is going on."""
    console = stderr()
    if not console.is_terminal:
        yield
        return
    status = console.status(text)
    timer = threading.Timer(_PATIENCE, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()


def _console(file: TextIO) -> Console:
    from rich.console import Console

    if isinstance(file, io.TextIOWrapper):  # a name that the terminal's encoding lacks is no reason to fail
        file.reconfigure(errors="backslashreplace")
    width = None if file.isatty() or "COLUMNS" in os.environ else _WIDTH_IN_A_PIPE
    return Console(file=file, width=width, highlight=False)

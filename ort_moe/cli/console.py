"""Where a verb prints: results on stdout; progress, warnings and what goes beside JSON on stderr."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_PATIENCE = 1.0
"""Seconds before a spinner is worth its flicker."""


def show(result: RenderableType, *, on_stderr: bool = False) -> None:
    """Prints a result: drawn on a terminal, as plain text elsewhere, whose tables fit in COLUMNS where that is set."""
    from ort_moe.printing.printable import PLAIN_WIDTH, plain

    console = _console(sys.stderr if on_stderr else sys.stdout)
    if console.is_terminal:
        console.print(result)
    else:
        width = console.width if "COLUMNS" in os.environ else PLAIN_WIDTH
        print(plain(result, width), file=console.file)


def print_json(document: Mapping[str, object]) -> None:
    """Prints JSON, alone, on stdout."""
    print(json.dumps(document, indent=2))


@contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal, after a second, that work is going on; what it yields changes the text."""
    console = _console(sys.stderr)
    if not console.is_terminal:
        yield lambda text: None
        return
    status = console.status(text)
    timer = threading.Timer(_PATIENCE, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield status.update
    finally:
        timer.cancel()
        timer.join()
        status.stop()


def _console(file: TextIO) -> Console:
    from rich.console import Console

    if isinstance(file, io.TextIOWrapper):  # a name that the terminal's encoding lacks is no reason to fail
        file.reconfigure(errors="backslashreplace")
    return Console(file=file, highlight=False)

"""A file that a run writes beside its result, such as its report or a plot."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from ort_moe.errors import OutputError
from ort_moe.files.staging import check_file_place, same_file, staged_file


def check_side_file(path: Path, kind: str, *, source: str | os.PathLike[str], begins: bytes) -> None:
    """Looks whether such a file can be written there, before work is put into it.

    Args:
        path: Where it shall go.
        kind: What it is, in a word.
        source: The model or folder that the run is about.
        begins: With what such files begin: others are not replaced, unless they are empty.

    Raises:
        OutputError: It cannot.
    """
    if same_file(path, source):
        raise OutputError(f"cannot write the {kind} {path}: it is the input")
    try:
        check_file_place(path.absolute())
    except OutputError as error:
        raise OutputError(f"cannot write the {kind} {str(error).removeprefix('cannot write ')}") from error
    if path.exists():
        with path.open("rb") as file:
            head = file.read(len(begins))
        if head not in (b"", begins):
            raise OutputError(f"cannot write the {kind} {path}: it exists and is no {kind}")


def write_side_file(path: Path, kind: str, write: Callable[[Path], object]) -> None:
    """Has it written beside its place and moved there: an interrupt leaves what was there before.

    Args:
        path: Where it shall go.
        kind: What it is, in a word.
        write: Writes it to the path that it is given.

    Raises:
        OutputError: It cannot be written.
    """
    try:
        with staged_file(path) as staged:
            write(staged)
    except OSError as error:
        raise OutputError(f"cannot write the {kind} {path}: {error.strerror or error}") from error

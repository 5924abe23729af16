"""Files and folders that are made beside their places, and moved there when they are whole.

Their names are nobody else's, so that two runs at once do not meet; they begin with a dot and end in `.tmp`.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ort_moe.errors import OutputError

HOW_TO_REPLACE = "name another output, or use --force to replace it"
"""What to do where something is in the place of an output."""


def check_parent(target: Path) -> None:
    """Looks whether a file or folder can be put into the folder of the target.

    Raises:
        OutputError: It cannot.
    """
    parent = target.parent
    if not parent.exists():
        raise OutputError(f"cannot write {target}: there is no folder {parent}")
    if not parent.is_dir():
        raise OutputError(f"cannot write {target}: {parent} is not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise OutputError(f"cannot write {target}: the folder {parent} is read-only")


def check_file_place(target: Path) -> None:
    """Looks whether a file can be put there, or take the place of one.

    Raises:
        OutputError: It cannot.
    """
    check_parent(target)
    if target.is_dir():
        raise OutputError(f"cannot write {target}: it is a folder")
    if target.exists() and not target.is_file():
        raise OutputError(f"cannot write {target}: it is a device or a pipe, and a file would take its place")


def check_still_free(target: Path) -> None:
    """Looks whether nothing has come to a place that was free when the work began, such as another run's output.

    Raises:
        OutputError: Something has.
    """
    if os.path.lexists(target):
        raise OutputError(f"cannot write {target}: it has come into being meanwhile; {HOW_TO_REPLACE}")


def same_file(path: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether both exist and are one file, by whatever names."""
    return os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other)


def folder_beside(target: Path) -> Path:
    """Makes a new folder beside the target, for this user alone.

    Raises:
        OSError: It cannot be made.
    """
    return Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))


def file_beside(target: Path) -> Path:
    """Makes a new empty file beside the target, for this user alone.

    Raises:
        OSError: It cannot be made.
    """
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    os.close(handle)
    return Path(name)


def give_usual_mode(path: Path) -> None:
    """Lets the user's umask say who may read a file or folder that was made here, before it is moved into place."""
    mask = os.umask(0)
    os.umask(mask)
    path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


@contextmanager
def staged_file(target: Path) -> Iterator[Path]:
    """A file to write, which takes the place of the target in the end; deleted by an error or an interrupt.

    Raises:
        OSError: It cannot be made or moved.
    """
    staged = file_beside(target)
    try:
        yield staged
        give_usual_mode(staged)
        staged.replace(target)
    finally:
        staged.unlink(missing_ok=True)

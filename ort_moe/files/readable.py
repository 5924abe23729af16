"""Looks whether files can be read, before work is put into what is made of them."""

from __future__ import annotations

from pathlib import Path

from ort_moe.errors import ModelError


def check_readable(path: Path) -> None:
    """Opens a regular file and closes it again.

    Raises:
        ModelError: It cannot be read.
    """
    try:
        path.open("rb").close()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error

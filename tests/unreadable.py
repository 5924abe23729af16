"""Files that may not be read, also where tests are run by root, who may read all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


def refuse_to_open(monkeypatch: pytest.MonkeyPatch, locked: Path) -> None:
    """Has `Path.open` refuse the file as it would another user's."""
    usual: Any = Path.open

    def guarded(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == locked:
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return usual(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", guarded)

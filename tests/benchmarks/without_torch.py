"""Modules of benchmarks that import PyTorch, which the checkout need not have, for what in them does not need it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock


@contextmanager
def imported(name: str) -> Iterator[ModuleType]:
    """A module of benchmarks with a stand-in for PyTorch; behind it all of benchmarks is imported anew."""
    with mock.patch.dict(sys.modules, torch=mock.MagicMock()):
        _forget()
        yield importlib.import_module(name)
        _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]

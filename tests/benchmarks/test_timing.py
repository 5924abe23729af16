"""Benchmarks say in one sentence that there is no GPU; PyTorch, which the checkout need not have, is stood in for."""

from __future__ import annotations

import importlib
import sys
from unittest import mock

import pytest


@pytest.mark.parametrize("benchmark", ["router", "finalize", "experts"])
def test_without_a_gpu(benchmark: str) -> None:
    torch = mock.MagicMock(__version__="2.13.0")
    torch.cuda.is_available.return_value = False
    with mock.patch.dict(sys.modules, torch=torch), mock.patch.object(sys, "argv", [benchmark]):
        for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
            del sys.modules[name]  # what imports torch, for the time of this test
        main = importlib.import_module(f"benchmarks.{benchmark}").main
        with pytest.raises(SystemExit, match=r"need an NVIDIA GPU .*, but PyTorch 2\.13\.0 finds no CUDA device"):
            main()

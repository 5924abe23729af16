"""Benchmarks without a GPU; PyTorch and Triton, which the checkout need not have, are stood in for."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest


def _take_out() -> dict[str, ModuleType]:
    """Takes the benchmarks and what is stood in for out of the modules; others cannot be loaded twice."""
    names = [name for name in sys.modules if name.partition(".")[0] in ("benchmarks", "torch", "triton")]
    return {name: sys.modules.pop(name) for name in names}


@pytest.fixture
def stand_ins() -> Iterator[None]:
    """PyTorch and Triton for benchmarks that are imported in the test."""
    torch, triton = mock.MagicMock(__version__="2.13.0"), mock.MagicMock()
    torch.cuda.is_available.return_value = False
    before = _take_out()
    sys.modules |= {"torch": torch, "triton": triton, "triton.language": triton.language}
    yield
    _take_out()
    sys.modules |= before


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    "benchmark",
    ["router", "finalize", "experts", "training_router", "gather_finalize", "shared_gate", "permute", "routing"],
)
def test_without_a_gpu(benchmark: str) -> None:
    with mock.patch.object(sys, "argv", [benchmark]):
        main = importlib.import_module(f"benchmarks.{benchmark}").main
        with pytest.raises(SystemExit, match=r"need an NVIDIA GPU .*, but PyTorch 2\.13\.0 finds no CUDA device"):
            main()


@pytest.mark.usefixtures("stand_ins")
def test_one_command_makes_every_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    routing = importlib.import_module("benchmarks.routing")
    asked: list[list[str]] = []
    tables = {name: (heading, asked.append, known) for name, (heading, _, known) in routing.TABLES.items()}
    folder = tmp_path / "results" / "today"
    with mock.patch.object(routing, "TABLES", tables):
        routing.main(["--json", str(folder), "--only", "512/10", "--without-ort"])
    assert folder.is_dir()
    assert [given[-4:] for given in asked] == [
        ["--only", "512/10", "--json", str(folder / f"{name}.json")]
        for name in (
            "router",
            "router_maps",
            "permute",
            "finalize",
            "training_router",
            "gather_finalize",
            "shared_gate",
        )
    ]
    assert [given[:-4] for given in asked] == [["--without-ort"], ["--maps", "--without-ort"], *[[]] * 5]
    headings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("## ")]
    assert headings == [f"## {heading}" for heading, _, _ in routing.TABLES.values()]


@pytest.mark.usefixtures("stand_ins")
def test_times_in_onnxruntime_outlive_a_run_without_it(tmp_path: Path) -> None:
    router = importlib.import_module("benchmarks.router")
    path = tmp_path / "router.json"
    times = {"ours_ort_us": 1.5, "unfused_ort_us": None}
    environment = {"onnxruntime": "1.31.1", "date": "2026-11-30"}
    assert router.ort_times(None) == router.ort_times(path) == ({}, {})
    row = {"shape": "8/2", "tokens": 1, "ours_us": 1.0, **times}
    for before in (environment, {"in_ort": "ONNX Runtime 1.31.1, 2026-11-30", "date": "2026-12-01"}):
        path.write_text(json.dumps({"environment": before, "rows": [row]}))
        assert router.ort_times(path) == ({("8/2", 1): times}, {"in_ort": "ONNX Runtime 1.31.1, 2026-11-30"})
    path.write_text(json.dumps({"environment": {"date": "2026-12-01"}, "rows": [row | dict.fromkeys(times)]}))
    assert router.ort_times(path) == ({}, {})


@pytest.mark.usefixtures("stand_ins")
def test_a_table_of_no_shape_leaves_the_record_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = importlib.import_module("benchmarks.command")
    path = tmp_path / "finalize.json"
    path.write_text("before")
    args = command.parser("Table.", (1,)).parse_args(["--only", "512/10", "--json", str(path)])
    with mock.patch.object(command, "timing"):
        shape = mock.Mock()
        shape.name = "2560/10 bfloat16"
        assert command.run(args, [shape], mock.Mock(), {}) == []
    assert path.read_text() == "before"
    assert capsys.readouterr().out == "no shape's name contains '512/10'\n"

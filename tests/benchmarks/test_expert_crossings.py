"""What is said of crossings, with a stand-in for PyTorch, which the checkout need not have; and a small run."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.expert_models import Shape
from tests.benchmarks.without_torch import imported


@pytest.fixture
def crossings() -> Iterator[Any]:
    with imported("benchmarks.expert_crossings") as module:
        yield module


def row(tokens: int, taken: float, few: float, grouped: float, load: str = "uniform") -> dict[str, Any]:
    shape = "int4/32 float16 8/2/64/32"
    return {"shape": shape, "load": load, "tokens": tokens, "layer_us": taken, "few_us": few, "grouped_us": grouped}


def test_losses_are_told_by_format_and_load(crossings: Any) -> None:
    """A way is told by its own time, and points where forcing changes nothing do not count."""
    rows = [
        row(1, 11.0, 10.0, 20.0),
        row(2, 22.5, 20.0, 22.0),
        row(4, 30.4, 30.0, 30.2),
        row(1, 9.0, 12.0, 9.0, "zipf"),
    ]
    rows = [r | {"lost_percent": crossings.lost_percent(r)} for r in rows]
    assert [r["lost_percent"] for r in rows] == [0.0, 10.0, None, 0.0]
    head = "int4/32, {}: what is taken lasts {} % longer than the faster way in the mean of {} points, at most {} %"
    where = "(int4/32 float16 8/2/64/32, T = {})"
    assert crossings.losses(rows) == [
        f"{head.format('uniform', '5.0', 2, '10.0')} {where.format(2)}",
        f"{head.format('zipf', '0.0', 1, '0.0')} {where.format(1)}",
    ]


def test_blocks_divide_the_widths_that_are_measured(crossings: Any) -> None:
    for shape in crossings.SHAPES:
        assert (shape.hidden % (shape.block_size or 16), shape.inner % (shape.block_size or 16)) == (0, 0)
        assert crossings.tokens_of(shape, [1, 1000]) == [1]


@pytest.mark.parametrize("options", [("--only", "int3"), ("--tokens", "1000"), ("--tokens", "0")])
def test_a_record_makes_no_room_for_nothing(
    crossings: Any, options: tuple[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["expert_crossings", *options, "--json", str(tmp_path / "crossings.json")])
    with pytest.raises(SystemExit, match=r"no shape whose name contains '.*' has 1 to 96 choices at any of \d"):
        crossings.main()
    assert list(tmp_path.iterdir()) == []


def test_what_the_library_takes_is_timed_without_the_switch(
    crossings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(crossings.SWITCH, "0")
    script = tmp_path / "python"
    script.write_text('#!/bin/sh\necho "TIMES {\\"set to ${ORT_MOE_FEW_CHOICES-nothing}\\": 1.0}"\n', encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    times = [list(crossings.time_way(value, [], [])) for value in crossings.WAYS.values()]
    assert times == [["set to nothing"], ["set to 128"], ["set to 0"]]


@pytest.mark.gpu
def test_both_ways_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks import expert_crossings

    shape = Shape(8, 2, 4096, 1792, "nvfp4")
    out = tmp_path / "crossings.json"
    argv = ["expert_crossings", "--only", shape.name, "--tokens", "1", "12", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", argv)
    expert_crossings.main()
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [(r["load"], r["tokens"]) for r in rows] == [(load, t) for load in ("uniform", "zipf") for t in (1, 12)]
    for r in rows:
        taken, other = ("few_us", "grouped_us") if r["tokens"] == 1 else ("grouped_us", "few_us")
        assert max(r[taken], r["layer_us"]) < r[other]

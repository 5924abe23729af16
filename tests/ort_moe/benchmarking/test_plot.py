"""The picture of a benchmark."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ort_moe.benchmarking import Benchmark
from ort_moe.benchmarking.plot import _panels, check_plot, write_plot
from ort_moe.errors import EnvironmentUnfitError, OutputError


def test_a_png_is_written(benchmark: Benchmark, tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    write_plot(benchmark, path)
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    assert int.from_bytes(head[16:20], "big") > 1000  # four panels side by side
    write_plot(benchmark, path)  # in place of an older one
    assert [each.name for each in tmp_path.iterdir()] == ["plot.png"]
    assert path.read_bytes()[:24] == head


def test_what_is_drawn(benchmark: Benchmark) -> None:
    panels = dict(_panels(benchmark))
    assert list(panels) == ["1 token: ms", "3 tokens: ms", "load: s", "memory: GiB"]
    plain, graph = panels["1 token: ms"]
    assert list(plain.values) == [variant.timings[0].step_ms for variant in benchmark.variants[:4]]
    assert list(graph.values) == [None] * 4
    given = benchmark.variants[0]
    replayed = replace(given, timings=(replace(given.timings[0], tokens=None, graph_ms=0.5),), device_bytes=1 << 30)
    panels = dict(_panels(replace(benchmark, variants=(replayed,))))
    assert list(panels["fixed inputs: ms"][1].values) == [0.5]
    assert list(panels["memory: GiB"][1].values) == [1.0]


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "matplotlib.figure", raising=False)
    with pytest.raises(EnvironmentUnfitError, match=r"plots need matplotlib, install ort-moe\[plot\]"):
        check_plot(tmp_path / "plot.png", source=tmp_path / "model.onnx")


def test_where_no_plot_can_be_written(tmp_path: Path) -> None:
    model, taken = tmp_path / "model.onnx", tmp_path / "taken.png"
    model.write_bytes(b"\x08")
    taken.write_bytes(b"\x08")
    for path, sentence in (
        (tmp_path / "absent/plot.png", "there is no folder"),
        (tmp_path, "it is a folder"),
        (taken, "it exists and is no plot"),
        (model, "it is the input"),
    ):
        with pytest.raises(OutputError, match=f"cannot write the plot .*{sentence}"):
            check_plot(path, source=model)

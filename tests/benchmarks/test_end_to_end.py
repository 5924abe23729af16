"""The benchmark of whole models: the exported stack is what it says, and the command writes what it measures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import models.fixtures
import ort_moe
from benchmarks import end_to_end
from benchmarks.expert_models import Shape
from benchmarks.exported_stack import FIXTURES, write_exported_stack
from ort_moe.inspection.inspect import inspect

SMALL = Shape(6, 3, 64, 32, "dense", "float")


@pytest.mark.parametrize("dtype", FIXTURES)
def test_the_stack_has_the_nodes_of_the_export(tmp_path: Path, dtype: str) -> None:
    shape = Shape(6, 3, 64, 32, "dense", dtype)
    path = tmp_path / "stack.onnx"
    write_exported_stack(shape, 2, path)
    exported = [node.op_type for node in onnx.load(models.fixtures.get(FIXTURES[dtype]).path).graph.node]
    model = onnx.load(path)
    assert [node.op_type for node in model.graph.node] == [*exported, "Add"] * 2
    onnx.checker.check_model(path, full_check=True)
    seen = inspect(path)
    assert [(layer.experts, layer.k) for layer in seen.layers] == [(6, 3), (6, 3)]
    assert seen.bytes_per_token == 2 * 3 * 3 * 64 * 32 * np.dtype(dtype if dtype != "float" else "float32").itemsize
    gates = [i for i in model.graph.initializer if list(i.dims) == [6, 64]]
    assert len({gate.raw_data for gate in gates}) == 2  # each layer chooses for itself


def test_the_stack_computes_the_same_when_it_is_fused(tmp_path: Path) -> None:
    path = tmp_path / "stack.onnx"
    write_exported_stack(SMALL, 2, path)
    report = ort_moe.optimize(path, tmp_path / "fused.onnx")
    assert report.verification is not None
    assert report.verification.passed
    assert report.operators_after["ort_moe::FusedExperts"] == 2


def test_other_weights_have_no_export(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exports are dense, in float or float16, but dense bfloat16 6/3/64/32 was"):
        write_exported_stack(Shape(6, 3, 64, 32, "dense"), 1, tmp_path / "stack.onnx")


@pytest.mark.usefixtures("in_this_process")
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "plot.png"
    command = "end_to_end --provider cpu --layers 1 --geometry 6/3/64/32 --dtype float --tokens 1 5 --steps 2"
    monkeypatch.setattr("sys.argv", [*command.split(), "--json", str(out), "--plot", str(plot)])
    end_to_end.main()
    document = json.loads(out.read_text())
    assert document["source"] == "1 layer of dense float 6/3/64/32"
    assert {variant["name"]: variant["status"] for variant in document["variants"]} == dict.fromkeys(
        ("as given", "contrib", "ours", "ours, nvfp4"), "measured"
    )
    assert str(tmp_path) not in out.read_text()
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "GB/s of experts" in capsys.readouterr().out


def test_defaults_are_the_published_run() -> None:
    assert (end_to_end.GEOMETRY, end_to_end.LAYERS) == ((128, 8, 2048, 768), 4)
    assert (end_to_end.TOKENS, end_to_end.WEIGHTS) == ((1, 512), ("keep", "nvfp4"))

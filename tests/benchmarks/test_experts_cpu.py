"""The benchmark of experts on the CPU: the enlarged export is the export, answers are compared, and rows are whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import models.fixtures
from benchmarks import experts_cpu
from benchmarks.expert_models import Shape
from benchmarks.exported_layer import FIXTURE, copied_bytes, exported_model
from tests.qmoe_models import qmoe_runs

DENSE = Shape(6, 3, 64, 32, "dense", "float")


def test_the_enlarged_layer_has_the_nodes_of_the_export() -> None:
    exported = onnx.load(models.fixtures.get(FIXTURE).path).graph
    expected = [node.op_type for node in exported.node if node.op_type != "Gemm"]
    model = exported_model(DENSE)
    assert [node.op_type for node in model.proto.graph.node] == expected
    onnx.checker.check_model(model.proto, full_check=True)


def test_other_weights_have_no_export() -> None:
    with pytest.raises(ValueError, match=r"has dense float weights, but nvfp4 float 6/2/64/32 was asked for"):
        exported_model(Shape(6, 2, 64, 32, "nvfp4", "float"))


QMOE = pytest.mark.skipif(not qmoe_runs(), reason="QMoE runs these on the CPU from ONNX Runtime 1.32 on")


@pytest.mark.parametrize(
    ("shape", "peer"),
    [
        (DENSE, experts_cpu.EXPORTED),
        (DENSE, "MoE"),
        pytest.param(Shape(6, 2, 64, 32, "nvfp4", "float"), "QMoE", marks=QMOE),
        pytest.param(Shape(6, 2, 64, 32, "int4", "float", 32), "QMoE", marks=QMOE),
    ],
)
def test_rows(shape: Shape, peer: str) -> None:
    """Measuring compares the answers."""
    rows = experts_cpu.measure(shape, peer, (1, 7), threads=1)
    assert [(row["shape"], row["tokens"], row["peer"]) for row in rows] == [(shape.name, t, peer) for t in (1, 7)]
    for row in rows:
        assert row["ours_ms"] > 0
        assert row["ratio_to_peer"] == pytest.approx(row["ours_ms"] / row["peer_ms"], abs=0.006, rel=0.2)


def test_copies_that_do_not_fit_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_cpu, "MAX_COPIED_BYTES", copied_bytes(DENSE, 2))
    one, three = experts_cpu.measure(DENSE, experts_cpu.EXPORTED, (1, 3), threads=1)
    assert one["peer_ms"] is not None
    assert (three["peer_ms"], three["ratio_to_peer"]) == (None, None)
    assert three["ours_ms"] > 0


def test_another_answer_is_an_error() -> None:
    def answer(value: float) -> Any:
        return lambda _values: (np.full((1, 2), value, np.float32), 1.0)

    with pytest.raises(AssertionError, match=r"ours differs from the peer's by 1\.0e\+00 of its norm"):
        experts_cpu.times({"ours": answer(2.0), "peer": answer(1.0)}, [{}])
    assert experts_cpu.times({"ours": answer(2.0)}, [{}, {}]) == {"ours": 1.0}


def test_the_environment_names_the_processor() -> None:
    environment = experts_cpu.environment(2)
    assert set(environment) == {"date", "cpu", "vectors", "threads", "onnxruntime"}
    assert environment["cpu"]

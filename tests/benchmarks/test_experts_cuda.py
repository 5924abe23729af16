"""The benchmark of experts runs, and its answers are float64's and the contrib op's: small layers on a GPU."""

from __future__ import annotations

import pytest

from benchmarks.expert_models import Shape

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("weight_format", ["nvfp4", "dense"])
def test_a_stack(weight_format: str) -> None:
    from benchmarks.expert_stack import Experts
    from benchmarks.experts import disagreements, measure

    experts = Experts(Shape(64, 4, 256, 128, weight_format))
    row = measure(experts, 2, 1000.0, with_ort=True, layers=3)
    assert disagreements([row]) == []
    assert min(row["layer_us"], row["layer_ort_us"], row["contrib_us"]) > 0


@pytest.mark.parametrize("weight_format", ["nvfp4", "dense"])
def test_a_cycle(weight_format: str) -> None:
    from benchmarks.expert_stack import Experts
    from benchmarks.experts import disagreements, measure_cycle

    row = measure_cycle(Experts(Shape(64, 4, 256, 128, weight_format)), 2, layers=3)
    assert disagreements([row]) == []
    assert min(row["cycle_ms"], row["contrib_ms"]) > 0


def test_kernels_apart() -> None:
    from benchmarks.experts import kernel_times_without_overlap

    shape = Shape(64, 4, 256, 128, "nvfp4")
    times = kernel_times_without_overlap([shape], [2, 200])
    for tokens in (2, 200):
        assert min(times[shape.name, tokens][part] for part in ("route", "fc1", "fc2")) > 0
    assert times[shape.name, 200]["maps"] > 0

"""The benchmark of experts runs, and its answers are float64's and the contrib op's: small layers on a GPU."""

from __future__ import annotations

import pytest

from benchmarks.expert_models import Shape

pytestmark = pytest.mark.gpu

SHAPES = {name: Shape(64, 4, 256, 128, name) for name in ("nvfp4", "mxfp4", "dense")}
SHAPES |= {name: Shape(64, 4, 256, 128, name, "float16", 64) for name in ("int4", "int8", "fp8")}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_stack(shape: Shape) -> None:
    from benchmarks.expert_stack import Experts
    from benchmarks.experts import disagreements, measure

    row = measure(Experts(shape), 2, 1000.0, with_ort=True, layers=3)
    assert disagreements([row]) == []
    assert min(row["layer_us"], row["layer_ort_us"], row.get("contrib_us", 1.0)) > 0
    assert ("contrib_us" in row) == (shape.weight_format != "fp8")
    if shape.weight_format != "fp8":
        assert sum(row["contrib_kernels_us"].values()) > 0


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_sweep(shape: Shape) -> None:
    from benchmarks.expert_loads import LOADS
    from benchmarks.expert_sweep import sweep
    from benchmarks.experts import disagreements

    rows = sweep([shape], LOADS, [1, 9, 600], 1000.0, with_contrib=True)
    assert [(row["load"], row["tokens"]) for row in rows] == [
        (load, tokens) for load in LOADS for tokens in (1, 9, 600)
    ]
    assert disagreements(rows) == []
    assert all(("contrib_us" in row) == (shape.weight_format != "fp8") for row in rows)
    for load in LOADS:
        few, *_, many = [row["experts"] for row in rows if row["load"] == load]
        assert 4.0 == few < many <= 64.0


def test_loads_differ() -> None:
    import torch

    from benchmarks.expert_loads import draw_logits

    counts = {}
    for load in ("uniform", "zipf", "one"):
        logits = torch.empty(2, 1000, 64, device="cuda")
        draw_logits(load, logits, seed=0)
        chosen = logits.topk(4).indices.flatten(1)
        counts[load] = [int(torch.bincount(layer, minlength=64).max()) for layer in chosen]
    assert max(counts["uniform"]) < 120
    assert min(counts["zipf"]) > 400
    assert max(counts["zipf"]) < 1000
    assert counts["one"] == [1000, 1000]


@pytest.mark.parametrize("weight_format", ["nvfp4", "dense"])
def test_a_cycle(weight_format: str) -> None:
    """Of a seed: a tie that roundings break otherwise sends a token to another expert, a large part of so few rows."""
    import torch

    from benchmarks.expert_stack import Experts
    from benchmarks.experts import disagreements, measure_cycle

    torch.manual_seed(0)
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

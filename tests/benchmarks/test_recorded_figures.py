"""The recorded times of kernels are within what is asked of them, and beside every baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ort_moe.rewrites.contrib_experts.speed import MEASURED

RESULTS = Path(__file__).parents[2] / "benchmarks/results"


def rows(name: str) -> list[dict[str, Any]]:
    recorded: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return recorded


def test_gather_finalize() -> None:
    recorded = rows("gather_finalize")
    asked = {(f"{e}/{k}/{h} bfloat16", t) for e in (64, 128) for k in (4, 8) for h in (4096, 7168)
             for t in (1, 4, 16, 32, 64)}  # fmt: skip
    assert {(row["shape"], row["tokens"]) for row in recorded} == asked | {("128/8/7168 bfloat16", 8192)}
    for row in recorded:
        assert row["ours_us"] <= (1.1 * row["moving_us"] if row["tokens"] == 8192 else 5.0)
        assert row["ours_us"] < row["pair_us"]


def test_shared_gate() -> None:
    one = {1: 3.5, 4: 3.8, 16: 4.0, 64: 4.5, 256: 5.5, 1024: 8.0, 4096: 15.0, 16384: 45.0}
    limits = {(1, tokens): limit for tokens, limit in one.items()} | {(2, 64): 5.0, (8, 64): 8.0}
    recorded = {(row["shape"], row["tokens"]): row for row in rows("shared_gate")}
    assert set(recorded) == {(f"512/10/4096 S={shared} bfloat16", tokens) for shared, tokens in limits}
    for (shared, tokens), limit in limits.items():
        row = recorded[f"512/10/4096 S={shared} bfloat16", tokens]
        assert row["ours_us"] <= limit
        assert row["ours_us"] < min(row["torch_us"], row["apart_us"])
        assert row["with_gate_us"] < row["merged_us"]


@pytest.mark.parametrize("name", ["training_router", "gather_finalize", "shared_gate"])
def test_each_row_stands_beside_what_moves_the_same(name: str) -> None:
    assert all(row["moving_us"] > 0 for row in rows(name))


def test_training_stands_beside_measured_peers() -> None:
    textures = ("sorted", "equal", "ties", "nan")
    for row in rows("training_router"):
        if row["shape"].split()[-1] not in textures:
            assert row["peer_is"] == "measured"
            assert {label.split()[0] for label in row["measured_us"]} == {"TransformerEngine", "PyTorch"}
            assert not row["wrong_rows"]


def test_the_times_that_decide_which_contrib_nodes_stay() -> None:
    recorded = {
        ("cuda", row["shape"]): (row["layer_us"], row["contrib_us"])
        for row in rows("expert_sweep")
        if row["tokens"] == 1 and row["load"] == "uniform" and "contrib_us" in row
    } | {
        ("cpu", row["shape"]): (round(1e3 * row["ours_ms"], 1), round(1e3 * row["peer_ms"], 1))
        for row in rows("experts_cpu")
        if row["tokens"] == 1 and row["peer"] in ("MoE", "QMoE")
    }
    quoted = {
        (target, weight_format, measured.layer.removeprefix("H200, ").replace("float32", "float")): measured
        for (target, weight_format), layers in MEASURED.items()
        for measured in layers
    }
    assert {name: (measured.ours, measured.contrib) for name, measured in quoted.items()} == {
        (target, shape.split()[0].split("/")[0], shape.split(maxsplit=1)[1]): times
        for (target, shape), times in recorded.items()
        if shape.split()[:2] != ["nvfp4", "float16"]  # beside the same in bfloat16
    }

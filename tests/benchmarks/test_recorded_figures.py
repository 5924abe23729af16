"""The recorded times of kernels are within what is asked of them, and beside every baseline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
        assert row["ours_us"] <= (262.0 if row["tokens"] == 8192 else 5.0)
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

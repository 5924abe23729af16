"""The table of measurements decides which contrib nodes stay, and nothing else does."""

from __future__ import annotations

import pytest

from ort_moe.rewrites.contrib_experts import speed
from ort_moe.rewrites.contrib_experts.speed import Measured, why_slower


@pytest.mark.parametrize(
    ("measured", "told"),
    [
        (Measured("H200", 10.0, 20.0), None),
        (Measured("H200", 10.5, 10.0), None),
        (Measured("H200", 15.0, 10.0), "ours take 1.50 times as long (H200, 1 token)"),
        (Measured("H200"), "ours were not measured beside it on an H200"),
    ],
)
def test_a_row_decides(measured: Measured, told: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "MEASURED", {("cuda", "int4"): measured})
    why = why_slower("cuda", "int4")
    assert why == (None if told is None else f"with weights in int4, {told}")
    assert why_slower("cpu", "int4") is None


def test_the_table_names_formats_and_targets() -> None:
    assert {target for target, _ in speed.MEASURED} == {"cuda", "cpu"}
    assert {name for _, name in speed.MEASURED} == {"dense", "nvfp4", "mxfp4", "int4", "int8", "fp8"}

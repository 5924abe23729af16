"""The table of measurements decides which contrib nodes stay, and nothing else does."""

from __future__ import annotations

import pytest

from ort_moe.rewrites.contrib_experts import speed
from ort_moe.rewrites.contrib_experts.speed import LayerSize, Measured, why_slower

FINE, WIDE = LayerSize(8, 2048, 768), LayerSize(2, 4096, 14336)


@pytest.mark.parametrize(("ours", "is_slower"), [(10.0, False), (21.9, False), (30.0, True)])
def test_a_row_decides(ours: float, is_slower: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "MEASURED", {("cuda", "int4"): (Measured("H200, float16", 128, FINE, ours, 20.0),)})
    sentence = (
        "with weights in int4, ours take 1.50 times as long in the layer measured that is most like its 2/4096/14336 "
        "of K/H/I (H200, float16 128/8/2048/768, 1 token)"
    )
    assert why_slower("cuda", "int4", WIDE) == (sentence if is_slower else None)
    assert why_slower("cpu", "int4", WIDE) is None


@pytest.mark.parametrize(
    ("size", "is_slower"),
    [
        (FINE, False),
        (LayerSize(4, 2880, 2880), False),
        (LayerSize(8, 7168, 2048), False),
        (LayerSize(2, 4096, 6400), True),
        (WIDE, True),
    ],
)
def test_the_layer_most_like_it_decides(size: LayerSize, is_slower: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (Measured("H200, float16", 8, WIDE, 15.0, 10.0), Measured("H200, float16", 128, FINE, 10.0, 20.0))
    monkeypatch.setattr(speed, "MEASURED", {("cuda", "int4"): rows})
    assert (why_slower("cuda", "int4", size) is not None) == is_slower


def test_what_was_not_measured_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "MEASURED", {("cuda", "int4"): ()})
    why = why_slower("cuda", "int4", FINE)
    assert why == "with weights in int4, ours were not measured beside it on an H200"


def test_the_table_names_formats_and_targets() -> None:
    assert {target for target, _ in speed.MEASURED} == {"cuda", "cpu"}
    assert {name for _, name in speed.MEASURED} == {"dense", "nvfp4", "mxfp4", "int4", "int8", "fp8"}

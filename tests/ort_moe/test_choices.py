"""Lists of names stand in one place, and what is none of them is refused."""

from __future__ import annotations

import pytest

from ort_moe.choices import PACKED, TARGETS, WEIGHTS, check_choice
from ort_moe.ops import FUSED_EXPERTS
from ort_moe.packing.pieces import DEFAULT_BLOCKS
from ort_moe.verification.packed_reference import END_TO_END, FROM_ORIGINAL
from ort_moe.verification.packed_weights import LARGEST_ERROR


def test_an_unknown_name_is_refused() -> None:
    check_choice("target", "cpu", TARGETS)
    with pytest.raises(ValueError, match=r"^target 'tpu' is unknown; there are cuda, cpu, contrib$"):
        check_choice("target", "tpu", TARGETS)


def test_what_is_told_of_each_format() -> None:
    assert ("keep", *PACKED) == WEIGHTS
    assert FUSED_EXPERTS.attribute("weight_format").choices == ("dense", *PACKED)
    assert DEFAULT_BLOCKS.keys() == END_TO_END.keys() == FROM_ORIGINAL.keys() == LARGEST_ERROR.keys() == set(PACKED)

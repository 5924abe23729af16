"""The bounds of FusedExperts' roundings hold whatever is off by more."""

from __future__ import annotations

import numpy as np
import pytest

from tests.experts_cases import FORMATS, ExpertsCase
from tests.router_cases import DTYPES

WIDE = [(640, 640, weight_format) for weight_format in ("dense", "nvfp4")]


@pytest.mark.parametrize("onnx_type", DTYPES)
@pytest.mark.parametrize(
    ("hidden", "inner", "weight_format"),
    [*((hidden, 64, weight_format) for hidden in (64, 192) for weight_format in FORMATS), *WIDE],
)
def test_wrong_results_fail(hidden: int, inner: int, onnx_type: str, weight_format: str) -> None:
    case = ExpertsCase((3,), 3, 2, hidden, inner, onnx_type, weight_format)
    right = case.reference().astype(DTYPES[onnx_type])
    case.check_each(right)
    one_element, nan = right.copy(), right.copy()
    one_element[2, 5] += 1
    nan[0, 7] = np.nan
    for wrong in (np.zeros_like(right), right[::-1], np.roll(right, 8, axis=1), one_element, nan):
        with pytest.raises(AssertionError, match="differ, first at"):
            case.check_each(wrong)

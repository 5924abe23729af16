"""How far packed weights take what is returned from the original, by norm."""

from __future__ import annotations

import numpy as np
import pytest

from ort_moe.verification.packed_reference import distance

NAN, INF = np.nan, np.inf


@pytest.mark.parametrize(
    ("got", "expected", "told"),
    [
        ([1.0, 2.0], [1.0], INF),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 1.0], [0.0, 0.0], INF),
        ([3.0, 4.5, NAN, INF], [3.0, 4.0, NAN, INF], 0.1),
        ([NAN, NAN], [NAN, NAN], 0.0),
        ([3.0, NAN], [3.0, 4.0], INF),
        ([3.0, 4.0], [3.0, NAN], INF),
        ([3.0, INF], [3.0, -INF], INF),
    ],
)
def test_distance(got: list[float], expected: list[float], told: float) -> None:
    assert distance(np.array(got), np.array(expected)) == pytest.approx(told)

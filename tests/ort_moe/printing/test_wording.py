"""Numbers of things in sentences."""

from __future__ import annotations

import pytest

from ort_moe.printing.wording import counted


@pytest.mark.parametrize(("number", "expected"), [(0, "0 experts"), (1, "1 expert"), (8, "8 experts")])
def test_one_thing_is_singular(number: int, expected: str) -> None:
    assert counted(number, "expert") == expected

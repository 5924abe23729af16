"""Numbers and names of things in sentences."""

from __future__ import annotations

import pytest

from ort_moe.printing.wording import counted, some_of


@pytest.mark.parametrize(("number", "expected"), [(0, "0 experts"), (1, "1 expert"), (8, "8 experts")])
def test_one_thing_is_singular(number: int, expected: str) -> None:
    assert counted(number, "expert") == expected


@pytest.mark.parametrize(
    ("most", "expected"), [(1, "a or 2 more"), (2, "a, b or 1 more"), (3, "a, b, c"), (4, "a, b, c")]
)
def test_a_few_names_stand_for_many(most: int, expected: str) -> None:
    assert some_of(["a", "b", "c"], most, "or") == expected
    assert some_of([], most) == ""

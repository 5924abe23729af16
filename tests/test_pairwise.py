"""Cases in which every two values meet."""

from __future__ import annotations

import itertools

from tests.pairwise import pairwise

FACTORS = {"a": range(5), "b": "xyz", "c": (True, False), "d": range(4), "e": (None,)}


def test_every_two_values_meet() -> None:
    cases = pairwise(FACTORS)
    for one, other in itertools.combinations(FACTORS, 2):
        assert {(case[one], case[other]) for case in cases} == set(itertools.product(FACTORS[one], FACTORS[other]))


def test_cases_are_few() -> None:
    assert 20 <= len(pairwise(FACTORS)) <= 26  # 20 pairs of the two largest factors, 120 combinations


def test_cases_are_the_same_each_time() -> None:
    assert pairwise(FACTORS) == pairwise(FACTORS)


def test_one_factor() -> None:
    assert pairwise({"a": "xy"}) == []

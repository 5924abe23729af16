"""Cases in which every two values of different factors meet: few that find what one factor or two together break."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

_CANDIDATES = 12
"""Cases tried for each one taken."""

_Choice = tuple[str, int]


def pairwise(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Chooses cases greedily until each pair of values of two factors is in one; the same for the same arguments.

    Args:
        factors: The values of each factor, by name.
        seed: Of the choices among equals.
    """
    rng = random.Random(seed)
    choices = [[(name, n) for n in range(len(values))] for name, values in factors.items()]
    left = {
        frozenset(pair) for one, other in itertools.combinations(choices, 2) for pair in itertools.product(one, other)
    }
    cases = []
    while left:
        first = min(left, key=sorted)  # a set's own order is not the same from run to run
        case = max(
            (_case(choices, first, left, rng) for _ in range(_CANDIDATES)), key=lambda case: len(_met(case, left))
        )
        left -= _met(case, left)
        cases.append({name: factors[name][n] for name, n in case})
    return cases


def _case(
    choices: list[list[_Choice]], first: frozenset[_Choice], left: set[frozenset[_Choice]], rng: random.Random
) -> list[_Choice]:
    """A case with the first pair; the other factors in random order, each with the value that meets most pairs left."""
    case = sorted(first)
    taken = {name for name, _ in case}
    for options in rng.sample(choices, len(choices)):
        if options[0][0] not in taken:
            rng.shuffle(ordered := list(options))
            case.append(max(ordered, key=lambda option: sum(frozenset((option, other)) in left for other in case)))
    return sorted(case)


def _met(case: list[_Choice], left: set[frozenset[_Choice]]) -> set[frozenset[_Choice]]:
    return {pair for two in itertools.combinations(case, 2) if (pair := frozenset(two)) in left}

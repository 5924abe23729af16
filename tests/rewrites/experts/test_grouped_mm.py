"""Choices sorted by expert, and each expert's rows multiplied apart: the sort, the counts, and the way back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.rewrites.blocks import EXPERTS
from tests.rewrites.experts.experts_models import SILU, Experts, assert_fuses, assert_stays, fuse, transposed
from tests.rewrites.experts.texts import GROUPED_CONSTANTS, SORT, UNSORT, WEIGH_SORTED, ranges


def layer(name: str, source: str, result: str, *, take: Callable[[int], str] | None = None) -> str:
    """Concat over the experts of MatMul(Gather(source, range), matrix)."""
    lines, parts = [], []
    matrices = ", ".join(f"{name}_m{e}" for e in range(EXPERTS))
    lines.append(f"{matrices} = Split <axis = 0, num_outputs = {EXPERTS}> ({name})")
    for e in range(EXPERTS):
        lines.append(f"{name}_r{e} = {take(e) if take else f'Gather ({source}, range{e})'}")
        lines.append(f"{name}_w{e} = Squeeze ({name}_m{e}, zero)")
        lines.append(f"{name}_p{e} = MatMul ({name}_r{e}, {name}_w{e})")
        parts.append(f"{name}_p{e}")
    lines.append(f"{result} = Concat <axis = 0> ({', '.join(parts)})")
    return "".join(f"\n    {line}" for line in lines)


def grouped(
    sort: str = SORT, fc1: str = "", fc2: str = "", weigh: str = WEIGH_SORTED, total: str = UNSORT, **constants: object
) -> Experts:
    return Experts(
        repeat="",
        list="\n list = Reshape (ids, minus1)" + sort + ranges(),
        fc1=fc1 or layer("fc1", "rows", "made1"),
        activation=SILU,
        fc2=fc2 or layer("fc2", "active", "made2"),
        weigh=weigh,
        sum=total,
        constants={**GROUPED_CONSTANTS, **constants},
    )


PLAIN = {"activation": "silu", "gated": 1, "weight_on": "output"}


def test_plain() -> None:
    assert_fuses(grouped(), PLAIN)


def test_biases() -> None:
    bias = "\n {0} = Gather ({1}, sorted)\n {2} = Add ({3}, {0})"
    experts = grouped(
        fc1=layer("fc1", "rows", "bare1") + bias.format("row1", "bias1", "made1", "bare1"),
        fc2=layer("fc2", "active", "bare2") + bias.format("row2", "bias2", "made2", "bare2"),
    )
    assert_fuses(experts, PLAIN)


def test_one_constant_for_each_expert() -> None:
    """As when a constant split has been folded."""
    weights = transposed("fc1")
    parts = {f"own{e}": weights[e] for e in range(EXPERTS)}
    lines = [f"own_p{e} = MatMul (own_r{e}, own{e})" for e in range(EXPERTS)]
    rows = [f"own_r{e} = Gather (rows, range{e})" for e in range(EXPERTS)]
    joined = f"made1 = Concat <axis = 0> ({', '.join(f'own_p{e}' for e in range(EXPERTS))})"
    text = "".join(f"\n {line}" for line in (*rows, *lines, joined))
    assert_fuses(grouped(fc1=text, **parts), PLAIN)


def test_division_without_a_correction() -> None:
    assert_fuses(grouped(SORT.replace("token = Sub (quotient, correction)", "token = Identity (quotient)")), PLAIN)


STAYING = {
    "largest experts first": (
        grouped(SORT.replace("largest = 0", "largest = 1")),
        None,
    ),
    "other tokens": (
        grouped(SORT.replace("Div (perm, k)", "Div (perm, three)"), three=np.array([3], np.int64)),
        "are not the tokens' rows in the order of TopK",
    ),
    "bins that miss experts": (
        grouped(bin_width=np.array(2.0, np.float32)),
        "joins are not those of each expert",
    ),
    "weights in the order of the tokens": (
        grouped(
            weigh=WEIGH_SORTED.replace("GatherElements <axis = 0> (flat_weights, perm)", "Identity (flat_weights)")
        ),
        "are not in the order of TopK",
    ),
    "not put back": (
        grouped(total=UNSORT.replace("(weighted, inverse)", "(weighted, perm)")),
        None,
    ),
    "other rows in the second layer": (
        grouped(fc2=layer("fc2", "active", "made2", take=lambda e: f"Gather (active, range{e ^ 1})")),
        "joins are not those of each expert",
    ),
}


@pytest.mark.parametrize("case", STAYING)
def test_refused(case: str) -> None:
    experts, sentence = STAYING[case]
    sentence = "ends in no form of experts that is known" if sentence is None else sentence
    assert_stays(experts, "experts-form", sentence)


def test_sums_without_their_last() -> None:
    """The model does not run: the ranges leave out the last expert's rows."""
    site, _ = fuse(grouped(SORT.replace("CumSum (", "CumSum <exclusive = 1> (")).model())
    assert ["joins are not those of each expert" in finding.detail for finding in site.findings] == [True]

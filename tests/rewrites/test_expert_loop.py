"""Exports that hold the loop over the experts only as far as their example input went are told of; others are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir
import pytest

import models.fixtures
from ort_moe.rewrites import Finding, rewrite
from tests.rewrites.blocks import EXPERTS, EXPERTS_TEXT, block
from tests.rewrites.expert_loops import CONSTANTS, HITS, ROUTER, compared, dispatched, loop_over_hits, weighed


def findings(model: ir.Model, status: str = "whole") -> list[Finding]:
    result = rewrite(model)
    assert [site.status for site in result.sites] == [status]  # the router is right, whatever runs behind it
    assert all(finding.reason.slug == "expert-loop-baked-in" for finding in result.findings)
    assert rewrite(model).findings == result.findings
    return list(result.findings)


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        ("step_1, step_2, step_3 = Split <axis = 0> (list, steps)", "3"),
        ("step_1 = Split <axis = 0> (list, minus_nothing)", "1"),
    ],
)
def test_a_fixed_number_of_hits(steps: str, count: str) -> None:
    (finding,) = findings(loop_over_hits(steps.replace("minus_nothing", "one")))
    assert finding.node.startswith("split_")
    assert f"runs {count} of the 8 experts behind FusedRouter 'topk_2'" in finding.detail


def test_hits_taken_as_they_come_are_no_loop_of_the_example() -> None:
    """The list is read by a loop, or gathered from, as a whole."""
    text = HITS + "\n flat = Reshape (list, minus1)\n some = Gather (experts, flat)\n y = MatMul (x, some)"
    assert not findings(block(ROUTER, {**CONSTANTS, "axes": np.array([-1, -2])}, experts_text=text))


SORTED = """
    flat_ids = Reshape (ids, minus1)
    by_expert, places = TopK <axis = 0, largest = 0> (flat_ids, all)
    tokens = Div (places, two)
    rows = Gather <axis = 0> (x, tokens)
    SPLIT
    made_1 = MatMul (piece_1, expert_1)
    made_2 = MatMul (piece_2, expert_2)
    y = Concat <axis = 0> (made_1, made_2)"""


@pytest.mark.parametrize(
    "split",
    [
        "piece_1, piece_2 = Split <axis = 0> (rows, sizes)",
        "wide = Cast <to = 1> (rows)\n piece_1, piece_2 = Split (wide, sizes)",
    ],
    ids=["split", "split behind a cast"],
)
def test_fixed_numbers_of_rows(split: str) -> None:
    constants = {**CONSTANTS, "all": np.array([6]), "sizes": np.array([2, 4])}
    (finding,) = findings(block(ROUTER, constants, experts_text=SORTED.replace("SPLIT", split)))
    assert finding.node.startswith("split_")
    assert "gives the 8 experts behind FusedRouter 'topk_2' 2, 4 rows, as many as the export's" in finding.detail
    assert finding.remedy.startswith("Export with torch.onnx.export(..., dynamo=True)")


def test_computed_numbers_of_rows() -> None:
    text = SORTED.replace("SPLIT", "sizes = Mul (given, two)\n piece_1, piece_2 = Split (rows, sizes)")
    text = text.replace("flat_ids", "ones = Shape (x)\n given = Div (ones, ones)\n flat_ids", 1)
    assert not findings(block(ROUTER, {**CONSTANTS, "all": np.array([6])}, experts_text=text))


@pytest.mark.parametrize(
    ("build", "status", "kind"), [(compared, "left", "TopK"), (dispatched, "whole", "FusedRouter")]
)
def test_some_experts_alone(build: Callable[[Sequence[int]], ir.Model], status: str, kind: str) -> None:
    (finding,) = findings(build([0, 3, 5]), status)
    assert finding.node == "topk_2"
    assert f"of the 8 experts behind {kind} 'topk_2' run 0, 3, 5 alone" in finding.detail
    assert not findings(build(range(EXPERTS)))


def test_one_expert_with_rows_of_its_own() -> None:
    (finding,) = findings(dispatched([3]))
    assert "run 3 alone" in finding.detail


def test_a_comparison_beside_the_experts() -> None:
    """One that masks a padding expert, and one with the class of those that were masked: no loop at all."""
    masked = f"""
        is_padding = Equal (ids, number_7)
        is_masked = Equal (ids, number_{EXPERTS})
        none = Or (is_padding, is_masked)
        keep = Not (none)
        factor = Cast <to = 1> (keep)
        kept = Mul (weights, factor)
        {EXPERTS_TEXT.replace("Unsqueeze (weights,", "Unsqueeze (kept,")}"""
    assert not rewrite(block(ROUTER, CONSTANTS, experts_text=masked)).findings


def test_experts_with_a_path_of_their_own_beside_those_that_are_gathered() -> None:
    """Two that are the same for every token's choice of them, such as constant experts; all others run as well."""
    lines, total = [EXPERTS_TEXT.replace(" y = ", " sum_5 = ")], "sum_5"
    for expert in (6, 7):
        lines.append(weighed(expert, total))
        total = f"sum_{expert}"
    assert not findings(block(ROUTER, CONSTANTS, experts_text="".join(lines) + f"\n y = Identity ({total})"))


def test_exports_without_a_loop() -> None:
    names = (
        "mixtral_block_transformers_grouped_fp32",
        "deepseek_v3_block_legacy_fp32",
        "llama4_text_block_legacy_fp32",
    )
    for name in names:
        assert not rewrite(ir.load(models.fixtures.get(name).path)).findings

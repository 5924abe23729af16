"""Experts gathered for each choice, in every form of each piece; and what is refused, and why."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ort_moe.rewrites import RULES, rewrite
from tests.rewrites.blocks import EXPERTS, HIDDEN
from tests.rewrites.experts.experts_models import (
    FC1,
    FC2,
    INNER,
    LIST,
    REPEAT,
    ROUTER,
    SILU,
    SUM,
    WEIGH,
    Experts,
    assert_fuses,
    assert_same,
    assert_stays,
    fuse,
)
from tests.rewrites.experts.texts import FC1_TRANSPOSED, FC2_TRANSPOSED, TRANSPOSED

PLAIN = {"activation": "silu", "gated": 1, "gate_layout": "concat", "weight_on": "output", "weight_format": "dense"}

RNG = np.random.default_rng(11)
HALF, OTHER_HALF = RNG.standard_normal((2, EXPERTS, INNER, HIDDEN)).astype(np.float32)
ROWS = RNG.standard_normal((EXPERTS, INNER)).astype(np.float32)
HALVES = np.concatenate([HALF, OTHER_HALF], axis=1)
APART = """
    matrices_g = Gather <axis = 0> (fc1_gate, list)
    matrices_u = Gather <axis = 0> (fc1_value, list)
    column1 = Unsqueeze (rows, minus1)
    product_g = MatMul (matrices_g, column1)
    product_u = MatMul (matrices_u, column1)
    g = Squeeze (product_g, minus1)
    u = Squeeze (product_u, minus1)"""
OPENED = """
    share = Sigmoid (g)
    opened = Mul (g, share)
    active = Mul (opened, u)"""
JOINED = "".join(f"\n one{e} = Unsqueeze (expert{e}, first)" for e in range(EXPERTS))
JOINED += f"\n joined = Concat <axis = 0> ({', '.join(f'one{e}' for e in range(EXPERTS))})"

TURNED = {"fc1": TRANSPOSED["fc1"]}

FORMS: dict[str, Experts] = {
    "plain": Experts(),
    "Expand": Experts(repeat=REPEAT.replace("Tile", "Expand")),
    "GatherND": Experts(
        list=LIST + "\n places = Unsqueeze (list, minus1)",
        fc1=FC1.replace("Gather <axis = 0> (fc1, list)", "GatherND (fc1, places)"),
        fc2=FC2.replace("Gather <axis = 0> (fc2, list)", "GatherND (fc2, places)"),
    ),
    "bias": Experts(
        fc1=FC1.replace("made1 =", "bare1 =")
        + "\n rows1 = Gather <axis = 0> (bias1, list)\n made1 = Add (bare1, rows1)",
        fc2=FC2.replace("made2 =", "bare2 =")
        + "\n rows2 = Gather <axis = 0> (bias2, list)\n made2 = Add (rows2, bare2)",
    ),
    "transposed": Experts(fc1=FC1_TRANSPOSED, fc2=FC2_TRANSPOSED, constants=TRANSPOSED),
    "transposed in the graph": Experts(
        fc1=FC1.replace("(fc1, list)", "(turned, list)").replace(
            "matrices1 =", "turned = Transpose <perm = [0, 2, 1]> (fc1)\n matrices1 ="
        ),
        constants=TURNED,
    ),
    "transposed behind the gather": Experts(
        fc1=FC1.replace("matrices1 =", "taken1 =").replace(
            "column1 =", "matrices1 = Transpose <perm = [0, 2, 1]> (taken1)\n column1 ="
        ),
        constants=TURNED,
    ),
    "spread": Experts(
        repeat="",
        list="",
        fc1="""
            matrices1 = Gather <axis = 0> (fc1, ids)
            column1 = Unsqueeze (x, one_minus1)
            product1 = MatMul (matrices1, column1)
            made1 = Squeeze (product1, minus1)""",
        fc2=FC2.replace("list", "ids"),
        weigh="weight_column = Unsqueeze (weights, minus1)\n weighted = Mul (made2, weight_column)",
        sum="y = ReduceSum <keepdims = 0> (weighted, one)",
        constants={"one_minus1": np.array([1, -1], np.int64)},
    ),
    "operands swapped": Experts(
        activation=SILU.replace("(g, share)", "(share, g)").replace("(opened, u)", "(u, opened)"),
        weigh=WEIGH.replace("(made2, weight_column)", "(weight_column, made2)"),
    ),
    "sum from the end": Experts(
        sum=SUM.replace("(by_token, one)", "(by_token, minus2)"), constants={"minus2": np.array([-2], np.int64)}
    ),
    "weighed by token": Experts(
        weigh="""
            made3 = Reshape (made2, by_token_shape)
            weight_column = Unsqueeze (weights, minus1)
            weighted = Mul (made3, weight_column)""",
        sum="y = ReduceSum <keepdims = 0> (weighted, one)",
    ),
    "indices limited": Experts(
        list="\n limited = Min (ids, last_expert)" + LIST.replace("ids", "limited"),
        constants={"last_expert": np.array([EXPERTS - 2], np.int64)},
    ),
    "gates and values apart": Experts(
        fc1=APART,
        activation=OPENED,
        constants={"fc1_gate": HALF, "fc1_value": OTHER_HALF},
    ),
    "gates and values apart, with biases": Experts(
        fc1=APART.replace(" g =", " bare_g =").replace(" u =", " bare_u =")
        + "\n bias_g = Gather (fc1_gate_bias, list)\n g = Add (bare_g, bias_g)"
        + "\n bias_u = Gather (fc1_value_bias, list)\n u = Add (bias_u, bare_u)",
        activation=OPENED,
        constants={"fc1_gate": HALF, "fc1_value": OTHER_HALF, "fc1_gate_bias": ROWS, "fc1_value_bias": -ROWS},
    ),
    "one constant for each expert": Experts(
        fc1=JOINED + FC1.replace("(fc1,", "(joined,"),
        constants={"first": np.array([0], np.int64), **{f"expert{e}": HALVES[e] for e in range(EXPERTS)}},
    ),
    "opset 13": Experts(opset=13, activation=SILU.replace(", num_outputs = 2", "")),
}


@pytest.mark.parametrize("form", FORMS)
def test_form(form: str) -> None:
    assert_fuses(FORMS[form], PLAIN)


def test_weights_on_the_input() -> None:
    weigh = WEIGH.replace("Mul (made2,", "Mul (rows,").replace("weighted =", "weighed_rows =")
    experts = Experts(
        repeat=REPEAT + weigh,
        fc1=FC1.replace("(rows,", "(weighed_rows,"),
        weigh="",
        sum=SUM.replace("weighted", "made2"),
    )
    assert_fuses(experts, {**PLAIN, "weight_on": "input"})


HALF_FINALIZE = {
    "in half": (WEIGH, SUM),
    "sum in float32": (
        WEIGH,
        SUM.replace("(by_token, one)", "(wide, one)").replace("y =", "wide = Cast <to = 1> (by_token)\n wide_y =")
        + "\n y = Cast <to = 10> (wide_y)",
    ),
    "product in float32": (
        WEIGH.replace(
            "weighted =", "wide_made = Cast <to = 1> (made2)\n wide_column = Cast <to = 1> (weight_column)\n weighted ="
        ).replace("(made2, weight_column)", "(wide_made, wide_column)"),
        SUM.replace("y =", "wide_y =") + "\n y = Cast <to = 10> (wide_y)",
    ),
}


@pytest.mark.parametrize("form", HALF_FINALIZE)
def test_half_precision(form: str) -> None:
    weigh, total = HALF_FINALIZE[form]
    model = assert_fuses(Experts(dtype="float16", weigh=weigh, sum=total), PLAIN, rtol=4e-3)
    # Its weights reach it in float32: the casts to half precision are gone, and their name is the router's.
    assert [node.op_type for node in model.graph] == ["MatMul", "FusedRouter", "FusedExperts"]
    assert [value.name for value in model.graph.node(1).outputs] == ["weights", "ids"]


def test_names_and_order() -> None:
    model = assert_fuses(Experts(), PLAIN)
    assert [node.op_type for node in model.graph] == ["MatMul", "FusedRouter", "FusedExperts"]
    router, experts = model.graph.node(1), model.graph.node(2)
    assert [value.name for value in router.outputs] == ["weights", "ids"]
    assert [value.name for value in experts.outputs] == ["y"]
    assert set(model.graph.initializers) == {"gate", "fc1", "fc2"}


def test_transposed_weights_are_written_the_other_way_round() -> None:
    model = FORMS["transposed"].model()
    fuse(model)
    for name in ("fc1", "fc2"):
        assert name not in model.graph.initializers
        tensor = model.graph.initializers[f"{name}_transposed"].const_value
        assert isinstance(tensor, ir.LazyTensor)
        np.testing.assert_array_equal(tensor.numpy(), TRANSPOSED[name].transpose(0, 2, 1))


@pytest.mark.parametrize("form", ["gates and values apart", "one constant for each expert"])
def test_weights_in_pieces_are_written_as_one(form: str) -> None:
    model = FORMS[form].model()
    fuse(model)
    (joined,) = [name for name in model.graph.initializers if name.endswith("_joined")]
    tensor = model.graph.initializers[joined].const_value
    assert isinstance(tensor, ir.LazyTensor)
    np.testing.assert_array_equal(tensor.numpy(), HALVES)
    assert not [name for name in model.graph.initializers if name.startswith(("fc1_", "expert")) and name != joined]


def test_weights_that_lie_right_may_be_shared() -> None:
    """Another layer, or anything else, reads the same constant."""
    experts = Experts(
        sum=SUM + "\n other = ReduceSum <keepdims = 0> (fc1, zero)",
        outputs=", float[a, b] other",
        constants={"zero": np.array([0], np.int64)},
    )
    assert_fuses(experts, PLAIN)


@pytest.mark.parametrize("options", [{"skip": ["experts-batched-mm"]}, {"rules": ["softmax", "normalize"]}])
def test_left_out(options: dict[str, Any]) -> None:
    assert "experts-batched-mm" in RULES
    assert_stays(Experts(), "rule-left-out", "experts-batched-mm", **options)


def test_alone() -> None:
    original, model = Experts().model(), Experts().model()
    site, result = fuse(model, rules=["experts-batched-mm"])
    assert site.status == "whole"
    assert [each.status for each in result.sites] == ["left"]
    assert "TopK" in [node.op_type for node in model.graph]
    assert_same(original, model)


def other_ids(name: str) -> Experts:
    """The second layer's experts are the best of others."""
    return Experts(
        router=ROUTER + "\n turned = Neg (scores)\n unread, worst = TopK (turned, k)\n list2 = Reshape (worst, minus1)",
        fc2=FC2.replace("(fc2, list)", f"(fc2, {name})"),
    )


STAYING: dict[str, tuple[Experts, str, str]] = {
    "unknown activation": (
        Experts(activation="g, u = Split <axis = -1, num_outputs = 2> (made1)\n opened = Tanh (g)"
                           "\n active = Mul (opened, u)"),
        "experts-activation",
        "Tanh 'tanh_14' is among its factors",
    ),
    "other experts": (other_ids("list2"), "experts-form", "the two layers take other experts"),
    "read in the middle": (
        Experts(outputs=", float[R, I] active"), "read-by-others", "output 'active' of the model",
    ),
    "read by a node": (
        Experts(sum=SUM + "\n other = Neg (made1)", outputs=", float[R, N] other"), "read-by-others", "Neg",
    ),
    "transposed and read": (
        Experts(
            fc1=FC1_TRANSPOSED, fc2=FC2_TRANSPOSED, constants={**TRANSPOSED, "zero": np.array([0], np.int64)},
            sum=SUM + "\n other = ReduceSum <keepdims = 0> (fc1, zero)", outputs=", float[a, b] other",
        ),
        "expert-weights-shared",
        "'fc1' would have to be copied: they are also read by ReduceSum",
    ),
    "computed weights": (
        Experts(fc1="\n scaled = Mul (fc1, half)" + FC1.replace("(fc1,", "(scaled,"), constants={"half": 0.5}),
        "expert-weights-computed",
        "'scaled' are computed by Mul",
    ),
    "not repeated": (
        Experts(repeat="\n twice = Concat <axis = 0> (x, x)\n rows = Identity (twice)"),
        "experts-form",
        "does not repeat each token's row 2 times",
    ),
    "repeated in another order": (
        Experts(repeat="\n copies = Tile (x, tile_rows)\n rows = Reshape (copies, rows_of_x)",
                constants={"tile_rows": np.array([2, 1], np.int64)}),
        "experts-form",
        "does not repeat each token's row 2 times",
    ),
    "gates and values of other experts": (
        replace(
            other_ids("list"),
            fc1=APART.replace("(fc1_value, list)", "(fc1_value, list2)"),
            activation=OPENED,
            constants={"fc1_gate": HALF, "fc1_value": OTHER_HALF},
        ),
        "experts-form",
        "the two layers take other experts",
    ),
    "gates and values of other rows": (
        Experts(
            fc1=APART.replace("product_u = MatMul (matrices_u, column1)", "turned = Neg (column1)\n"
                              " product_u = MatMul (matrices_u, turned)"),
            activation=OPENED,
            constants={"fc1_gate": HALF, "fc1_value": OTHER_HALF},
        ),
        "experts-form",
        "is not made as",
    ),
    "transposed and gathered for others": (
        replace(
            other_ids("list"), fc1=FC1_TRANSPOSED, fc2=FC2_TRANSPOSED, constants=TRANSPOSED,
            sum=SUM + "\n other = Gather (fc1, list2)", outputs=", float[R, D, N] other",
        ),
        "expert-weights-shared",
        "'fc1' would have to be copied: they are also read by Gather",
    ),
    "one row for all tokens": (
        replace(FORMS["spread"], fc1="\n mean = ReduceMean <keepdims = 1> (x, zero)"
                + FORMS["spread"].fc1.replace("(x,", "(mean,"),
                constants={**FORMS["spread"].constants, "zero": np.array([0], np.int64)}),
        "experts-form",
        "the rows 'mean' of ReduceMean 'reducemean_5' may be others than the tokens of",
    ),
    "indices made of the weights": (
        Experts(
            router="\n best, ids = TopK (logits, k)\n weights = Identity (best)\n whole = Cast <to = 7> (best)",
            list=LIST.replace("ids", "whole"),
            sum=SUM + """
                matrices = Gather (experts, ids)
                column = Unsqueeze (x, one_minus1)
                others = MatMul (matrices, column)""",
            outputs=", float[T, a, b, c] others",
            constants={"one_minus1": np.array([1, -1], np.int64)},
        ),
        "experts-form",
        "the indices 'whole' come from no choice of experts",
    ),
    "a second layer of more experts": (
        Experts(constants={"fc2": np.ones((EXPERTS + 1, HIDDEN, INNER), np.float32)}),
        "experts-mismatch",
        "the first layer has 8 experts, the second 9",
    ),
    "no weights": (Experts(weigh="", sum=SUM.replace("weighted", "made2")), "experts-form", "weighed nowhere"),
}  # fmt: skip


@pytest.mark.parametrize("case", STAYING)
def test_refused(case: str) -> None:
    experts, reason, sentence = STAYING[case]
    assert_stays(experts, reason, sentence)


def test_a_bias_that_all_rows_are_added_to() -> None:
    """(R, H) instead of (R, 1, H): each of R * R rows is another sum, which no weights behind them would take."""
    weighed = WEIGH.replace("Mul (made2,", "Mul (rows,").replace("weighted =", "weighed_rows =")
    experts = Experts(
        repeat=REPEAT + weighed,
        fc1=FC1.replace("(rows,", "(weighed_rows,"),
        fc2="""
            matrices2 = Gather <axis = 0> (fc2, list)
            row2 = Unsqueeze (active, one)
            product2 = MatMul (row2, matrices2)
            bias_rows = Gather (bias2, list)
            made2 = Add (product2, bias_rows)""",
        weigh="",
        sum=SUM.replace("weighted", "made2"),
        constants={"fc2": TRANSPOSED["fc2"]},
    )
    site, _ = fuse(experts.model())
    (finding,) = site.findings
    assert (site.status, finding.reason.slug) == ("left", "experts-form")
    assert "adds no bias of the experts to their product" in finding.detail


def shared_by_two(behind: str = "", outputs: str = "") -> ir.Model:
    """Two layers in a row of the same weights, which lie the other way round."""
    first = Experts(fc1=FC1_TRANSPOSED, fc2=FC2_TRANSPOSED, constants=TRANSPOSED)
    pieces = (first.router, first.repeat, first.list, first.fc1, first.activation, first.fc2, first.weigh, first.sum)
    text = "\n next_logits = MatMul (y, gate)" + "".join(pieces[:-1]) + first.sum.replace("y =", "last =")
    text = re.sub(r"\bx\b", "y", text).replace("(logits)", "(next_logits)")
    for name in re.findall(r"\b([a-z]\w*)(?=(?:, \w+)* =)", text):
        if name not in ("axis", "keepdims", "num_outputs"):
            text = re.sub(rf"\b{name}\b", f"{name}_after", text)
    constants = {**TRANSPOSED, "zero": np.array([0], np.int64)}
    outputs = f", float[T, {HIDDEN}] last_after{outputs}"
    return replace(first, sum=first.sum + text + behind, outputs=outputs, constants=constants).model()


def test_layers_in_a_row_that_share_weights_to_be_copied() -> None:
    """One copy serves both."""
    model = shared_by_two()
    original = model.clone()
    assert [site.status for site in rewrite(model).experts] == ["whole"] * 2
    assert {name for name in model.graph.initializers if name.startswith("fc")} == {"fc1_transposed", "fc2_transposed"}
    assert_same(original, model)


def test_layers_that_share_weights_with_what_reads_them_as_they_are() -> None:
    """No copy is made for two layers either, where the original has to stay."""
    model = shared_by_two("\n other = ReduceSum <keepdims = 0> (fc1, zero)", ", float[a, b] other")
    original = model.clone()
    told = [finding.reason.slug for site in rewrite(model).experts for finding in site.findings]
    assert told == ["expert-weights-shared"] * 2
    assert_same(original, model)


def test_weights_that_the_experts_have_a_part_in() -> None:
    weigh = "\n most = ReduceMax <keepdims = 0> (made1)\n raised = Add (weights, most)"
    experts = Experts(weigh=weigh + WEIGH.replace("(weights", "(raised"))
    assert_stays(experts, "read-by-others", "what MatMul 'matmul_11' makes is also read by ReduceMax")


def test_fewer_experts_than_the_router_chooses_among() -> None:
    fewer = EXPERTS - 1
    experts = Experts(
        constants={
            "fc1": np.ones((fewer, 2 * INNER, HIDDEN), np.float32),
            "fc2": np.ones((fewer, HIDDEN, INNER), np.float32),
        }
    )
    site, _ = fuse(experts.model())
    (finding,) = site.findings
    assert (site.status, finding.reason.slug) == ("left", "experts-mismatch")
    assert finding.detail == "there are 7 experts, but 'ids' of TopK 'topk_2' is chosen among 8"


def test_weights_that_are_inputs() -> None:
    model = Experts().model()
    model.graph.inputs.append(model.graph.initializers["fc2"])
    site, _ = fuse(model)
    assert [finding.reason.slug for finding in site.findings] == ["weights-as-inputs"]

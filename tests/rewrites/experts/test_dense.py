"""Every token through every expert: which weights make that a choice, and which do not."""

from __future__ import annotations

import numpy as np
import pytest

from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import EXPERTS, HIDDEN, run
from tests.rewrites.experts.experts_models import ROUTER, SILU, Experts, assert_fuses, assert_stays, transposed
from tests.rewrites.experts.texts import SCATTER

ON_INPUT = Experts(
    router=ROUTER + SCATTER,
    repeat="""
        copies = Tile (x, tile_experts)
        column = Reshape (by_expert, column_shape)
        weighed = Mul (copies, column)
        rows = Reshape (weighed, by_expert_shape)""",
    list="",
    fc1="\n made1 = MatMul (rows, fc1)",
    activation=SILU,
    fc2="\n made2 = MatMul (active, fc2)",
    weigh="",
    sum="\n y = ReduceSum <keepdims = 0> (made2, zero)",
    constants={
        "fc1": transposed("fc1"),
        "fc2": transposed("fc2"),
        "tile_experts": np.array([EXPERTS, 1], np.int64),
        "column_shape": np.array([-1, 1], np.int64),
        "by_expert_shape": np.array([EXPERTS, -1, HIDDEN], np.int64),
        "zero": np.array([0], np.int64),
    },
)


def changed(experts: Experts = ON_INPUT, **changes: object) -> Experts:
    constants = {**experts.constants, **changes.pop("constants", {})}  # type: ignore[dict-item]
    return Experts(**{**vars(experts), "constants": constants, **changes})


ON_OUTPUT = changed(
    repeat="",
    fc1="\n made1 = MatMul (x, fc1)",
    weigh="\n column = Unsqueeze (by_expert, minus1)\n weighted = Mul (made2, column)",
    sum="\n y = ReduceSum <keepdims = 0> (weighted, zero)",
)

SPLIT = changed(
    ON_OUTPUT,
    weigh="""
        made4 = Reshape (made2, split_shape)
        apart = Reshape (by_expert, split_weights)
        column = Unsqueeze (apart, minus1)
        weighted = Mul (made4, column)""",
    sum="\n y4 = ReduceSum <keepdims = 0> (weighted, zero)\n y = Reshape (y4, flat)",
    constants={
        "split_shape": np.array([EXPERTS, 3, -1, HIDDEN], np.int64),
        "split_weights": np.array([EXPERTS, 3, -1], np.int64),
        "flat": np.array([-1, HIDDEN], np.int64),
    },
)

BIAS_ROWS = "\n row1 = Unsqueeze (bias1, one)\n row2 = Unsqueeze (bias2, one)"


def test_weights_on_the_input() -> None:
    assert_fuses(ON_INPUT, {"weight_on": "input", "activation": "silu", "gated": 1})


def test_weights_on_the_output() -> None:
    assert_fuses(ON_OUTPUT, {"weight_on": "output", "activation": "silu", "gated": 1})


def test_tokens_split_into_two_axes() -> None:
    """As GPT-OSS's experts leave exporters that compute all of them."""
    model = assert_fuses(SPLIT, {"weight_on": "output"})
    assert not {"Mul", "ReduceSum", "MatMul"} & {node.op_type for node in list(model.graph)[2:]}


def test_tokens_split_by_a_length_that_is_looked_up() -> None:
    lengths = """
        batches = Reshape (x, threes)
        batches_shape = Shape (batches)
        batch = Gather (batches_shape, zero)
        by_batch = Concat <axis = 0> (experts_length, batch, minus1, hidden_length)
        weights_by_batch = Concat <axis = 0> (experts_length, batch, minus1)"""
    constants = {"experts_length": np.array([EXPERTS]), "hidden_length": np.array([HIDDEN])}
    constants["threes"] = np.array([-1, 3, HIDDEN])
    weigh = SPLIT.weigh.replace("split_shape", "by_batch").replace("split_weights", "weights_by_batch")
    assert_fuses(changed(SPLIT, repeat=lengths, weigh=weigh, constants=constants), {"weight_on": "output"})


def test_rows_that_weights_spread() -> None:
    """Three tokens, each weighed as each of them: the rows' view has one batch, the sum has three."""
    constants = {
        "split_shape": np.array([EXPERTS, 1, -1, HIDDEN]),
        "split_weights": np.array([EXPERTS, 3, -1]),
    }
    total = "\n y4 = ReduceSum <keepdims = 0> (weighted, zero)\n y = ReduceSum <keepdims = 0> (y4, zero)"
    experts = changed(SPLIT, sum=total, constants=constants)
    original, model = experts.model(), experts.model()
    rewrite(model)
    x = np.random.default_rng(0).standard_normal((3, HIDDEN)).astype(np.float32)
    expected, got = (run(each, x, with_library=False)["y"] for each in (original, model))
    assert got.shape == expected.shape
    assert np.allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_rows_of_their_own_axis() -> None:
    rows = "\n rows = Unsqueeze (x, zero)"
    assert_fuses(changed(ON_OUTPUT, repeat=rows, fc1=ON_INPUT.fc1), {"weight_on": "output"})


def test_biases_behind_which_weights_stand() -> None:
    experts = changed(
        ON_OUTPUT,
        repeat=BIAS_ROWS,
        fc1="\n bare1 = MatMul (x, fc1)\n made1 = Add (bare1, row1)",
        fc2="\n bare2 = MatMul (active, fc2)\n made2 = Add (row2, bare2)",
    )
    assert_fuses(experts, {"weight_on": "output"})


STAYING = {
    "the last row for all tokens": (
        changed(ON_OUTPUT, fc1="\n last = Slice (x, minus1, end, zero)\n made1 = MatMul (last, fc1)",
                constants={"end": np.array([2**62], np.int64)}),
        "the rows 'last' of Slice 'slice_9' may be others than the tokens of",
    ),
    "a bias that all experts add": (
        changed(repeat=BIAS_ROWS + ON_INPUT.repeat, fc1="\n bare1 = MatMul (rows, fc1)\n made1 = Add (bare1, row1)"),
        "experts that are not chosen add their bias",
    ),
    "weights that are added": (
        changed(router=ON_INPUT.router.replace("<axis = 1>", '<axis = 1, reduction = "add">')),
        "holds more than the weights of the chosen",
    ),
    "others weigh, too": (
        changed(router=ON_INPUT.router.replace("(nothing,", "(scores,")),
        "holds more than the weights of the chosen",
    ),
    "rows of another order": (
        changed(repeat="""
            apart = Unsqueeze (x, one)
            copies3 = Tile (apart, tile_apart)
            copies = Reshape (copies3, rows_of_x)
            column = Reshape (by_expert, column_shape)
            weighed = Mul (copies, column)
            rows = Reshape (weighed, by_expert_shape)""",
            constants={"tile_apart": np.array([1, EXPERTS, 1], np.int64)}),
        "does not repeat the tokens' rows for 8 experts",
    ),
    "weights of another order": (
        changed(repeat=ON_INPUT.repeat.replace("(by_expert,", "(scattered,")),
        "are not scattered to the chosen of all experts",
    ),
    "rows regrouped between the layers": (
        changed(fc2="""
            apart = Reshape (active, apart_shape)
            swapped = Reshape (apart, back_shape)
            made2 = MatMul (swapped, fc2)""",
            constants={"apart_shape": np.array([-1, 3], np.int64), "back_shape": np.array([EXPERTS, -1, 3], np.int64)}),
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [case for case in STAYING if STAYING[case][1]])
def test_refused(case: str) -> None:
    experts, sentence = STAYING[case]
    assert_stays(experts, "experts-form", sentence)


def test_experts_counted_from_the_end() -> None:
    router = ROUTER + "\n backwards = Gather (places, ids)" + SCATTER.replace("(nothing, ids", "(nothing, backwards")
    experts = changed(router=router, constants={"places": np.arange(-EXPERTS, 0)})
    assert_stays(
        experts, "experts-mismatch", "there are 8 experts, but 'backwards' of Gather 'gather_5' may be from -8"
    )


def test_views_that_change_nothing() -> None:
    assert_fuses(STAYING["rows regrouped between the layers"][0], {"weight_on": "input"})


def test_no_choices() -> None:
    experts = changed(ON_OUTPUT, constants={"k": np.array([0], np.int64)})
    assert_stays(experts, "experts-form", "chooses no expert for any token")

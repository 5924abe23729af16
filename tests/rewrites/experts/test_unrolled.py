"""One expert after the other on all tokens: all that may be chosen, each once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ort_moe.files.streamed_tensor import StreamedTensor
from ort_moe.rewrites import rewrite
from tests.rewrites import synthetic
from tests.rewrites.blocks import EXPERTS, HIDDEN, cpu_session
from tests.rewrites.experts.experts_models import ROUTER, assert_fuses, assert_stays, fuse
from tests.rewrites.experts.unrolled_models import (
    WEIGHTS,
    by_choice,
    by_product,
    gated,
    plain,
    unrolled,
    with_biases,
)


@pytest.mark.parametrize("share", [by_product, by_choice])
@pytest.mark.parametrize(
    ("expert", "expected"),
    [
        (gated, {"activation": "silu", "gated": 1, "gate_layout": "concat"}),
        (with_biases, {"activation": "silu", "gated": 1}),
        (plain, {"activation": "relu", "gated": 0}),
    ],
)
def test_form(expert: Callable[[int], str], expected: dict[str, Any], share: Callable[[int], str]) -> None:
    model = assert_fuses(unrolled(expert, share), {**expected, "weight_on": "output"})
    assert [node.op_type for node in model.graph] == ["MatMul", "FusedRouter", "FusedExperts"]


def test_in_any_order() -> None:
    assert_fuses(unrolled(order=[3, 1, 2, 0, 7, 6, 5, 4]), {"activation": "silu"})


def test_weights_are_joined_when_they_are_written() -> None:
    model = unrolled().model()
    fuse(model)
    (node,) = [node for node in model.graph if node.op_type == "FusedExperts"]
    tensors = [value.const_value for value in node.inputs if value is not None and value.const_value is not None]
    assert [type(tensor) for tensor in tensors] == [StreamedTensor] * 2
    fc1 = np.stack([np.concatenate([WEIGHTS[f"gate{e}"].T, WEIGHTS[f"up{e}"].T]) for e in range(EXPERTS)])
    np.testing.assert_array_equal(tensors[0].numpy(), fc1)
    assert not [
        name for name in model.graph.initializers if name.startswith(("gate0", "up", "down")) and "_" not in name
    ]


def test_followed_by_more() -> None:
    experts = unrolled()
    behind = experts.sum.replace("y = Add", "routed = Add") + "\n y = Add (x, routed)"
    assert_fuses(unrolled(sum=behind), {"activation": "silu"})


def test_added_to_a_residual() -> None:
    onto = unrolled().sum.replace("(zeros, term0)", "(x, term0)")
    model = assert_fuses(unrolled(sum=onto), {"activation": "silu"})
    node = model.graph.node(-1)
    assert (node.op_type, node.inputs[-1]) == ("FusedExperts", model.graph.inputs[0])


def test_two_layers_in_a_row() -> None:
    """The second begins with what the first returns; the router of the first has a product in common with an expert."""
    model, original = (synthetic.unrolled(2, 4) for _ in range(2))
    first, second = rewrite(model).experts
    assert (first.block, second.block) == ("partly", "whole")
    assert [finding.reason.slug for finding in first.findings] == ["read-by-others"]
    x = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    name = original.graph.inputs[0].name
    (was,), (now,) = (cpu_session(each, with_library=False).run(None, {name: x}) for each in (original, model))
    np.testing.assert_allclose(now, was, rtol=1e-5)


def test_added_to_one_row_for_all() -> None:
    onto = unrolled().sum.replace("(zeros, term0)", "(row, term0)")
    row = {**WEIGHTS, "row": np.ones((1, HIDDEN), np.float32)}
    assert_stays(unrolled(sum=onto, constants=row), "experts-form", "is of another type or shape")


def test_added_to_the_last_row_for_all() -> None:
    start = "\n last = Slice (x, minus1, end, zero)"
    experts = unrolled(constants={**WEIGHTS, "end": np.array([2**62], np.int64), "zero": np.array([0], np.int64)})
    experts = replace(experts, sum=start + experts.sum.replace("(zeros,", "(last,"))
    assert_stays(experts, "experts-form", "the rows to which the experts are added, 'last' of Slice")


def test_weights_cut_to_integers_are_others() -> None:
    def cut(e: int) -> str:
        text = by_product(e).replace(f"share{e} =", f"exact{e} =")
        return f"{text}\n whole{e} = Cast <to = 7> (exact{e})\n share{e} = Cast <to = 1> (whole{e})"

    assert_stays(unrolled(share=cut), "experts-form", "ends in no form of experts that is known")


def by_float(e: int) -> str:
    return f"\n ids_float{e} = Cast <to = 1> (ids)" + by_product(e).replace("(ids,", f"(ids_float{e},")


def floats(**others: float) -> dict[str, Any]:
    numbers = {f"number{e}": np.array(e, np.float32) for e in range(EXPERTS)}
    return {**WEIGHTS, **numbers, **{name: np.array(number, np.float32) for name, number in others.items()}}


def test_compared_as_floats() -> None:
    assert_fuses(unrolled(share=by_float, constants=floats()), {"activation": "silu"})


@pytest.mark.parametrize("number", [3.5, np.inf])
def test_compared_with_no_expert(number: float) -> None:
    experts = unrolled(share=by_float, constants=floats(number3=number))
    assert_stays(experts, "experts-form", "adds up other experts than each of some once")


def test_experts_tell_that_a_choice_is_a_router() -> None:
    """No linear layer makes what is ranked: the comparisons alone are too weak a sign."""
    router = "\n other = Sin (logits)" + ROUTER.replace("(logits)", "(other)")
    model = assert_fuses(unrolled(router=router), {"activation": "silu"})
    assert [node.op_type for node in model.graph] == ["MatMul", "Sin", "FusedRouter", "FusedExperts"]


def test_choices_one_a_row_are_others() -> None:
    """(T * K, 1) instead of (T, K), which a single token's row is spread over."""
    apart = "\n apart_ids = Reshape (ids, column_shape)\n apart_weights = Reshape (weights, column_shape)"

    def share(e: int) -> str:
        return by_product(e).replace("(ids,", "(apart_ids,").replace("(weights,", "(apart_weights,")

    experts = unrolled(share=share, router=ROUTER + apart, constants={**WEIGHTS, "column_shape": np.array([-1, 1])})
    site, _ = fuse(experts.model())
    (finding,) = site.findings
    assert (site.status, finding.reason.slug) == ("left", "experts-form")
    assert "is not weighed by all 2 choices" in finding.detail


def other(expert: Callable[[int], str], place: int, old: str, new: str) -> Callable[[int], str]:
    return lambda e: expert(e).replace(old, new) if e == place else expert(e)


STAYING = {
    "a bias of one number": (
        unrolled(lambda e: plain(e).replace(f"MatMul (x, gate{e})", f"Gemm (x, gate{e}, one_float)"),
                 constants={**WEIGHTS, "one_float": np.ones(1, np.float32)}),
        "experts-form",
        "adds no bias of the experts to their product",
    ),
    "some experts": (unrolled(order=range(EXPERTS - 1)), "experts-mismatch", "there are 7 experts, but"),
    "one expert twice": (unrolled(other(plain, 3, "gate3", "gate2")), None, None),
    "another activation": (unrolled(other(plain, 3, "Relu", "Sigmoid")), "experts-activation", "it is made of sigmoid"),
    "an activation of its own": (unrolled(other(plain, 3, "Relu (g3)", "Gelu (g3)")), "experts-form", "another form"),
    "other rows": (
        unrolled(other(plain, 3, "g3 = MatMul (x, gate3)", "neg = Neg (x)\n g3 = MatMul (neg, gate3)")),
        "experts-form",
        "another form",
    ),
    "a number missing": (
        unrolled(share=other(by_product, 3, "number3", "number2")),
        "experts-form",
        "other experts than each of some once",
    ),
    "a sum that is read": (
        unrolled(outputs=f", float[T, {HIDDEN}] total3"), "read-by-others", "of some experts is also read by others",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", [case for case in STAYING if STAYING[case][1]])
def test_refused(case: str) -> None:
    experts, reason, sentence = STAYING[case]
    assert reason is not None
    assert sentence is not None
    assert_stays(experts, reason, sentence)


def test_matrices_of_two_experts_may_be_the_same() -> None:
    assert_fuses(STAYING["one expert twice"][0], {"activation": "relu"})

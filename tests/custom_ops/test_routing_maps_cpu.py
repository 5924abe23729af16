"""The maps that FusedRouter's CPU kernel builds are the reference's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from ort_moe.ops import ROUTING_MAPS
from ort_moe.reference.routing_maps import routing_maps
from tests.op_models import assert_same_bits, op_model, op_session, run_op
from tests.router_cases import RouterCase, router_cases

OUTPUTS = ["weights", "indices", *(tensor.name for tensor in ROUTING_MAPS)]


def feeds_of(case: RouterCase) -> dict[str, Any]:
    feeds = {"logits": case.logits, "selection_bias": case.selection_bias, "expert_scale": case.expert_scale}
    return {name: array for name, array in feeds.items() if array is not None}


def check(case: RouterCase, *, symbolic: bool = False) -> dict[str, Any]:
    got = run_op("FusedRouter", feeds_of(case), case.attributes, outputs=OUTPUTS, symbolic=symbolic)
    weights, indices = case.emulate()
    assert_same_bits(got["weights"], weights)
    assert_same_bits(got["indices"], indices)
    for tensor, expected in zip(ROUTING_MAPS, routing_maps(indices, case.experts), strict=True):
        assert_same_bits(got[tensor.name], expected)
    return got


@settings(max_examples=100)
@given(router_cases(max_experts=1100, max_tokens=40))
def test_every_router_has_the_references_maps(case: RouterCase) -> None:
    check(case)


@pytest.mark.parametrize("tokens", [0, 1, 2, 33, 700])
@pytest.mark.parametrize(("experts", "k"), [(1, 1), (8, 8), (60, 4), (128, 8), (896, 22)])
@pytest.mark.parametrize("texture", ["normal", "constant", "nan"])
def test_shapes(tokens: int, experts: int, k: int, texture: str) -> None:
    attributes = {"k": k, "score": "softmax", "normalize": 1}
    got = check(RouterCase(attributes, (tokens, experts), texture=texture), symbolic=True)
    assert got["expert_first_token_offset"][-1] == tokens * k
    if tokens == 0:
        assert not got["expert_first_token_offset"].any()


@pytest.mark.parametrize("missing", [tensor.name for tensor in ROUTING_MAPS])
def test_some_of_the_maps_are_refused(missing: str) -> None:
    case = RouterCase({"k": 2, "score": "softmax"}, (3, 8))
    outputs = [name for name in OUTPUTS if name != missing]
    with pytest.raises(Exception, match=f"output '{missing}' must be there, as the other routing maps are"):
        op_session(op_model("FusedRouter", feeds_of(case), case.attributes, outputs=outputs))

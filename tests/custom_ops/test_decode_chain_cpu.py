"""Routers with maps, experts and finalize in one session: each node takes what the one before gives."""

from __future__ import annotations

import dataclasses

import pytest

from ort_moe.reference.finalize_routing import finalize_routing
from ort_moe.reference.fused_router import fused_router
from ort_moe.reference.routing_maps import routing_maps
from tests.chain_models import Chain
from tests.experts_cases import ExpertsCase
from tests.op_models import assert_same_bits, op_session, run_session
from tests.router_cases import DTYPES


@pytest.mark.parametrize("weight_format", ["dense", "nvfp4"])
@pytest.mark.parametrize("onnx_type", DTYPES)
def test_chain(onnx_type: str, weight_format: str) -> None:
    case = ExpertsCase((5,), 12, 3, 64, 32, onnx_type, weight_format, has_residual=True)
    chain = Chain(case)
    session = op_session(chain.model())
    for seed in range(2):
        inputs = chain.inputs(seed)
        got = run_session(session, chain.constants | inputs) | {"x0": inputs["x0"]}
        for n in range(chain.layers):
            weights, indices = fused_router(inputs[f"logits{n}"], **chain.router)
            layer = dataclasses.replace(case)
            layer.feeds.update(x=got[f"x{n}"], residual=got[f"x{n}"], weights=weights, indices=indices)
            layer.check(got[f"x{n + 1}"])
            permuted = routing_maps(indices, case.experts).unpermuted_to_permuted
            expected = finalize_routing(chain.constants["rows"], weights, indices, permuted, residual=got[f"x{n}"])
            assert_same_bits(got[f"z{n}"], expected)

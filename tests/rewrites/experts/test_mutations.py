"""Experts that are spelled otherwise are fused or left, and compute what they did: never anything else."""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import models.fixtures
from models.fixtures import Fixture
from ort_moe.rewrites import rewrite
from ort_moe.rewrites.experts import EXPERTS_RULES
from tests.rewrites.mutations import MUTATIONS, mutate
from tests.rewrites.test_mutations import run

FIXTURES = (
    "mixtral_block_dynamo_fp32",
    "gpt_oss_block_dynamo_fp32",
    "gpt_oss_block_legacy_fp32",
    "llama4_text_block_dynamo_fp32",
    "llama4_text_block_legacy_fp32",
    "nemotron_h_block_dynamo_fp32",
    "zaya_block_dynamo_fp32",
    "mixtral_block_transformers_grouped_fp32",
    "gpt_oss_block_transformers_grouped_fp32",
)
"""One of each form, and of each thing that experts may have."""


@functools.cache
def original(name: str) -> tuple[Fixture, ir.Model, frozenset[str]]:
    """The fixture, its model, and the names of the values that a FusedExperts absorbs or returns."""
    fixture = models.fixtures.get(name)
    model = ir.load(fixture.path)
    fused, routers = model.clone(), model.clone()
    rewrite(fused)
    rewrite(routers, skip=EXPERTS_RULES)
    left = {value.name for node in fused.graph for value in node.outputs}
    absorbed = {value.name or "" for node in routers.graph for value in node.outputs if value.name not in left}
    absorbed |= {node.outputs[0].name or "" for node in fused.graph if node.op_type == "FusedExperts"}
    made = {value.name for node in model.graph if node.op_type != "Constant" for value in node.outputs}
    return fixture, model, frozenset(absorbed & made)


# Derandomised: the same examples on every machine.
@settings(max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(FIXTURES),
    mutations=st.lists(st.sampled_from(sorted(MUTATIONS)), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_mutated_experts_compute_the_same(name: str, mutations: list[str], seed: int) -> None:
    fixture, base, values = original(name)
    model = base.clone()
    mutate(model, values, mutations, seed)
    feeds = fixture.sample_inputs(seed=0)
    try:
        was = run(model, feeds)
    except Exception:  # edits are of routers: some make no valid experts
        return
    (site,) = rewrite(model).experts
    assert (site.status == "whole") == (not site.findings)
    for key, now in run(model, feeds).items():
        reference = was[key].astype(np.float64)
        np.testing.assert_allclose(now, reference, rtol=0, atol=1e-5 * np.abs(reference).max(), err_msg=key)
    assert not rewrite(model).modified

"""One layer of experts, held against the original's own values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import models.fixtures
from ort_moe.optimization.optimize import optimize
from ort_moe.verification import Verification, verify


def verified(name: str, tmp_path: Path, flaw: float = 0.0) -> Verification:
    """The verification of an optimised fixture, whose experts' second layer is off by so much in one weight."""
    fixture = models.fixtures.get(name)
    path = tmp_path / "optimized.onnx"
    optimize(fixture.path, path, verify=False)
    if flaw:
        model = ir.load(path)
        (node,) = [node for node in model.graph if node.op_type == "FusedExperts"]
        value = next(each for each in node.inputs if each is not None and each.name == "val_35")
        assert value.const_value is not None
        weights = value.const_value.numpy().copy()
        weights[:, 0, 0] += flaw
        value.const_value = ir.tensor(weights, name=value.name)
        ir.save(model, path)
    return verify(fixture.path, path)


@pytest.mark.parametrize(
    "name",
    [
        "mixtral_block_dynamo_fp32",
        "mixtral_block_legacy_fp16",  # the original's mixing weights are in half precision
        "gpt_oss_block_dynamo_bf16",  # runs widened
        "inkling_text_block_dynamo_fp32",  # the weights come of the router by way of the shared experts'
    ],
)
def test_fixture(name: str, tmp_path: Path) -> None:
    verification = verified(name, tmp_path)
    assert verification.passed
    (check,) = [site for site in verification.sites if site.what == "layer of experts"]
    assert (check.status, check.rows) == ("passed", 1 + 4 + 4), check
    assert "each layer of experts on the original's own values" in verification.summary


def test_what_the_original_does_not_compute_is_told(tmp_path: Path) -> None:
    verification = verified("llama4_text_block_dynamo_fp32", tmp_path)
    assert verification.passed
    (check,) = [site for site in verification.sites if site.what == "layer of experts"]
    assert "is not a value of the original" in check.detail
    assert f"0 of 1 layers of experts ({check.detail})" in verification.summary


def test_a_flaw_is_found(tmp_path: Path) -> None:
    verification = verified("mixtral_block_dynamo_fp32", tmp_path, flaw=0.01)
    start = "the first layer of experts that differs is node_sum_2: by our kernel: rows differ by "
    assert str(verification.failure).startswith(start)
    assert np.isfinite([site.difference for site in verification.sites]).all()

"""Models whose number of tokens is 0 as declared: nothing differs, and no check is at a loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import models.fixtures
import ort_moe
from ort_moe.verification.block_check import difference_of_rows
from ort_moe.verification.tolerance import as_rows
from tests.contrib_models import ContribCase
from tests.ort_moe.verification.contrib_layers import layers, saved
from tests.rewrites.blocks import block
from tests.rewrites.expert_loops import ROUTER


def without_tokens(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a first axis of 0; of a batch, the second."""
    for value in (*proto.graph.input, *proto.graph.output):
        dims = value.type.tensor_type.shape.dim
        if len(dims) > 1:
            dims[len(dims) - 2].dim_value = 0
    return proto


@pytest.mark.parametrize("weights", ["keep", "nvfp4", "int8"])
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("case", [ContribCase(), ContribCase(weight_format="int4")], ids=str)
def test_contrib_blocks(case: ContribCase, rank: int, weights: str, tmp_path: Path) -> None:
    case = ContribCase(weight_format=case.weight_format, rank=rank)
    source = saved(without_tokens(layers(case)), tmp_path / "model.onnx")
    report = ort_moe.optimize(source, tmp_path / "out.onnx", target="cpu", weights=weights)
    assert report.verification is not None
    assert [(site.status, site.rows) for site in report.verification.sites] == [("passed", 0)] * 2


@pytest.mark.parametrize(("target", "weights"), [("cuda", "keep"), ("cuda", "fp8"), ("contrib", "keep")])
def test_an_export(target: Any, weights: str, tmp_path: Path) -> None:
    proto = without_tokens(onnx.load(models.fixtures.get("mixtral_block_dynamo_fp32").path))
    del proto.graph.value_info[:]
    source = saved(proto, tmp_path / "model.onnx")
    report = ort_moe.optimize(source, tmp_path / "out.onnx", target=target, weights=weights)
    assert report.verification is not None
    assert report.verification.passed


def test_a_router(tmp_path: Path) -> None:
    source = saved(without_tokens(ir.to_proto(block(ROUTER))), tmp_path / "model.onnx")
    report = ort_moe.optimize(source, tmp_path / "out.onnx")
    assert report.verification is not None
    assert {(site.status, site.rows) for site in report.verification.sites} == {("passed", 0)}


@pytest.mark.parametrize(
    ("got", "expected", "difference"),
    [((0, 4), (0, 4), 0.0), ((2, 0, 4), (0, 4), 0.0), ((3, 0), (3, 0), 0.0), ((3, 4), (3, 0), np.inf)],
)
def test_rows_of_nothing(got: tuple[int, ...], expected: tuple[int, ...], difference: float) -> None:
    tied = np.zeros(expected[0], np.bool_)
    found, other = difference_of_rows(np.ones(got), np.ones(expected), tied, 0.1)
    assert found == difference
    assert other.shape == tied.shape
    assert as_rows(np.ones(got)).shape == (np.prod(got[:-1]), got[-1])

"""Blocks that one of two models computes by a contrib node are held against each other as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import models.fixtures
import ort_moe
from ort_moe.errors import ModelError
from ort_moe.rewrites import rewrite
from ort_moe.verification import verify
from ort_moe.verification.tolerance import near_tied
from tests.contrib_models import ContribCase
from tests.ort_moe.verification.contrib_layers import layers, saved, tied_layer


@pytest.mark.parametrize(
    ("case", "coarse"),
    [
        (ContribCase(), False),
        (ContribCase(rank=3), False),
        (ContribCase(dtype="float16", rank=3), False),
        (ContribCase(weight_format="int4", zero_points=True), True),
        (ContribCase(weight_format="int8", rank=3), True),
    ],
    ids=str,
)
def test_contrib_blocks_are_held_against_what_replaces_them(case: ContribCase, coarse: bool, tmp_path: Path) -> None:
    source = saved(layers(case), tmp_path / "model.onnx")
    report = ort_moe.optimize(source, tmp_path / "out.onnx", target="cpu")
    verification = report.verification
    assert verification is not None
    assert verification.passed
    assert [(site.node, site.status, site.what) for site in verification.sites] == [
        ("moe0", "passed", "contrib block"),
        ("moe1", "passed", "contrib block"),
    ]
    assert all(site.rows > 0 for site in verification.sites)
    assert (verification.tolerance > 1e-2) == coarse
    assert "each contrib block on the original's own values" in verification.summary


@pytest.mark.parametrize(("attribute", "value"), [("beta", 0.5), ("gate_layout", "concat"), ("k", 3), ("normalize", 0)])
def test_what_is_wrong_is_found(attribute: str, value: Any, tmp_path: Path) -> None:
    source = saved(layers(ContribCase(rank=3)), tmp_path / "model.onnx")
    model = ir.load(source)
    rewrite(model, target="cpu")
    wrong = next(node for node in model.graph if node.domain == "ort_moe" and attribute in node.attributes)
    wrong.attributes[attribute] = ir.Attr(attribute, wrong.attributes[attribute].type, value)
    wrong.overload = ""
    if attribute == "k":
        for output in wrong.outputs:
            output.shape = None
    model.functions.clear()
    ir.save(model, tmp_path / "wrong.onnx")
    verification = verify(source, tmp_path / "wrong.onnx")
    assert not verification.passed
    assert verification.failure is not None
    assert verification.failure.startswith("the first contrib block that differs is moe0: by our kernels: ")


def test_rows_that_differ_near_ties_prove_nothing(tmp_path: Path) -> None:
    source = saved(tied_layer(), tmp_path / "model.onnx")
    model = ir.load(source)
    rewrite(model, target="cpu")
    wrong = next(node for node in model.graph if node.op_type == "FusedExperts")
    wrong.attributes["beta"] = ir.AttrFloat32("beta", 0.5)
    wrong.overload = ""
    model.functions.clear()
    ir.save(model, tmp_path / "wrong.onnx")
    verification = verify(source, tmp_path / "wrong.onnx")
    assert [(site.status, site.near_ties) for site in verification.sites] == [("skipped", verification.sites[0].rows)]
    assert not verification.passed


def test_a_contrib_block_put_in_the_place_of_others_is_held_too(tmp_path: Path) -> None:
    model = ir.from_proto(layers(ContribCase()))
    rewrite(model, target="cpu")
    ir.save(model, tmp_path / "ours.onnx")
    contrib = saved(layers(ContribCase()), tmp_path / "contrib.onnx")
    verification = verify(tmp_path / "ours.onnx", contrib)
    assert verification.passed
    assert [(site.status, site.what) for site in verification.sites] == [("passed", "contrib block")] * 2


@pytest.mark.parametrize("name", ["mixtral_block_dynamo_fp32", "qwen3_moe_causal_lm_dynamo_fp32"])
def test_contrib_nodes_in_the_place_of_an_export(name: str, tmp_path: Path) -> None:
    fixture = models.fixtures.get(name)
    report = ort_moe.optimize(fixture.path, tmp_path / "out.onnx", target="contrib")
    assert report.matched
    assert report.operators_after["com.microsoft::MoE"] == len(report.experts)
    verification = report.verification
    assert verification is not None
    assert verification.passed
    assert [(site.status, site.what) for site in verification.sites] == [("passed", "contrib block")] * len(
        report.experts
    )
    assert "fused whole, with experts" in str(report)


def test_a_wrong_contrib_node_is_found(tmp_path: Path) -> None:
    fixture = models.fixtures.get("mixtral_block_dynamo_fp32")
    model = ir.load(fixture.path)
    rewrite(model, target="contrib")
    (node,) = [node for node in model.graph if node.domain == "com.microsoft"]
    node.attributes["activation_beta"] = ir.AttrFloat32("activation_beta", 0.25)
    ir.save(model, tmp_path / "wrong.onnx")
    verification = verify(fixture.path, tmp_path / "wrong.onnx")
    assert verification.failure is not None
    assert "by ONNX Runtime's own kernel: rows differ" in verification.failure


@pytest.mark.parametrize(
    "case",
    [
        ContribCase(fusion=2, bias=True),
        ContribCase(fusion=2, dtype="bfloat16", rank=3),
        ContribCase("silu", None, separate=True, dtype="float16"),
        ContribCase(fusion=0, separate=True, weight_format="int4", zero_points=True),
        ContribCase(fusion=2, weight_format="int8", layout="rows", router_weights=False),
        ContribCase(weight_format="nvfp4", layout="N", dtype="float16"),
        ContribCase(fusion=2, weight_format="nvfp4", layout="N"),
        ContribCase("silu", None, weight_format="nvfp4", layout="K"),
        ContribCase(weight_format="mxfp4", layout="N", bias=True),
        ContribCase("relu", None, weight_format="mxfp4", layout="K", dtype="float16"),
        ContribCase(weight_format="fp8", bias=True),
        ContribCase("silu", None, separate=True, weight_format="fp8"),
        ContribCase(weight_format="fp8", layout="experts"),
    ],
    ids=str,
)
def test_nodes_that_the_cpu_does_not_run_are_held_as_others_that_it_does(case: ContribCase, tmp_path: Path) -> None:
    source = saved(layers(case, 1), tmp_path / "model.onnx")
    verification = ort_moe.optimize(source, tmp_path / "out.onnx", target="cpu").verification
    assert verification is not None
    assert verification.passed
    assert [(site.status, site.what) for site in verification.sites] == [("passed", "contrib block")]
    assert "contrib nodes that the CPU does not run spelled as such that it does" in verification.notes


def test_wrong_layouts_are_found_where_the_cpu_does_not_run_the_node(tmp_path: Path) -> None:
    source = saved(layers(ContribCase(weight_format="nvfp4", layout="N"), 1), tmp_path / "model.onnx")
    model = ir.load(source)
    rewrite(model, target="cpu")
    wrong = next(node for node in model.graph if node.op_type == "FusedExperts")
    wrong.attributes["gate_layout"] = ir.AttrString("gate_layout", "concat")
    wrong.overload = ""
    model.functions.clear()
    ir.save(model, tmp_path / "wrong.onnx")
    failure = verify(source, tmp_path / "wrong.onnx").failure
    assert failure is not None
    assert failure.startswith("the first contrib block that differs is moe0")


def test_a_node_that_the_cpu_does_not_run_says_what_to_do(tmp_path: Path) -> None:
    source = saved(ContribCase("geglu").model(), tmp_path / "model.onnx")
    with pytest.raises(ModelError, match=r"nothing was put in place: .*MoE.*; `--no-verify` writes it all the same"):
        ort_moe.optimize(source, tmp_path / "out.onnx", target="cpu")
    report = ort_moe.optimize(source, tmp_path / "out.onnx", target="cpu", verify=False)
    assert report.matched
    assert (tmp_path / "out.onnx").exists()


@pytest.mark.parametrize("edit", ["k", "input"])
def test_a_node_that_is_not_valid_is_the_runtimes_to_tell(edit: str, tmp_path: Path) -> None:
    source = saved(ContribCase().model(), tmp_path / "model.onnx")
    ort_moe.optimize(source, tmp_path / "out.onnx", target="cpu")
    model = ir.load(source)
    (node,) = model.graph
    if edit == "k":
        node.attributes.add(ir.AttrFloat32("k", 2.0))
    else:
        node.replace_input_with(1, None)
    ir.save(model, tmp_path / "wrong.onnx")
    with pytest.raises(ModelError, match=r"ONNX Runtime cannot load .*wrong\.onnx"):
        verify(tmp_path / "wrong.onnx", tmp_path / "out.onnx")
    assert not verify(tmp_path / "out.onnx", tmp_path / "wrong.onnx").passed


def test_near_ties() -> None:
    logits = np.array([[3.0, 1.0, 1.0 + 1e-7], [3.0, 2.0, 1.0], [0.0, np.nan, np.nan]], np.float32)
    assert near_tied(logits, 2, 1e-5).tolist() == [True, False, True]
    assert near_tied(logits, 1, 1e-5).tolist()[:2] == [False, False]
    assert near_tied(logits, 3, 1e-5).tolist() == [False] * 3

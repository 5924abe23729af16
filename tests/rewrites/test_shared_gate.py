"""The gate of a shared expert in the router's node: asked for, right, undone and done again, and where it stays."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import models.fixtures
from ort_moe.inspection.inspect import inspect
from ort_moe.optimization.optimize import optimize
from ort_moe.rewrites import rewrite
from ort_moe.rewrites.shared_gate import split_shared_gates
from ort_moe.verification import verify
from tests.rewrites.blocks import cpu_session

OPT_IN = ["+shared-gate"]
GATED = [
    fixture.name
    for fixture in models.fixtures.all()
    if fixture.architecture in ("qwen2_moe", "qwen3_next", "qwen3_5_moe_text")
]


def counts(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def rewritten(name: str, **options: Any) -> ir.Model:
    model = ir.load(models.fixtures.get(name).path)
    assert rewrite(model, **options).modified
    return model


def test_there_are_fixtures_of_every_exporter() -> None:
    assert len(GATED) >= 12


@pytest.mark.parametrize("name", GATED)
def test_real_exports(name: str, tmp_path: Path) -> None:
    """The answer is the original's, by kernels and by bodies; reports are those of the two nodes."""
    fixture, default = models.fixtures.get(name), rewritten(name)
    path = tmp_path / "joined.onnx"
    report = optimize(fixture.path, path, rules=OPT_IN)
    assert report.verification is not None
    assert report.verification.passed
    assert [check.status for check in report.verification.sites] == ["passed"] * 2 * fixture.layers
    joined = ir.load(path)
    changed = counts(joined)
    changed.subtract(counts(default))
    layers = fixture.layers
    assert changed["SharedGateRouter"] == -changed["FusedRouter"] == -changed["Sigmoid"] == layers
    assert changed["Gemm"] + changed["MatMul"] == -layers
    assert changed["Slice"] == 3 * layers
    assert changed["Cast"] == (layers if fixture.precision == "fp16" else 0)
    assert [(s.experts, s.k, s.status) for s in report.sites] == [(fixture.experts, fixture.k, "whole")] * layers

    again = rewrite(joined)
    assert not again.modified
    assert [site.status for site in again.sites] == ["whole"] * layers
    assert [site.residual for site in again.experts] == ["gated"] * layers
    assert counts(joined)["SharedGateRouter"] == layers
    assert not optimize(path, None).matched
    assert verify(fixture.path, path).passed


def test_it_is_not_run_unless_asked_for() -> None:
    name = "qwen3_next_block_dynamo_fp32"
    assert counts(rewritten(name))["SharedGateRouter"] == 0
    assert counts(rewritten(name, rules=OPT_IN, skip=["shared-gate"]))["SharedGateRouter"] == 0
    assert counts(rewritten(name, rules=OPT_IN, target="cpu"))["SharedGateRouter"] == 1


def test_inspect_sees_the_router(tmp_path: Path) -> None:
    source = models.fixtures.get("qwen3_next_block_dynamo_fp32").path
    pages = []
    for rules in (None, OPT_IN):
        optimize(source, tmp_path / "out.onnx", rules=rules, verify=False, force=True)
        pages.append(inspect(tmp_path / "out.onnx"))
    default, joined = pages
    assert default.layers == joined.layers
    assert joined.operators["ort_moe::SharedGateRouter"] == 1


@pytest.mark.parametrize("with_library", [False, True])
def test_values_keep_their_names(with_library: bool) -> None:
    default, joined = (rewritten("qwen3_next_block_dynamo_fp16", rules=rules) for rules in (None, OPT_IN))
    feeds = models.fixtures.get("qwen3_next_block_dynamo_fp16").sample_inputs(seed=3)
    (router,) = (node for node in default.graph if node.op_type == "FusedRouter")
    sigmoid = next(node for node in default.graph if node.op_type == "Sigmoid" and node.outputs[0].shape[-1] == 1)
    values = [*router.outputs, sigmoid.outputs[0]]
    for model in (default, joined):
        known = {value.name: value for node in model.graph for value in node.outputs}
        model.graph.outputs.extend(known[value.name] for value in values)
    was, now = (cpu_session(model, with_library=with_library).run(None, feeds) for model in (default, joined))
    y, weights, indices, share = range(4)
    np.testing.assert_array_equal(now[indices], was[indices])
    np.testing.assert_array_equal(now[weights], was[weights])
    assert now[share].dtype == was[share].dtype == np.float16
    np.testing.assert_allclose(now[share].astype(np.float32), was[share].astype(np.float32), atol=1e-3)
    np.testing.assert_allclose(now[y].astype(np.float32), was[y].astype(np.float32), atol=4e-3 * np.abs(was[y]).max())


def test_split_is_what_was_joined() -> None:
    name = "qwen3_next_causal_lm_dynamo_fp32"
    default, joined = rewritten(name), rewritten(name, rules=OPT_IN)
    routers = [node.name for node in default.graph if node.op_type == "FusedRouter"]
    assert split_shared_gates(joined) == frozenset(routers)
    assert counts(joined) == counts(default)
    assert [node.name for node in joined.graph if node.op_type == "FusedRouter"] == routers


def test_nodes_of_others_stay() -> None:
    """Without the mark of the rule, or with a reader that the rule did not make."""
    for mark in (False, True):
        model = rewritten("qwen3_next_block_dynamo_fp32", rules=OPT_IN)
        (node,) = (node for node in model.graph if node.op_type == "SharedGateRouter")
        if mark:
            reader = ir.node("Identity", [node.outputs[1]])
            reader.outputs[0].name = "all_indices"
            model.graph.append(reader)
        else:
            del node.metadata_props["ort_moe.shared_gate"]
        assert split_shared_gates(model) == frozenset()
        assert counts(model)["SharedGateRouter"] == 1


def _other_rows(gate: ir.Node) -> None:
    """The gate reads what another node makes."""
    graph, rows = gate.graph, gate.inputs[0]
    assert graph is not None
    assert rows is not None
    other = ir.node("Neg", [rows])
    other.outputs[0].name, other.outputs[0].type, other.outputs[0].shape = "other", rows.type, rows.shape
    graph.insert_before(gate, other)
    gate.replace_input_with(0, other.outputs[0])


def _biased(gate: ir.Node) -> None:
    bias = ir.Value(name="gate_bias", const_value=ir.tensor(np.ones(1, np.float32), name="gate_bias"))
    bias.type, bias.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([1])
    assert isinstance(gate.graph, ir.Graph)
    gate.graph.register_initializer(bias)
    gate.resize_inputs(3)
    gate.replace_input_with(2, bias)


def _scaled(gate: ir.Node) -> None:
    gate.attributes["alpha"] = ir.AttrFloat32("alpha", 2.0)


@pytest.mark.parametrize("change", [_other_rows, _biased, _scaled])
def test_other_gates_stay(change: Any) -> None:
    model = ir.load(models.fixtures.get("qwen2_moe_block_dynamo_fp32").path)
    (gate,) = (n for n in model.graph if n.op_type == "Gemm" and n.outputs[0].shape and n.outputs[0].shape[-1] == 1)
    change(gate)
    rewrite(model, rules=OPT_IN)
    assert counts(model)["FusedRouter"] == 1
    assert counts(model)["SharedGateRouter"] == 0

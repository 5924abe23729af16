"""The same routers on every form of graph: linear layers, ranks, fixed and free dimensions, axes, router outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from ort_moe.rewrites import Site, rewrite
from tests.rewrites.blocks import cpu_session

HIDDEN, EXPERTS, K, BATCH, SEQUENCE = 4, 8, 2, 3, 5

LINEAR: Mapping[str, str] = {
    "MatMul": "logits = MatMul (x, gate)",
    "MatMul of a Transpose": "turned = Transpose <perm = [1, 0]> (gate_t)\n logits = MatMul (x, turned)",
    "MatMul and Add": "product = MatMul (x, gate)\n logits = Add (product, linear_bias)",
    "Add and MatMul": "product = MatMul (x, gate)\n logits = Add (linear_bias, product)",
    "Gemm": "rows = Reshape (x, by_hidden)\n logits = Gemm <transB = 1> (rows, gate_t)",
    "Gemm with bias": "rows = Reshape (x, by_hidden)\n logits = Gemm <transB = 1> (rows, gate_t, linear_bias)",
    "Gemm, then back": """rows = Reshape (x, by_hidden)
        flat = Gemm <transB = 1> (rows, gate_t)
        logits = Reshape (flat, like_x)""",
    "Einsum": 'logits = Einsum <equation = "...h,eh->...e"> (x, gate_t)',
}

ROUTERS: Mapping[str, str] = {
    "softmax, top-k, renormalised": """
        scores = Softmax <axis = AXIS> (logits)
        raw, ids = TopK <axis = AXIS, sorted = SORTED> (scores, k)
        total = ReduceSum <keepdims = 1> (raw, axis)
        weights = Div (raw, total)""",
    "top-k, softmax": """
        raw, ids = TopK <axis = AXIS, sorted = SORTED> (logits, k)
        weights = Softmax <axis = AXIS> (raw)""",
    "sigmoid, bias, top-k": """
        scores = Sigmoid (logits)
        keys = Add (scores, bias)
        biased, ids = TopK <axis = AXIS, sorted = SORTED> (keys, k)
        raw = GatherElements <axis = AXIS> (scores, ids)
        weights = Mul (raw, scale)""",
    "sigmoid, groups, top-k": """
        scores = Sigmoid (logits)
        keys = Add (scores, bias)
        grouped = Reshape (keys, by_group)
        best, unused_1 = TopK (grouped, two)
        group_scores = ReduceSum <keepdims = 0> (best, last)
        unused_2, kept = TopK <sorted = 0> (group_scores, two)
        full = Shape (group_scores)
        none = ConstantOfShape <value = float[1] {0}> (full)
        few = Shape (kept)
        ones = ConstantOfShape <value = float[1] {1}> (few)
        groups = ScatterElements <axis = -1> (none, kept, ones)
        bits = Unsqueeze (groups, last)
        repeated = Expand (bits, spread)
        mask = Reshape (repeated, flat_keys)
        keep = Cast <to = 9> (mask)
        masked = Where (keep, keys, minus_infinity)
        unused_3, ids = TopK <axis = AXIS, sorted = SORTED> (masked, k)
        raw = GatherElements <axis = AXIS> (scores, ids)
        total = ReduceSum <keepdims = 1> (raw, axis)
        weights = Div (raw, total)""",
}


def model_of(
    linear: str,
    router: str,
    *,
    rank: int = 3,
    static: bool = False,
    axis: int = -1,
    sorted_: int = 1,
    output: tuple[str, int] | None = None,
) -> ir.Model:
    """x (B, S, H) or (T, H) -> experts' y, mixed by the router; and a value with its last dimension as an output."""
    flat = rank == 2 or "Gemm <transB" in LINEAR[linear].replace("flat = Gemm", "")
    last = 1 if flat else 2
    dims = "3, 5" if static and rank == 3 else "15" if static else "B, S" if rank == 3 else "N"
    rows = "rows_of_x = Reshape (x, by_hidden)" if flat else "rows_of_x = Identity (x)"
    tokens = "t" if flat else "bs"
    rows_of = "N, " if flat else "B, S, "
    also = "" if output is None else f", float[{rows_of}{output[1]}] {output[0]}"
    text = f"""<ir_version: 10, opset_import: ["" : 20]>
        block (float[{dims}, {HIDDEN}] x) => (float[{rows_of}{HIDDEN}] y{also}) {{
            {LINEAR[linear]}
            {ROUTERS[router].replace("AXIS", str(last if axis > 0 else -1)).replace("SORTED", str(sorted_))}
            {rows}
            chosen = Gather (experts, ids)
            y = Einsum <equation = "{tokens}h,{tokens}khi,{tokens}k->{tokens}i"> (rows_of_x, chosen, weights)
        }}"""
    proto = onnx.parser.parse_model(text)
    lead = [-1] if flat else [0, 0]
    rng = np.random.default_rng(4)
    gate = rng.standard_normal((HIDDEN, EXPERTS)).astype(np.float32)
    arrays = {
        "gate": gate,
        "gate_t": np.ascontiguousarray(gate.T),
        "experts": rng.standard_normal((EXPERTS, HIDDEN, HIDDEN)).astype(np.float32),
        "linear_bias": rng.standard_normal(EXPERTS).astype(np.float32),
        "bias": np.linspace(0, 0.5, EXPERTS, dtype=np.float32),
        "scale": np.array(2.5, np.float32),
        "minus_infinity": np.array(-np.inf, np.float32),
        "by_hidden": np.array([-1, HIDDEN]),
        "like_x": np.array([-1, EXPERTS] if rank == 2 else [BATCH, -1, EXPERTS]),
        "by_group": np.array([*lead, 4, EXPERTS // 4]),
        "spread": np.array([*[1] * len(lead), 1, EXPERTS // 4]),
        "flat_keys": np.array([*lead, EXPERTS]),
        "k": np.array([K]),
        "two": np.array([2]),
        "last": np.array([-1]),
        "axis": np.array([last if axis > 0 else -1]),
    }
    used = {name for node in proto.graph.node for name in node.input}
    proto.graph.initializer.extend(
        numpy_helper.from_array(array, name) for name, array in arrays.items() if name in used
    )
    for number, node in enumerate(proto.graph.node):
        node.name = f"{node.op_type.lower()}_{number}"
    return ir.from_proto(proto)


def run(model: ir.Model, rank: int, *, with_library: bool = False) -> dict[str, Any]:
    proto = ir.to_proto(model)
    present = {value.name for value in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in ("ids",) if name not in present)
    session = cpu_session(proto, with_library=with_library)
    shape = (BATCH, SEQUENCE, HIDDEN) if rank == 3 else (BATCH * SEQUENCE, HIDDEN)
    x = np.random.default_rng(6).standard_normal(shape).astype(np.float32)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, {"x": x}), strict=True))


def rewritten(rank: int, **form: Any) -> Site:
    """Rewrite a block, and see that it computes what it did."""
    original, model = model_of(rank=rank, **form), model_of(rank=rank, **form)
    site = rewrite(model).sites[-1]
    was = run(original, rank)
    for with_library in (False, True):
        for name, array in run(model, rank, with_library=with_library).items():
            if name == "ids":
                np.testing.assert_array_equal(np.sort(array, -1), np.sort(was[name], -1))
            else:
                np.testing.assert_allclose(array, was[name], rtol=0, atol=1e-5 * np.abs(was[name]).max(), err_msg=name)
    assert not rewrite(model).modified
    return site


@pytest.mark.parametrize("static", [False, True], ids=["free", "fixed"])
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("linear", LINEAR)
def test_linear_layers(linear: str, rank: int, static: bool) -> None:
    for router in ("softmax, top-k, renormalised", "sigmoid, bias, top-k"):
        site = rewritten(rank, linear=linear, router=router, static=static)
        assert (site.status, site.experts, site.k) == ("whole", EXPERTS, K), site.findings


@pytest.mark.parametrize("sorted_", [0, 1])
@pytest.mark.parametrize("axis", [-1, 1], ids=["axis from the end", "axis from the start"])
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("router", ROUTERS)
def test_axes_and_ranks(router: str, rank: int, axis: int, sorted_: int) -> None:
    reference = rewritten(2, linear="Gemm", router=router)
    site = rewritten(rank, linear="MatMul", router=router, axis=axis, sorted_=sorted_)
    assert site.status == "whole", site.findings
    assert site.attributes == reference.attributes


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("linear", ["MatMul", "Gemm with bias"])
def test_router_logits_as_an_output(linear: str, router: str) -> None:
    site = rewritten(3, linear=linear, router=router, output=("logits", EXPERTS))
    assert site.status == "whole", site.findings


@pytest.mark.parametrize("router", ["softmax, top-k, renormalised", "sigmoid, bias, top-k"])
def test_router_scores_as_an_output(router: str) -> None:
    """Scores over all experts are computed once more; what is chosen of them is fused all the same."""
    site = rewritten(3, linear="MatMul", router=router, output=("scores", EXPERTS))
    assert site.status == "whole", site.findings


def test_weights_before_the_division_as_an_output() -> None:
    site = rewritten(2, linear="MatMul", router="softmax, top-k, renormalised", output=("raw", K))
    assert (site.status, site.absorbed) == ("partly", ("softmax",))
    assert [finding.reason.slug for finding in site.findings] == ["read-by-others"]

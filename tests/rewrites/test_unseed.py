"""A FusedRouter that did not grow becomes the TopK that it was."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import assert_same, block


def shape_of(model: ir.Model) -> list[tuple[str, str | None, dict[str, object], list[str | None]]]:
    """Operators, names, attributes and output names."""
    return [
        (node.op_type, node.name, {n: a.value for n, a in node.attributes.items()}, [o.name for o in node.outputs])
        for node in model.graph
    ]


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("attributes", ["", "<axis = 1, sorted = 0>", "<axis = -1, largest = 1, sorted = 1>"])
def test_topk_comes_back_as_it_was(attributes: str, dtype: str) -> None:
    original = block(f"weights, ids = TopK {attributes} (logits, k)", dtype=dtype)
    model = block(f"weights, ids = TopK {attributes} (logits, k)", dtype=dtype)
    result = rewrite(model)
    assert shape_of(model) == shape_of(original)
    assert not result.modified
    assert "ort_moe" not in model.graph.opset_imports
    assert not model.functions
    (site,) = result.sites
    assert (site.status, site.experts, site.k, site.attributes) == ("left", 8, 2, None)
    assert site.findings[0].reason.slug == "router-did-not-grow"
    assert_same(original, model)


def test_values_read_in_float32_come_back() -> None:
    router = "raw, ids = TopK (logits, k)\n wide = Cast <to = 1> (raw)\n e = Exp (wide)\n weights = Cast <to = 10> (e)"
    original, model = block(router, dtype="float16"), block(router, dtype="float16")
    result = rewrite(model)
    (site,) = result.sites
    assert site.status == "left"
    assert "Exp 'exp_3' still works on the weights" in site.findings[1].detail
    assert_same(original, model)
    assert not rewrite(model).modified


@pytest.mark.parametrize(("dtype", "number"), [("float16", 10), ("bfloat16", 16)])
def test_the_cast_before_the_topk_comes_back(dtype: str, number: int) -> None:
    """Not every TopK takes every type: in operator set 20 there is none for bfloat16."""
    router = "wide = Cast <to = 1> (logits)\n raw, ids = TopK (wide, k)\n e = Exp (raw)"
    model = block(f"{router}\n weights = Cast <to = {number}> (e)", dtype=dtype)
    assert not rewrite(model).modified
    (topk,) = (node for node in model.graph if node.op_type == "TopK")
    assert topk.inputs[0] is not None
    assert topk.inputs[0].dtype == topk.outputs[0].dtype == ir.DataType.FLOAT
    onnx.checker.check_model(ir.to_proto(model), full_check=True)

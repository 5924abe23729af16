"""One form for every graph, with a complaint where shape inference fails."""

from __future__ import annotations

import logging

import onnx
import onnx_ir as ir
import pytest

from ort_moe.rewrites import rewrite
from ort_moe.rewrites.canonicalize import canonicalize
from tests.rewrites.blocks import block

HEAD = '<ir_version: 10, opset_import: ["" : 20]>'


def parse(text: str) -> ir.Model:
    return ir.from_proto(onnx.parser.parse_model(HEAD + text))


def test_constants_become_initializers_and_repeats_go() -> None:
    model = parse(
        """g (float[T, 4] x) => (float[T, 4] y) {
            c = Constant <value_float = 2.0> ()
            a = Mul (x, c)
            same = Identity (x)
            b = Mul (same, c)
            unused = Neg (x)
            y = Add (a, b)
        }"""
    )
    modified, complaint = canonicalize(model)
    assert (modified, complaint) == (True, None)
    assert [node.op_type for node in model.graph] == ["Mul", "Add"]
    assert list(model.graph.initializers) == ["c"]
    assert model.graph[0].outputs[0].shape == ir.Shape(["T", 4])
    assert canonicalize(model) == (False, None)


def test_complaint_of_shape_inference(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no type for\n  'logits'")

    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", fail)
    with caplog.at_level(logging.WARNING):
        result = rewrite(block("weights, ids = TopK (logits, k)"))
    (finding,) = result.findings
    assert (finding.reason.slug, finding.detail) == ("shape-inference-failed", "no type for 'logits'")
    assert not [record for record in caplog.records if record.exc_info]

"""One form for every graph, with a complaint where shape inference fails."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from ort_moe.rewrites import rewrite
from ort_moe.rewrites.canonicalize import canonicalize
from tests.rewrites.blocks import assert_fuses, block

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


def test_branches_keep_the_identities_that_make_their_outputs() -> None:
    model = parse(
        """g (float[T, 4] x, bool b) => (float[T, 4] y) {
            outer = Neg (x)
            y = If (b) <
                then_branch = same () => (float[T, 4] v) { v = Identity (outer) },
                else_branch = other () => (float[T, 4] w) { w = Abs (outer) }
            >
        }"""
    )
    canonicalize(model)
    x = np.ones((2, 4), np.float32)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {"x": x, "b": np.array(True)})[0], -x)


def test_outputs_of_one_value_keep_their_names() -> None:
    model = parse("g (float[T, 4] x) => (float[T, 4] y, float[T, 4] z) { y = Neg (x)\n z = Identity (y) }")
    assert canonicalize(model) == (False, None)
    assert [output.name for output in model.graph.outputs] == ["y", "z"]


def test_shape_arithmetic_is_folded() -> None:
    model = parse(
        """g (float[T, 4, 1] x) => (float[T, 4, 2] y) {
            wanted = Constant <value_ints = [-1, 4, 2]> ()
            three = Constant <value_ints = [3]> ()
            ones = ConstantOfShape <value = int64[1] {1}> (three)
            minus = Constant <value_int = -1> ()
            negative = Mul (ones, minus)
            free = Equal (wanted, negative)
            shape = Where (free, ones, wanted)
            wide = Expand (x, shape)
            y = Neg (wide)
        }"""
    )
    canonicalize(model)
    assert [node.op_type for node in model.graph] == ["Expand", "Neg"]
    assert model.graph[0].outputs[0].shape == ir.Shape(["T", 4, 2])
    (shape,) = model.graph.initializers.values()
    assert shape.const_value is not None
    assert shape.const_value.numpy().tolist() == [1, 4, 2]


def test_arithmetic_of_numbers_is_folded() -> None:
    text = """
        scores = Softmax <axis = -1> (logits)
        raw, ids = TopK (scores, k)
        total = ReduceSum <keepdims = 1> (raw, minus1)
        minus = Neg (eps)
        limited = Sub (total, minus)
        quotient = Div (raw, limited)
        inverse = Div (unit, scale)
        factor = Reciprocal (inverse)
        weights = Mul (quotient, factor)"""
    build = partial(block, text, {"eps": 0.125, "unit": 1.0, "scale": 2.5})
    expected = {"normalize": 1, "normalize_eps": 0.125, "scale": 2.5}
    assert_fuses(build, expected, absorbed=("softmax", "normalize", "scale"))


def test_casts_by_example_are_spelt_as_casts() -> None:
    model = parse(
        """g (float16[T, 4] x) => (float16[T, 4] y) {
            one = Constant <value_float = 2.0> ()
            like = CastLike (one, x)
            y = Div (x, like)
        }"""
    )
    assert canonicalize(model) == (True, None)
    cast = model.graph[0]
    assert (cast.op_type, len(cast.inputs), cast.outputs[0].dtype) == ("Cast", 1, ir.DataType.FLOAT16)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)

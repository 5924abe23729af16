"""Random inputs make sense of names, types and consumers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from ort_moe.errors import ModelError
from ort_moe.verification.sample_inputs import (
    SHAPES,
    Shape,
    beyond_cache,
    cache_length,
    draw,
    fixed_tokens,
    has_dynamic_tokens,
    told_apart,
    usual_shapes,
)

I64, F16, F32, BOOL = TensorProto.INT64, TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.BOOL


def _model(*inputs: tuple[str, int, list[int | str | None]], nodes: list[object] | None = None) -> ir.Model:
    graph = helper.make_graph(
        nodes or [helper.make_node("Identity", [inputs[0][0]], ["y"])],
        "g",
        [helper.make_tensor_value_info(*given) for given in inputs],
        [helper.make_tensor_value_info("y", inputs[0][1], None)],
        [numpy_helper.from_array(np.zeros((11, 4), np.float32), "table")],
    )
    return ir.from_proto(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 18)]))


def _draw(model: ir.Model, batch: int = 2, tokens: int = 5, past: int = 0) -> dict[str, np.ndarray]:
    return draw(model, Shape(batch, tokens, past), np.random.default_rng(0))


def _attention(op_type: str = "GroupQueryAttention", packed: bool = False, **attributes: int) -> ir.Model:
    """Attention over a past, in the manner of onnxruntime-genai's builder: 4 heads of 16, and 2 of the past."""
    of_past = attributes.get("kv_num_heads", 4)
    state = ["batch_size", of_past, "past_sequence_length", "kv_cache_dim"]
    query = (4 + 2 * of_past) * 16 if packed else 64
    states = [("past.key", F32, state), ("past.value", F32, state)]
    first = 3 if op_type == "GroupQueryAttention" else 6
    reads = ["q", "", "", *[""] * (first - 3), "past.key", "past.value"]
    others = [("attention_mask", I64, ["batch_size", "total_sequence_length"])]
    others += [("position_ids", I64, ["batch_size", "sequence_length"]), ("sequence_length", I64, [])]
    if not packed:
        others += [("k", F32, ["batch_size", "sequence_length", of_past * 16])]
        reads[1:3] = ["k", "k"]
    node = helper.make_node(op_type, reads, ["y"], domain="com.microsoft", num_heads=4, **attributes)
    return _model(("q", F32, ["batch_size", "sequence_length", query]), *states, *others, nodes=[node])


def test_language_model() -> None:
    drawn = _draw(
        _model(
            ("input_ids", I64, ["batch_size", "sequence_length"]),
            ("attention_mask", I64, ["batch_size", "total_sequence_length"]),
            ("position_ids", I64, ["batch_size", "sequence_length"]),
            ("past_key_values.0.key", F16, ["batch_size", 2, "past_sequence_length", 8]),
            ("float_mask", F32, ["batch_size", 1, "sequence_length", "past_sequence_length + sequence_length"]),
            ("flag", BOOL, []),
        )
    )
    assert {name: array.shape for name, array in drawn.items()} == {
        "input_ids": (2, 5),
        "attention_mask": (2, 5),
        "position_ids": (2, 5),
        "past_key_values.0.key": (2, 2, 0, 8),
        "float_mask": (2, 1, 5, 5),
        "flag": (),
    }
    assert (drawn["attention_mask"] == 1).all()
    assert drawn["position_ids"][1].tolist() == [0, 1, 2, 3, 4]
    assert drawn["past_key_values.0.key"].dtype == np.float16
    assert not drawn["float_mask"].any()


@pytest.mark.parametrize(
    ("op_type", "packed", "attributes", "head"),
    [
        ("GroupQueryAttention", False, {"kv_num_heads": 2}, 16),
        ("GroupQueryAttention", True, {"kv_num_heads": 2}, 16),
        ("GroupQueryAttention", True, {"kv_num_heads": 2, "kv_cache_bit_width": 4}, 8),
        ("MultiHeadAttention", False, {}, 16),
    ],
)
def test_past(op_type: str, packed: bool, attributes: dict[str, int], head: int) -> None:
    drawn = _draw(_attention(op_type, packed, **attributes), 2, 3, 7)
    assert drawn["past.key"].shape == (2, attributes.get("kv_num_heads", 4), 7, head)
    assert drawn["attention_mask"].shape == (2, 10)
    assert drawn["position_ids"][1].tolist() == [7, 8, 9]
    assert drawn["sequence_length"] == 10


def test_past_in_a_window() -> None:
    model = _attention(packed=True, kv_num_heads=2, local_window_size=12, sliding_window_cache=1)
    assert _draw(model, 1, 3, 20)["past.key"].shape == (1, 2, 12, 16)
    assert usual_shapes(model) == (Shape(1, 1, 12), Shape(1, 3, 12), Shape(1, 64, 12))


def test_usual_shapes() -> None:
    assert usual_shapes(_model(("x", F32, ["tokens", 16]))) == SHAPES
    assert usual_shapes(_attention(kv_num_heads=2, local_window_size=12)) == (*SHAPES, Shape(1, 1, 8))


def _cached(tokens: int | str, length: int, *, grows: bool = False) -> ir.Model:
    """A step over a cache of fixed length, as `export` makes them."""
    state = [1, 2, length, 4]
    model = _model(
        ("input_ids", I64, [1, tokens]),
        ("position_ids", I64, [1, tokens]),
        ("past_length", I64, [1, 1]),
        ("past_key_values.0.key", F32, state),
    )
    after = ir.Shape([1, 2, length + grows, 4])
    present = ir.Value(name="present.0.key", type=ir.TensorType(ir.DataType.FLOAT), shape=after)
    model.graph.append(ir.Node("", "Identity", [model.graph.inputs[3]], outputs=[present]))
    model.graph.outputs.append(present)
    return model


def test_positions_stay_within_a_cache_of_fixed_length() -> None:
    decode, prefill = _cached(1, 20), _cached("sequence", 20)
    assert cache_length(decode) == cache_length(prefill) == 20
    assert usual_shapes(decode) == (Shape(1, 1), Shape(1, 1, 10), Shape(1, 1, 19))
    lengths = [(1, 0), (3, 10), (20, 0), (1, 19)]
    assert [(shape.tokens, shape.past) for shape in usual_shapes(prefill)] == lengths
    for model in (decode, prefill):
        for shape in usual_shapes(model):
            drawn = _draw(model, shape.batch, shape.tokens, shape.past)
            assert drawn["position_ids"].tolist() == [list(range(shape.past, shape.past + shape.tokens))]
            assert drawn["past_length"] == shape.past
    assert usual_shapes(_cached(4, 20)) == (Shape(1, 4), Shape(1, 4, 10), Shape(1, 4, 16))
    assert usual_shapes(_cached(4, 4)) == (Shape(1, 4),)
    assert [fixed_tokens(model) for model in (decode, prefill, _cached(4, 4))] == [1, None, 4]


def test_what_a_cache_does_not_hold_is_refused() -> None:
    with pytest.raises(ModelError, match=r"^the cache holds 20 tokens, and 1 token behind 20 others would not fit$"):
        _draw(_cached(1, 20), 1, 1, 20)
    with pytest.raises(ModelError, match=r"^the cache holds 20 tokens, and 21 tokens would not fit$"):
        _draw(_cached("sequence", 20), 1, 21)
    assert beyond_cache(_cached(1, 20), Shape(1, 64, 19)) == ""  # it takes one token, whatever the shape says
    growing = _cached(1, 20, grows=True)
    assert cache_length(growing) == 0
    assert usual_shapes(growing) == (Shape(1, 1),)
    assert beyond_cache(growing, Shape(1, 1, 20)) == ""


def test_shapes_that_make_the_same_inputs_are_one() -> None:
    assert told_apart(_model(("x", F32, [4, 16])), SHAPES) == SHAPES[:1]
    assert told_apart(_model(("x", F32, ["tokens", 16])), [*SHAPES, *SHAPES]) == SHAPES
    assert told_apart(_model(("x", F32, ["batch", 16])), SHAPES) == SHAPES[:2]


def test_ids_stay_within_what_they_look_up() -> None:
    nodes = [
        helper.make_node("Reshape", ["ids", "shape"], ["flat"]),
        helper.make_node("Gather", ["table", "flat"], ["y"]),
    ]
    model = _model(("ids", I64, ["batch", "sequence"]), ("shape", I64, [1]), nodes=nodes)
    ids = _draw(model, 4, 100)["ids"]
    assert ids.min() >= 0
    assert ids.max() == 10


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        (["s0", "s1", 16], (2, 5, 16)),  # without telling names the outer is the batch
        ([None, None, 16], (2, 5, 16)),
        (["tokens", 16], (5, 16)),
        (["n", 16], (5, 16)),
        (["batch", "s1", 16], (2, 5, 16)),
        ([3, 16], (3, 16)),
    ],
)
def test_hidden_states(dims: list[int | str | None], expected: tuple[int, ...]) -> None:
    hidden = _draw(_model(("hidden_states", F32, dims)))["hidden_states"]
    assert hidden.shape == expected
    assert hidden.std() > 0.5


def test_dynamic_tokens() -> None:
    assert has_dynamic_tokens(_model(("x", F32, ["tokens", 16])))
    assert not has_dynamic_tokens(_model(("x", F32, [4, 16])))


@pytest.mark.parametrize("tokens", [10**14, 10**20])
def test_what_memory_does_not_hold_is_refused(tokens: int) -> None:
    for name, element in (("x", F32), ("input_ids", I64), ("mask", I64), ("position_ids", I64)):
        with pytest.raises(ModelError, match=f"^inputs of 1 x {tokens} tokens do not fit into memory$"):
            _draw(_model((name, element, ["tokens", 16])), 1, tokens)


def test_refuses_strings() -> None:
    with pytest.raises(ModelError, match="input 'text' has type STRING: random inputs cannot be made for it"):
        _draw(_model(("text", TensorProto.STRING, [1])))


@pytest.mark.parametrize("axis", [5, -6, 1.0, "last"])
def test_an_axis_that_no_runtime_takes(axis: Any) -> None:
    """The runtime says what is wrong with the model; inputs are made all the same."""
    nodes = [helper.make_node("Gather", ["table", "ids"], ["y"], axis=axis)]
    assert _draw(_model(("ids", I64, ["tokens"]), nodes=nodes))["ids"].max() <= 10


@pytest.mark.parametrize("heads", [{"num_heads": 2.0, "kv_num_heads": 1.0}, {"num_heads": 2, "kv_num_heads": -1}])
def test_heads_that_no_runtime_takes(heads: dict[str, Any]) -> None:
    names = ["query", "", "", "past_key", "past_value"]
    attention = helper.make_node("GroupQueryAttention", names, ["y"], domain="com.microsoft", **heads)
    past = ("past_key", F32, ["batch", "heads", "past", "head"])
    feeds = _draw(_model(("query", F32, ["batch", "tokens", 16]), past, nodes=[attention]))
    assert feeds["past_key"].ndim == 4

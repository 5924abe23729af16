"""Random inputs make sense of names, types and consumers."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from ort_moe.errors import ModelError
from ort_moe.verification.sample_inputs import Shape, draw, has_dynamic_tokens

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


def _draw(model: ir.Model, batch: int = 2, tokens: int = 5) -> dict[str, np.ndarray]:
    return draw(model, Shape(batch, tokens), np.random.default_rng(0))


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


def test_refuses_strings() -> None:
    with pytest.raises(ModelError, match="input 'text' has type STRING: random inputs cannot be made for it"):
        _draw(_model(("text", TensorProto.STRING, [1])))

"""Decode loops on the CPU: plain runs' results, state, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import ort_moe
from ort_moe import DecodeError, DecodeLoop
from tests.decode_models import STATE, Array, decode_model, empty_state, plain_step, step_inputs
from tests.op_models import assert_same_bits, ort_value

CACHE = "past_key_values.0.key"


def cpu_session(model: onnx.ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort_moe.session(model.SerializeToString(), ["CPUExecutionProvider"], options=options)


@pytest.fixture(scope="module")
def decoder() -> onnxruntime.InferenceSession:
    return cpu_session(decode_model())


def assert_same(got: Mapping[str, Array], expected: Mapping[str, Array]) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        assert_same_bits(got[name], expected[name])


def small(text: str) -> onnx.ModelProto:
    """A model of a graph in text."""
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": 20]> {text}')


# --- Steps ---


def test_steps_are_plain_runs(decoder: onnxruntime.InferenceSession) -> None:
    """As many as the cache holds."""
    loop, state = DecodeLoop(decoder), empty_state()
    assert not loop.captures
    for step in range(256):
        assert_same(loop.step(**step_inputs(step)), plain_step(decoder, step_inputs(step), state))
    assert_same(loop.read_state(), {name: state[name] for name in loop.state})
    assert (state["past_length"] == 256).all()


def test_results_are_the_callers(decoder: onnxruntime.InferenceSession) -> None:
    loop = DecodeLoop(decoder)
    first = loop.step(**step_inputs(0))
    logits = first["logits"].copy()
    assert not np.array_equal(loop.step(**step_inputs(1))["logits"], logits)
    assert_same_bits(first["logits"], logits)


def test_outputs_on_the_device(decoder: onnxruntime.InferenceSession) -> None:
    expected = DecodeLoop(decoder).step(**step_inputs(0))
    loop = DecodeLoop(decoder, on_device=["logits"])
    got = loop.step(**step_inputs(0))
    assert_same_bits(got["chosen"], expected["chosen"])
    assert_same_bits(got["logits"].numpy(), expected["logits"])
    loop.step(**step_inputs(1))
    assert not np.array_equal(got["logits"].numpy(), expected["logits"])  # the loop's own buffer
    assert all(
        isinstance(v, onnxruntime.OrtValue) for v in DecodeLoop(decoder, on_device=True).step(**step_inputs(0)).values()
    )


def test_inputs_that_are_no_arrays(decoder: onnxruntime.InferenceSession) -> None:
    inputs = step_inputs(0)
    expected = DecodeLoop(decoder).step(**inputs)
    given: dict[str, Any] = {
        "input_ids": inputs["input_ids"].tolist(),
        "nudge": onnxruntime.OrtValue.ortvalue_from_numpy(inputs["nudge"]),
    }
    assert_same(DecodeLoop(decoder).step(**given), expected)
    given = {"input_ids": inputs["input_ids"].astype(">i8"), "nudge": np.asfortranarray(inputs["nudge"])}
    assert_same(DecodeLoop(decoder).step(**given), expected)


@pytest.mark.parametrize(
    ("element", "dtype"),
    [("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16), ("bool", np.bool_), ("int8", np.int8)],
)
def test_types(element: str, dtype: Any) -> None:
    """Those that NumPy has, and one that it has not."""
    loop = DecodeLoop(
        cpu_session(
            small(
                f"g ({element}[2, 3] x, {element}[2, 3] past_x) => ({element}[2, 3] present_x, {element}[2, 3] y) "
                "{ present_x = Identity (x) y = Identity (past_x) }"
            )
        )
    )
    x = np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype)
    assert_same_bits(loop.step(x=x)["y"], np.zeros((2, 3), dtype))
    assert_same_bits(loop.step(x=x)["y"], x)
    assert_same_bits(loop.read_state()["past_x"], x)
    value = ort_value(np.logical_not(x).astype(dtype))
    loop.step(x=value)
    assert_same_bits(loop.step(x=x)["y"], np.logical_not(x).astype(dtype))
    with pytest.raises(DecodeError, match=r"'x' must have type .*, but has tensor\(uint32\)"):
        loop.step(x=ort_value(x.astype(np.uint32)))


def test_a_loops_values_are_anothers_inputs() -> None:
    """Types that NumPy lacks, too."""
    text = "g (bfloat16[3] x) => (bfloat16[3] y) { y = Identity (x) }"
    one, two = (DecodeLoop(cpu_session(small(text)), on_device=on_device) for on_device in (True, False))
    x = np.array([1, -2, 0.5], ml_dtypes.bfloat16)
    value = one.step(x=x)["y"]
    assert value.data_type() == "tensor(uint16)"
    assert_same_bits(two.step(x=value)["y"], x)


def test_empty_and_scalar_values() -> None:
    text = (
        "g (float[0, 2] x, float past) => (float[0, 2] y, float present) <float one = {1}> "
        "{ y = Neg (x) present = Add (past, one) }"
    )
    loop = DecodeLoop(cpu_session(small(text)))
    for _ in range(2):
        assert loop.step(x=np.zeros((0, 2), np.float32))["y"].shape == (0, 2)
    assert loop.read_state()["past"] == 2.0


# --- State ---


def test_state_is_found_by_name(decoder: onnxruntime.InferenceSession) -> None:
    assert DecodeLoop(decoder).state == STATE
    assert DecodeLoop(decoder, state={}).state == {}


def test_a_loop_without_state_is_fed_everything(decoder: onnxruntime.InferenceSession) -> None:
    loop, state = DecodeLoop(decoder, state={}), empty_state()
    expected = plain_step(decoder, step_inputs(0), dict(state))
    got = loop.step(**step_inputs(0), **state)
    assert_same({name: got[name] for name in expected}, expected)
    assert {*got} == {*expected, *STATE.values()}


def test_an_output_that_is_the_next_input() -> None:
    """State need not be called past."""
    loop = DecodeLoop(
        cpu_session(small("g (int64[1] x) => (int64[1] y) <int64 two = {2}> { y = Mul (x, two) }")), state={"x": "y"}
    )
    loop.write_state({"x": [3]})
    for _ in range(4):
        assert loop.step() == {}
    assert loop.read_state() == {"x": [48]}


def test_reset_and_going_on(decoder: onnxruntime.InferenceSession) -> None:
    """A state that was read goes on in another loop, and after a reset all is as it was."""
    loop = DecodeLoop(decoder)
    first = [loop.step(**step_inputs(step)) for step in range(3)]
    kept = loop.read_state()
    last = loop.step(**step_inputs(3))
    other = DecodeLoop(decoder)
    other.write_state(kept)
    assert_same(other.step(**step_inputs(3)), last)
    loop.reset()
    assert not any(value.any() for value in loop.read_state().values())
    for step, expected in enumerate(first):
        assert_same(loop.step(**step_inputs(step)), expected)
    only = loop.read_state("past_length")
    assert [*only] == ["past_length"]
    assert (only["past_length"] == 3).all()


def test_state_from_values_of_onnxruntime(decoder: onnxruntime.InferenceSession) -> None:
    loop, other = DecodeLoop(decoder), DecodeLoop(decoder)
    loop.step(**step_inputs(0))
    kept = loop.read_state()
    other.write_state({name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in kept.items()})
    kept["past_mean"][:] = 0  # what was written is a copy
    assert_same(other.step(**step_inputs(1)), loop.step(**step_inputs(1)))


def test_state_that_is_read_late_is_copied(decoder: onnxruntime.InferenceSession) -> None:
    loop = DecodeLoop(decoder)
    assert [*loop.copied_state] == ["past_length"]
    assert (
        loop.copied_state["past_length"] == "Reshape 'place' may read 'past_length' after 'present_length' is written"
    )


# --- Refusals ---


def refusal(session: Any, **arguments: Any) -> str:
    with pytest.raises(DecodeError) as caught:
        DecodeLoop(session, **arguments)
    return str(caught.value)


def test_sizes_that_are_not_fixed() -> None:
    told = refusal(cpu_session(decode_model(batch="sequences")))
    assert told.startswith(
        "input 'input_ids' has no fixed size in dimension 0 (sequences): export it with a fixed size"
    )
    assert "add_free_dimension_override_by_name" in told
    nonzero = "g (float[2] x) => (int64[1, n] y) { y = NonZero (x) }"
    assert refusal(cpu_session(small(nonzero))).startswith("output 'y' has no fixed size in dimension 1")


def test_sizes_fixed_for_the_session() -> None:
    options = onnxruntime.SessionOptions()
    options.add_free_dimension_override_by_name("n", 3)
    text = "g (float[n] x) => (float[n] y) { y = Neg (x) }"
    session = ort_moe.session(small(text).SerializeToString(), ["CPUExecutionProvider"], options=options)
    assert_same_bits(DecodeLoop(session).step(x=np.ones(3, np.float32))["y"], -np.ones(3, np.float32))


def test_elements_without_bytes() -> None:
    told = refusal(cpu_session(small("g (string[2] x) => (string[2] y) { y = Identity (x) }")))
    assert told == "input 'x' is a tensor(string), for which there are no fixed buffers"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"input_ids": None}, "input 'input_ids' is missing: a step takes 'input_ids', 'nudge'"),
        ({"ids": 1}, "there is no input 'ids': a step takes 'input_ids', 'nudge'"),
        ({CACHE: 1}, f"'{CACHE}' is state, which a step carries on by itself: set it with write_state"),
        ({"nudge": np.zeros((2, 16), np.float32)}, "'nudge' must have shape [2, 1, 16], but has [2, 16]"),
        ({"nudge": np.zeros((2, 1, 16))}, "'nudge' must have type float32, but has float64"),
        ({"input_ids": np.zeros((2, 1), np.int32)}, "'input_ids' must have type int64, but has int32"),
        (
            {"nudge": onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((2, 1, 16)))},
            "'nudge' must have type float32, but has tensor(double)",
        ),
    ],
)
def test_inputs_that_do_not_fit(decoder: onnxruntime.InferenceSession, changed: dict[str, Any], message: str) -> None:
    """Nothing has run, and the loop goes on."""
    loop, untouched = DecodeLoop(decoder), DecodeLoop(decoder)
    inputs = {name: value for name, value in {**step_inputs(5), **changed}.items() if value is not None}
    with pytest.raises(DecodeError) as caught:
        loop.step(**inputs)
    assert str(caught.value) == message
    assert_same(loop.read_state(), untouched.read_state())
    assert_same(loop.step(**step_inputs(0)), untouched.step(**step_inputs(0)))


def test_state_that_was_not_found_is_told_of() -> None:
    loop = DecodeLoop(cpu_session(small("g (float[1] past_a) => (float[1] b) { b = Neg (past_a) }")))
    with pytest.raises(DecodeError, match=r"'past_a' is missing: .*; if it is state, name its output"):
        loop.step()


def test_state_that_does_not_fit(decoder: onnxruntime.InferenceSession) -> None:
    loop = DecodeLoop(decoder)
    with pytest.raises(DecodeError, match="there is no state 'nudge', only 'past_length'"):
        loop.read_state("nudge")
    before = loop.read_state()
    with pytest.raises(DecodeError, match=r"'past_mean' must have shape \[2, 1, 16\], but has \[1\]"):
        loop.write_state({"past_length": np.ones((2, 1), np.int64), "past_mean": np.ones(1, np.float32)})
    assert_same(loop.read_state(), before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"state": {"past": "present_mean"}}, "state 'past' is no input: the session has 'input_ids', 'nudge'"),
        (
            {"state": {"past_mean": "mean"}},
            "state 'past_mean' comes from 'mean', which is no output: there are 'logits'",
        ),
        (
            {"state": {"past_mean": "logits"}},
            r"shape \[2, 1, 16\], but 'logits' a tensor\(float\) of shape \[2, 1, 40\]",
        ),
        (
            {"state": {"nudge": "present_mean", "past_mean": "present_mean"}},
            "two inputs of the state come from the output",
        ),
        ({"on_device": ["present_mean"]}, "on_device names 'present_mean', but a step returns 'logits', 'chosen'"),
        ({"graph_id": 0}, "graph_id must be at least 1"),
    ],
)
def test_arguments_that_do_not_fit(
    decoder: onnxruntime.InferenceSession, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(DecodeError, match=message):
        DecodeLoop(decoder, **arguments)


def test_a_run_that_fails() -> None:
    """One token more than the cache holds."""
    loop = DecodeLoop(cpu_session(decode_model()))
    loop.write_state({"past_length": np.full((2, 1), 256)})
    with pytest.raises(DecodeError, match=r"ONNX Runtime cannot run the step: .*present_key.*out of data bounds"):
        loop.step(**step_inputs(0))
    loop.reset()
    assert np.isfinite(loop.step(**step_inputs(0))["logits"]).all()

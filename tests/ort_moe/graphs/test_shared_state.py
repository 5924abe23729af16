"""Which inputs and outputs belong together, and when they may lie in one buffer."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import parser

import ort_moe.graphs.shared_state
from ort_moe import DecodeLoop
from ort_moe.graphs.shared_state import cache_lengths, cannot_share, fixed_state, pairs_by_name
from tests.op_models import assert_same_bits

HEADER = '<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1, "mine": 1]>'
SIGNATURE = (
    "g (float[2, 3] past, float[2, 3] x, int64[2, 3] i, int64[3, 2] j, float[3, 2] w, bool[1] b)"
    " => (float[2, 3] present, float[2, 3] y)"
)


@pytest.mark.parametrize(
    ("past", "present"),
    [
        ("past_key_values.0.key", "present.0.key"),
        ("past_key_values.11.value", "present.11.value"),
        ("past_key_values.0.decoder.key", "present.0.decoder.key"),
        ("past_key_values.2.conv_state", "present.2.conv_state"),
        ("past_key_values_0", "present_key_values_0"),
        ("past_key_0", "present_key_0"),
        ("past_0", "present_0"),
        ("past", "present"),
    ],
)
def test_names_that_belong_together(past: str, present: str) -> None:
    assert pairs_by_name(["input_ids", past], ["logits", present]) == {past: present}


def test_names_that_do_not() -> None:
    assert pairs_by_name(["past.0", "x", "state"], ["present.1", "present", "state_out"]) == {}


def test_state_of_a_fixed_shape_is_carried_on() -> None:
    cache = "float[1, 2, 9, 4]"
    model = ir.from_proto(
        parser.parse_model(
            f"""<ir_version: 10, opset_import: ["": 20]>
            g ({cache} past_a, {cache} past_b, {cache} past_c, float[1, n] past_d, float[3] past_e, {cache} x) =>
              ({cache} present_a, float[1, 2, 10, 4] present_b, float16[1, 2, 9, 4] present_c, float[1, n] present_d,
               float[3] present_e) {{ y = Neg (x) }}"""
        )
    )
    assert fixed_state(model) == {"past_a": "present_a", "past_e": "present_e"}
    assert cache_lengths(model) == {"past_a": 9}


def refused(body: str) -> str | None:
    model = ir.from_proto(parser.parse_model(f"{HEADER} {SIGNATURE} {{ {body} }}"))
    for node in model.graph.all_nodes():
        node.name = node.outputs[0].name
    return cannot_share(model, "past", "present")


@pytest.mark.parametrize(
    "body",
    [
        "present = Add (past, x) y = Neg (x)",
        "old = Tanh (past) present = Sub (x, old) y = Neg (x)",
        "present = ScatterElements <axis = 1> (past, i, x) y = Neg (present)",
        "n = Neg (past) s = Softmax (n) present = Add (past, s) y = Neg (x)",
        "present = Identity (past) y = Neg (past)",
        "y = Neg (x) n = Add (past, x) present = Identity (n)",
        "y = Neg (x) v = Flatten (past) n = Add (v, x) present = Identity (n)",
        "t = Transpose (past) s = ScatterElements (t, j, w) present = Transpose (s) y = Neg (present)",
        "y = Neg (x) n = Neg (past) s = Softmax (n) present = Cast <to = 1> (s)",
        "y = Neg (past) c = Concat <axis = 0> (past, y) p, q = Split <num_outputs = 2> (c) present = Add (p, q)",
    ],
)
def test_one_buffer_will_do(body: str) -> None:
    assert refused(body) is None


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("present = Add (past, x) y = Neg (past)", "Neg 'y' may read 'past' after 'present' is written"),
        ("y = Neg (x) present = Softmax (past)", "Softmax 'present' does not compute 'present' in place"),
        ("y = Neg (x) present = ScatterElements (x, i, past)", "ScatterElements 'present' does not compute"),
        ("y = Neg (x) present = mine.Add (past, x)", "Add 'present' does not compute 'present' in place"),
        ("y = Identity (past) present = Add (past, x)", "Identity 'y' may read 'past' after"),
        *(
            (f"{old} present = Sub (x, old) m = Softmax (present) y = Sub (m, old)", "Sub 'y' may read 'past' after")
            for old in (
                "old = Cast <to = 1> (past)",
                "old = Dropout (past)",
                "old = Transpose <perm = [0, 1]> (past)",
                "old = Concat <axis = 0> (past)",
                "zero = Constant <value = float {0.0}> () old = Add (zero, past)",
                "once = Cast <to = 1> (past) old = Identity (once)",
            )
        ),
        ("y = Neg (x) s = Softmax (past) present = Cast <to = 1> (s)", "Softmax 's' does not compute 'present'"),
        (
            "v = Flatten (past) z = Neg (v) n = Exp (v) present = Add (n, x) y = Neg (z)",
            "Neg 'z' may read 'past' after",
        ),
        ("y = Neg (x) present = Max (x, y, past)", "Max 'present' does not compute 'present' in place"),
        (
            "y = If (b) <then_branch = t () => (float[2, 3] a) { a = Neg (past) }, "
            "else_branch = e () => (float[2, 3] c) { c = Neg (x) }> present = Add (past, x)",
            "If 'y' may read 'past' after 'present' is written",
        ),
    ],
)
def test_one_buffer_will_not_do(body: str, why: str) -> None:
    told = refused(body)
    assert told is not None
    assert told.startswith(why)


def test_a_functions_parts_run_when_they_will() -> None:
    text = f"""{HEADER} {SIGNATURE} {{ a, y = mine.both (past) present = Add (a, x) }}
        <opset_import: ["": 20], domain: "mine"> both (p) => (a, b) {{ a = Neg (p) b = Exp (p) }}"""
    assert "may read 'past' after" in str(cannot_share(ir.from_proto(parser.parse_model(text)), "past", "present"))


def test_what_control_flow_reads_comes_before_it() -> None:
    """A value of the outer graph that a branch reads."""
    assert (
        refused(
            "n = Neg (past) m = Softmax (n) present = If (b) <then_branch = t () => (float[2, 3] a) { a = Neg (m) }, "
            "else_branch = e () => (float[2, 3] c) { c = Neg (x) }> y = Neg (x)"
        )
        is None
    )


@pytest.mark.parametrize(
    "body",
    [
        "present = Add (past, x) z = Softmax (present) y = Add (z, past)",
        "old = Cast <to = 1> (past) present = Add (old, x) z = Softmax (present) y = Add (z, old)",
    ],
)
def test_copied_state_is_right_where_shared_would_not_be(body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late reader of the past: of one buffer it would take the new one."""
    text = f"g (float[1, 4] past, float[1, 4] x) => (float[1, 4] present, float[1, 4] y) {{ {body} }}"
    source = parser.parse_model(f"{HEADER} {text}").SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    x, state = np.arange(4, dtype=np.float32)[None], np.zeros((1, 4), np.float32)
    loop = DecodeLoop(session)
    assert [*loop.copied_state] == ["past"]
    for _ in range(3):
        state, y = session.run(None, {"past": state, "x": x})
        assert_same_bits(loop.step(x=x)["y"], y)
    monkeypatch.setattr(ort_moe.graphs.shared_state, "cannot_share", lambda *_: None)
    wrong = DecodeLoop(session)
    assert not np.array_equal(wrong.step(x=x)["y"], session.run(None, {"past": 0 * x, "x": x})[1])

"""The CPU kernel of FinalizeRouting returns the emulation's bits, and refuses what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ort_moe.reference.finalize_routing import finalize_routing
from tests.finalize_cases import FinalizeCase, finalize_cases
from tests.op_models import assert_same_bits, op_model, op_session, run_op, run_session


def check(case: FinalizeCase, *, symbolic: bool = False) -> None:
    got = run_op("FinalizeRouting", case.feeds, {}, symbolic=symbolic)["y"]
    assert_same_bits(got, finalize_routing(**case.feeds))


@settings(max_examples=200)
@given(finalize_cases(), st.booleans())
def test_every_call_has_the_emulations_bits(case: FinalizeCase, symbolic: bool) -> None:
    check(case, symbolic=symbolic)


@pytest.mark.parametrize("onnx_type", ["float", "float16", "bfloat16"])
@pytest.mark.parametrize("hidden", [1, 7, 255, 256, 257, 2560, 5120])
@pytest.mark.parametrize("leading", [(0,), (1,), (3, 2), (65,)])
def test_shapes(leading: tuple[int, ...], hidden: int, onnx_type: str) -> None:
    check(FinalizeCase(leading, 4, hidden, 6, onnx_type, has_residual=True))


def test_one_session_serves_any_number_of_tokens() -> None:
    cases = [FinalizeCase((tokens,), 8, 96, 16, "float16", seed=tokens) for tokens in (3, 0, 700, 1)]
    session = op_session(op_model("FinalizeRouting", cases[0].feeds, {}, symbolic=True))
    for case in cases:
        assert_same_bits(run_session(session, case.feeds)["y"], finalize_routing(**case.feeds))


CASE = FinalizeCase((5,), 2, 16, 4, "float16", has_bias=True, has_residual=True)


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"expert_output": np.zeros((9, 16), np.float16)},
            r"'expert_output' must have shape \[10, 16\], but has \[9, 16\]",
        ),
        ({"indices": np.zeros((5, 3), np.int32)}, r"'indices' must have shape \[5, 2\], but has \[5, 3\]"),
        ({"unpermuted_to_permuted": np.zeros(9, np.int32)}, r"'unpermuted_to_permuted' must have shape \[10\]"),
        ({"bias": np.zeros((4, 15), np.float16)}, r"'bias' must have shape \[4, 16\], but has \[4, 15\]"),
        ({"residual": np.zeros((4, 16), np.float16)}, r"'residual' must have shape \[5, 16\], but has \[4, 16\]"),
        # No sizes are taken from what is no matrix.
        ({"expert_output": np.zeros(10, np.float16)}, r"'expert_output' must have shape \[(10|\?), \?\], but has \["),
        ({"bias": np.zeros(16, np.float16)}, r"'bias' must have shape \[\?, (16|\?)\], but has \["),
    ],
)
def test_wrong_shapes_are_refused(changed: dict[str, Any], message: str, symbolic: bool) -> None:
    with pytest.raises(Exception, match=f"FinalizeRouting node 'node': input {message}"):
        run_op("FinalizeRouting", CASE.feeds | changed, {}, symbolic=symbolic)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"bias": np.zeros((4, 16), np.float32)},
            "'bias' must have type float16 as 'expert_output' has, but has float",
        ),
        ({"residual": np.zeros((5, 16), np.float32)}, "'residual' must have type float16 as 'expert_output' has"),
        ({"weights": np.zeros((5, 2), np.float16)}, "'weights' must have type float, but has float16"),
        ({"indices": np.zeros((5, 2), np.int64)}, "'indices' must have type int32, but has int64"),
    ],
)
def test_wrong_types_are_refused_when_the_session_is_created(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=f"FinalizeRouting node 'node': input {message}"):
        op_session(op_model("FinalizeRouting", CASE.feeds | changed, {}))


def test_rows_of_another_type_are_refused() -> None:
    feeds = CASE.feeds | {"expert_output": np.zeros((10, 16), np.float64)}
    with pytest.raises(Exception, match=r"tensor\(double\)"):
        op_session(op_model("FinalizeRouting", feeds, {}))

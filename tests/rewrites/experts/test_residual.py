"""What is done to what the experts return: a factor and a sum are absorbed where that is all there is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ort_moe.ops import SCALED
from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import HIDDEN
from tests.rewrites.experts.experts_models import SUM, Experts, assert_fuses, assert_same, fuse

ROUTED = SUM.replace("y =", "routed =")
CONSTANTS: dict[str, Any] = {
    "into": np.ones((HIDDEN, HIDDEN), np.float32) / 4,
    "gate_vector": np.ones((HIDDEN, 1), np.float32),
    "factor": np.array(2.5, np.float32),
    "zero_factor": np.array(0.0, np.float32),
    "zero": np.array([0], np.int64),
    "view": np.array([-1, 1, HIDDEN], np.int64),
    "row": np.ones((1, HIDDEN), np.float32),
    "vector": np.ones(HIDDEN, np.float32),
}
SHARED = "\n shared = MatMul (x, into)"


def with_behind(text: str, **changes: Any) -> Experts:
    return Experts(sum=ROUTED + text, constants=CONSTANTS, **changes)


ABSORBED = {
    "from the right": (SHARED + "\n y = Add (routed, shared)", "shared"),
    "from the left": (SHARED + "\n y = Add (shared, routed)", "shared"),
    "behind a sigmoid gate": (
        SHARED + "\n logit = MatMul (x, gate_vector)\n open = Sigmoid (logit)\n gated = Mul (open, shared)"
        "\n y = Add (routed, gated)",
        "gated",
    ),
    "the tokens' own rows": ("\n y = Add (routed, x)", "other"),
    "behind a factor": (SHARED + "\n more = Mul (routed, factor)\n y = Add (more, shared)", "shared"),
    "a factor alone": ("\n y = Mul (factor, routed)", "none"),
}


@pytest.mark.parametrize("case", ABSORBED)
def test_absorbed(case: str) -> None:
    text, kind = ABSORBED[case]
    model = assert_fuses(with_behind(text), {"weight_on": "output"})
    assert model.graph.node(-1).op_type == "FusedExperts"
    site, _ = fuse(with_behind(text).model())
    assert site.residual == kind


def test_behind_a_view() -> None:
    """The rows that are added are viewed as the experts' are, and the result as the sum was."""
    text = """
        routed3 = Reshape (routed, view)
        apart = Reshape (x, view)
        shared3 = Tanh (apart)
        sum3 = Add (shared3, routed3)
        y = Squeeze (sum3, one)"""
    model = assert_fuses(with_behind(text), {"weight_on": "output"})
    ops = [node.op_type for node in model.graph]
    assert "Add" not in ops
    assert ops.index("FusedExperts") > ops.index("Tanh")
    names = [value.name for node in model.graph for value in node.outputs]
    assert "sum3" in names
    assert "routed" not in names  # of what it named nothing is left
    assert "routed3" not in names


@pytest.mark.parametrize("behind", ["Add (wide_routed, wide_shared)", "Add (wide_shared, wide_routed)"])
def test_in_float32_and_back(behind: str) -> None:
    text = f"""
        shared = Tanh (x)
        wide_routed = Cast <to = 1> (routed)
        wide_shared = Cast <to = 1> (shared)
        wide_y = {behind}
        y = Cast <to = 10> (wide_y)"""
    model = assert_fuses(with_behind(text, dtype="float16"), {"weight_on": "output"}, rtol=4e-3)
    assert model.graph.node(-1).op_type == "FusedExperts"


def test_a_factor_of_the_routers_weights_keeps_their_name_beside_it() -> None:
    model = with_behind(ABSORBED["a factor alone"][0]).model()
    rewrite(model)
    (router,) = [node for node in model.graph if node.op_type == "FusedRouter"]
    assert router.attributes["scale"].value == 2.5
    assert router.metadata_props[SCALED] == "2.5 weights"
    assert router.outputs[0].name == "weights_scaled"


def test_two_factors() -> None:
    text = "\n half = Mul (routed, factor)\n y = Mul (factor, half)"
    model = assert_fuses(with_behind(text), {"weight_on": "output"})
    (router,) = [node for node in model.graph if node.op_type == "FusedRouter"]
    assert router.attributes["scale"].value == 6.25
    assert router.metadata_props[SCALED] == "6.25 weights"


STAYING = {
    "one row for all": ("\n y = Add (routed, row)", {}),
    "a vector": ("\n y = Add (routed, vector)", {}),
    "a row that may be one": ("\n last = Slice (x, minus1, end, zero)\n y = Add (routed, last)", {}),
    "rows in another axis": (
        "\n lying = Unsqueeze (routed, zero)\n upright = Unsqueeze (x, one)\n square = Add (lying, upright)"
        "\n y = ReduceSum <keepdims = 0> (square, zero)",
        {},
    ),
    "read by others": ("\n y = Add (routed, x)\n other = Neg (routed)", {"outputs": f", float[T, {HIDDEN}] other"}),
    "an output": ("\n y = Add (routed, x)", {"outputs": f", float[T, {HIDDEN}] routed"}),
    "twice itself": ("\n y = Add (routed, routed)", {}),
    "a factor of zero": ("\n y = Mul (routed, zero_factor)", {}),
    "weights that are read": ("\n y = Mul (routed, factor)", {"outputs": ", float[T, 2] weights"}),
    "in float32": (
        "\n wide_routed = Cast <to = 1> (routed)\n wide_x = Cast <to = 1> (x)\n wide_y = Add (wide_routed, wide_x)"
        "\n wide_sine = Sin (wide_y)\n y = Cast <to = 10> (wide_sine)",
        {"dtype": "float16"},
    ),
}


@pytest.mark.parametrize("case", STAYING)
def test_stays(case: str) -> None:
    text, changes = STAYING[case]
    half = changes.get("dtype") == "float16"
    experts = Experts(
        sum=ROUTED + text,
        constants={**({} if half else CONSTANTS), "end": np.array([2**62], np.int64)},
        **changes,
    )
    original, model = experts.model(), experts.model()
    site, _ = fuse(model)
    assert (site.status, site.residual) == ("whole", "none")
    assert model.graph.node(-1).op_type != "FusedExperts"
    assert_same(original, model, rtol=1e-2 if half else 1e-5)
    assert not rewrite(model).modified

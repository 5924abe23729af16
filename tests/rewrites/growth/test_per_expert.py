"""weights(FusedRouter(x)) * f(indices) -> expert_scale."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir
import pytest

from ort_moe.rewrites import rewrite
from ort_moe.rewrites.router_node import is_router
from tests.rewrites.blocks import DTYPES, EXPERTS, K, assert_fuses, assert_same, assert_stays, block

CHOOSE = "scores = Softmax <axis = -1> (logits)\n raw, ids = TopK (scores, k)\n"
PER_EXPERT = np.linspace(0.5, 2.0, EXPERTS, dtype=np.float32)
SKIPPED = EXPERTS - 2
CONSTANTS = {
    "column_of": PER_EXPERT.reshape(-1, 1),
    "seven": np.array(EXPERTS - 1),
    "beyond": np.array(SKIPPED),
    "five": np.array(SKIPPED - 1),
    "flat": np.array([-1]),
    "as_chosen": np.array([-1, K]),
    "minus_two": np.array([-2]),
    "no_weight": 0.0,
}


def factors_of(model: ir.Model) -> np.ndarray:
    (router,) = (node for node in model.graph if is_router(node))
    scale = router.inputs[2]
    assert scale is not None
    assert scale.const_value is not None
    return scale.const_value.numpy()


TABLES = {
    "gathered": ("factors = Gather <axis = 0> (per_expert, ids)", PER_EXPERT),
    "gathered by coordinates": ("rows3 = Unsqueeze (ids, minus1)\n factors = GatherND (per_expert, rows3)", PER_EXPERT),
    "gathered from rows": (
        "shape = Shape (scores)\n all = Expand (per_expert, shape)\n factors = GatherElements <axis = 1> (all, ids)",
        PER_EXPERT,
    ),
    "an embedding": ("each = Gather (column_of, ids)\n factors = Squeeze (each, minus1)", PER_EXPERT),
    "of the flat indices": (
        "line = Reshape (ids, flat)\n each = Gather (per_expert, line)\n factors = Reshape (each, as_chosen)",
        PER_EXPERT,
    ),
    "by other indices": ("other = Sub (seven, ids)\n factors = Gather (per_expert, other)", PER_EXPERT[::-1]),
    "truncated": (
        "each = Gather (per_expert, ids)\n whole = Cast <to = 7> (each)\n factors = Cast <to = DTYPE> (whole)",
        np.trunc(PER_EXPERT),
    ),
    "by the largest of three": (
        "other = Max (ids, one, two)\n factors = Gather (per_expert, other)",
        PER_EXPERT[np.maximum(np.arange(EXPERTS), 2)],
    ),
    "by the smallest of one": ("other = Min (ids)\n factors = Gather (per_expert, other)", PER_EXPERT),
    "by truths": (
        "bits = Cast <to = 9> (ids)\n number = Cast <to = 7> (bits)\n factors = Gather (per_expert, number)",
        PER_EXPERT[[0, *[1] * (EXPERTS - 1)]],
    ),
    "a mask": (
        "inside = Less (ids, beyond)\n factors = Cast <to = DTYPE> (inside)",
        (np.arange(EXPERTS) < SKIPPED).astype(np.float32),
    ),
}


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("line", ["Mul (raw, factors)", "Mul (factors, raw)"])
@pytest.mark.parametrize("name", TABLES)
def test_factor_per_expert(name: str, line: str, dtype: str) -> None:
    lines, expected = TABLES[name]
    text = CHOOSE + lines.replace("DTYPE", "1" if dtype == "float" else "10") + f"\n weights = {line}"
    constants = {**CONSTANTS, "per_expert": PER_EXPERT.astype(DTYPES[dtype])}
    constants["column_of"] = CONSTANTS["column_of"].astype(DTYPES[dtype])
    build = partial(block, text, constants, dtype=dtype)
    rtol = 1e-5 if dtype == "float" else 3e-3
    assert_fuses(build, {"scale": 1.0}, absorbed=("expert-scale", "softmax"), rtol=rtol)
    model = build()
    rewrite(model)
    np.testing.assert_array_equal(factors_of(model), expected.astype(DTYPES[dtype]).astype(np.float32))


def test_factors_multiply() -> None:
    text = CHOOSE + "a = Gather (per_expert, ids)\n b = Cast <to = 1> (ids)\n c = Mul (raw, a)\n weights = Mul (c, b)"
    build = partial(block, text, {"per_expert": PER_EXPERT})
    assert_fuses(build, {"scale": 1.0}, absorbed=("expert-scale", "softmax"))
    model = build()
    rewrite(model)
    np.testing.assert_array_equal(factors_of(model), PER_EXPERT * np.arange(EXPERTS, dtype=np.float32))


def test_bfloat16() -> None:
    text = CHOOSE + "factors = Gather (per_expert, ids)\n weights = Mul (raw, factors)"
    (site,) = rewrite(block(text, {"per_expert": PER_EXPERT.astype(DTYPES["bfloat16"])}, dtype="bfloat16")).sites
    assert (site.status, site.absorbed) == ("whole", ("expert-scale", "softmax"))


def test_after_the_normalisation() -> None:
    text = CHOOSE + "total = ReduceSum (raw, minus1)\n share = Div (raw, total)\n"
    text += "factors = Gather (per_expert, ids)\n weights = Mul (share, factors)"
    build = partial(block, text, {"per_expert": PER_EXPERT})
    assert_fuses(build, {"normalize": 1}, absorbed=("normalize", "expert-scale", "softmax"))


def test_scores_scaled_before_the_gather() -> None:
    text = "scores = Softmax <axis = -1> (logits)\n raw, ids = TopK (scores, k)\n all = Mul (scores, per_expert)\n"
    text += "weights = GatherElements <axis = 1> (all, ids)"
    build = partial(block, text, {"per_expert": PER_EXPERT})
    assert_fuses(build, {"score": "softmax"}, absorbed=("gather-scores", "expert-scale", "softmax"))


def test_biased_scores_scaled_before_the_gather() -> None:
    text = "scores = Sigmoid (logits)\n keys = Add (scores, bias)\n unused, ids = TopK (keys, k)\n"
    text += "all = Mul (scores, per_expert)\n weights = GatherElements <axis = 1> (all, ids)"
    build = partial(block, text, {"per_expert": PER_EXPERT, "bias": PER_EXPERT[::-1].copy()})
    assert_fuses(build, {"score": "sigmoid"}, absorbed=("gather-scores", "expert-scale", "sigmoid"))


def test_refuses_infinite_factors() -> None:
    text = CHOOSE + "factors = Gather (per_expert, ids)\n weights = Mul (raw, factors)"
    (site,) = rewrite(block(text, {"per_expert": np.full(EXPERTS, np.float32(np.inf))})).sites
    assert site.absorbed == ("softmax",)


@pytest.mark.parametrize(
    "lines",
    [
        "factors = Slice (logits, zero, k, one)",
        "lowest = ReduceMin <keepdims = 0> (ids, zero)\n factors = Gather (per_expert, lowest)",
    ],
    ids=["not of the indices", "of another shape"],
)
def test_other_factors_stay(lines: str) -> None:
    build = partial(
        block, CHOOSE + lines + "\n weights = Mul (raw, factors)", {"per_expert": PER_EXPERT, "zero": np.array([0])}
    )
    original, model = build(), build()
    (site,) = rewrite(model).sites
    assert site.absorbed == ("softmax",)
    assert_same(original, model)


def test_refuses_factors_in_another_arrangement() -> None:
    """(B, S, K) weights times factors (S, B, K) are (S, S, K) where B is 1."""
    import onnx
    from onnx import numpy_helper

    text = f"""
        <ir_version: 10, opset_import: ["" : 20]>
        block (float[B, S, 4] x) => (float[M, N, {K}] y, float[N, H] z) {{
            logits = MatMul (x, gate)
            scores = Softmax <axis = -1> (logits)
            raw, ids = TopK (scores, k)
            turned = Reshape (ids, turned_shape)
            factors = Gather (per_expert, turned)
            y = Mul (raw, factors)
            flat = Reshape (ids, minus1)
            chosen = Gather (experts, flat)
            z = ReduceSum <keepdims = 0> (chosen, one)
        }}"""
    proto = onnx.parser.parse_model(text)
    arrays = {
        "gate": np.random.default_rng(0).standard_normal((4, EXPERTS)).astype(np.float32),
        "experts": np.ones((EXPERTS, 4, 4), np.float32),
        "k": np.array([K]),
        "turned_shape": np.array([-1, 1, K]),
        "per_expert": PER_EXPERT,
        "minus1": np.array([-1]),
        "one": np.array([1]),
    }
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    del proto.graph.output[1]
    proto.graph.output.append(onnx.ValueInfoProto(name="z"))
    model = ir.from_proto(proto)
    sites = rewrite(model).sites
    assert all("expert-scale" not in site.absorbed for site in sites)


MASKED = {
    "filled": "gone = GreaterOrEqual (ids, beyond)\n weights = Where (gone, no_weight, raw)",
    "kept": "here = Less (ids, beyond)\n weights = Where (here, raw, no_weight)",
    "inverted": "here = LessOrEqual (ids, five)\n gone = Not (here)\n weights = Where (gone, no_weight, raw)",
    "full of zeros": (
        "gone = GreaterOrEqual (ids, beyond)\n shape = Shape (ids)\n zeros = Expand (no_weight, shape)\n"
        "weights = Where (gone, zeros, raw)"
    ),
}


@pytest.mark.parametrize("dtype", ["float", "float16"])
@pytest.mark.parametrize("name", MASKED)
def test_skipped_experts(name: str, dtype: str) -> None:
    build = partial(block, CHOOSE + MASKED[name], CONSTANTS, dtype=dtype)
    rtol = 1e-5 if dtype == "float" else 3e-3
    assert_fuses(build, {"score": "softmax"}, absorbed=("softmax", "skip-experts"), rtol=rtol)
    model = build()
    rewrite(model)
    np.testing.assert_array_equal(factors_of(model), np.arange(EXPERTS) < SKIPPED)


SKIP = """
    scores = Softmax <axis = -1> (logits)
    keys = Add (scores, bias)
    unused, chosen_of = TopK <sorted = 0> (keys, k)
    raw = GatherElements <axis = 1> (scores, chosen_of)
    skips = Equal (chosen_of, last)
    weights = Where (skips, no_weight, raw)
    ids = Where (skips, none, chosen_of)"""


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_the_choice_of_no_expert(dtype: str) -> None:
    """One column more than there are experts; its index is given up for that of an expert of weight 0."""
    text = SKIP.replace("logits", "wide_logits")
    rng = np.random.default_rng(3)
    constants = {
        "wide_gate": rng.standard_normal((4, EXPERTS + 1)),
        "bias": rng.standard_normal(EXPERTS + 1) / 8,
        "no_weight": 0.0,
    }
    arrays = {name: np.asarray(value, DTYPES[dtype]) for name, value in constants.items()}
    build = partial(
        block,
        "wide_logits = MatMul (x, wide_gate)" + text,
        {**arrays, "last": np.array(EXPERTS), "none": np.array(0)},
        dtype=dtype,
    )
    model = build()
    sites = [site for site in rewrite(model).sites if site.experts is not None]
    assert [(site.status, site.experts) for site in sites] == [("whole", EXPERTS + 1)], sites
    assert set(sites[0].absorbed) == {"gather-scores", "softmax", "skip-experts"}
    assert_same(build(), model, rtol=1e-5 if dtype == "float" else 3e-3)


def test_weights_split_among_experts_and_others() -> None:
    """Where two parts of the weights are taken by masks, the masks are the experts' affair."""
    text = (
        CHOOSE
        + """
        beyond_them = GreaterOrEqual (ids, beyond)
        weights = Where (beyond_them, no_weight, raw)
        mask = Cast <to = 1> (beyond_them)
        rest = Mul (raw, mask)
        identity = ReduceSum (rest, minus1)"""
    )
    build = partial(block, text, CONSTANTS, outputs=", float[T, 1] identity")
    original, model = build(), build()
    (site,) = rewrite(model).sites
    assert (site.status, site.absorbed) == ("whole", ("softmax",))
    assert_same(original, model)


def test_refuses_another_fill() -> None:
    text = CHOOSE + MASKED["filled"]
    build = partial(block, text, {**CONSTANTS, "no_weight": 1.0})
    assert_stays(build, status="partly", sentence="the weights of skipped experts become 1.0, expected 0")


def test_refuses_to_multiply_what_may_be_infinite() -> None:
    text = "raw, ids = TopK (logits, k)\n shifted = Add (logits, logits)\n" + MASKED["filled"]
    build = partial(block, text, CONSTANTS)
    assert_stays(build, status="left", sentence="the weights may be infinite")

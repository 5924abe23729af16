"""Two choices by ArgMax, each weighed by a softmax over those near it -> score = sparse_mixer."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import EXPERTS, TOKENS, assert_fuses, assert_same, block

MIXER = """
    m1 = ReduceMax <keepdims = 1> (logits, minus1)
    i1 = ArgMax <axis = -1> (logits)
    size = Abs (logits)
    f1 = Max (size, m1)
    s1 = Sub (m1, logits)
    d1 = Div (s1, f1)
    far1 = Greater (d1, threshold)
    near1 = Where (far1, ninf, logits)
    p1 = Softmax <axis = -1> (near1)
    w1 = GatherElements <axis = -1> (p1, i1)
    shape = Shape (i1)
    gone = Expand (ninf, shape)
    rest = ScatterElements <axis = -1> (logits, i1, gone)
    m2 = ReduceMax <keepdims = 1> (rest, minus1)
    i2 = ArgMax <axis = -1> (rest)
    f2 = Max (size, m2)
    s2 = Sub (m2, logits)
    d2 = Div (s2, f2)
    far2 = Greater (d2, threshold)
    near2 = Where (far2, ninf, rest)
    p2 = Softmax <axis = -1> (near2)
    w2 = GatherElements <axis = -1> (p2, i2)
    weights = Concat <axis = -1> (w1, w2)
    ids = Concat <axis = -1> (i1, i2)"""
CONSTANTS = {"threshold": 0.5, "ninf": -np.inf}  # so far that most rows have experts that share


@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_sparse_mixer(dtype: str) -> None:
    build = partial(block, MIXER, CONSTANTS, dtype=dtype)
    expected = {"k": 2, "score": "sparse_mixer", "mixer_threshold": 0.5, "normalize": 0}
    rtol = 1e-5 if dtype == "float" else 3e-3
    assert_fuses(build, expected, absorbed=("seed-sparse-mixer",), rtol=rtol)


def test_an_index_that_is_read_by_another_node() -> None:
    build = partial(block, MIXER + "\n first = Add (i1, i1)", CONSTANTS, outputs=", int64[T, 1] first")
    assert_fuses(build, {"score": "sparse_mixer"}, absorbed=("seed-sparse-mixer",))


def test_bfloat16() -> None:
    (site,) = rewrite(block(MIXER, CONSTANTS, dtype="bfloat16")).sites
    assert (site.status, site.k) == ("whole", 2)


def test_indices_joined_first() -> None:
    lines = MIXER.strip().splitlines()
    build = partial(block, "\n".join([*lines[:-2], lines[-1], lines[-2]]), CONSTANTS)
    assert_fuses(build, {"score": "sparse_mixer"}, absorbed=("seed-sparse-mixer",))


OTHERS = {"scores": "logits", "numbers per expert": "numbers"}


@pytest.mark.parametrize("name", OTHERS)
def test_something_else_that_is_gathered_and_joined(name: str) -> None:
    others = "\n".join(f"g{n} = GatherElements <axis = -1> ({OTHERS[name]}, i{n})" for n in "12")
    text = MIXER.replace("weights =", f"{others}\n other = Concat <axis = -1> (g1, g2)\n weights =")
    numbers = np.tile(np.arange(EXPERTS, dtype=np.int64) * 10, (TOKENS, 1))
    kind = "float" if name == "scores" else "int64"
    build = partial(block, text, {**CONSTANTS, "numbers": numbers}, outputs=f", {kind}[T, 2] other")
    assert_fuses(build, {"score": "sparse_mixer"}, absorbed=("seed-sparse-mixer",))
    model = build()
    rewrite(model)
    (other,) = (value for value in model.graph.outputs if value.name == "other")
    node = other.producer()
    assert node is not None
    assert [value.name for value in node.inputs if value is not None] == ["g1", "g2"]


OTHER_WEIGHTS = """
    far3 = Greater (d1, other)
    near3 = Where (far3, ninf, logits)
    p3 = Softmax <axis = -1> (near3)
    w3 = GatherElements <axis = -1> (p3, i1)
    far4 = Greater (d2, other)
    near4 = Where (far4, ninf, rest)
    p4 = Softmax <axis = -1> (near4)
    w4 = GatherElements <axis = -1> (p4, i2)
    weights_b = Concat <axis = -1> (w3, w4)"""


def test_two_mixers_of_the_same_logits() -> None:
    text = f"{MIXER}{OTHER_WEIGHTS}"
    build = partial(block, text, {**CONSTANTS, "other": 0.1}, outputs=", float[T, 2] weights_b")
    original, model = build(), build()
    (site,) = rewrite(model).sites
    assert site.attributes is not None
    assert site.attributes["mixer_threshold"] == 0.5
    assert_same(original, model)
    (other,) = (value for value in model.graph.outputs if value.name == "weights_b")
    node = other.producer()
    assert node is not None
    assert node.op_type == "Concat"


SPELLINGS = {
    "inverted": [
        ("near1 = Where (far1, ninf, logits)", "close1 = Not (far1)\n near1 = Where (close1, logits, ninf)"),
        ("far2 = Greater (d2, threshold)", "far2 = Less (threshold, d2)"),
    ],
    "gathered maximum": [("m2 = ReduceMax <keepdims = 1> (rest, minus1)", "")],
    "operands swapped": [("Max (size, m1)", "Max (m1, size)")],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str) -> None:
    text = MIXER
    for was, becomes in SPELLINGS[name]:
        assert was in text
        text = text.replace(was, becomes)
    if name == "gathered maximum":
        second = "i2 = ArgMax <axis = -1> (rest)"
        text = text.replace(second, second + "\n m2 = GatherElements <axis = 1> (rest, i2)")
    assert_fuses(partial(block, text, CONSTANTS), {"score": "sparse_mixer"}, absorbed=("seed-sparse-mixer",))


def test_with_casts_between_the_steps() -> None:
    text = MIXER.replace(
        "size = Abs (logits)", "wide = Cast <to = 1> (logits)\n a = Abs (wide)\n size = Cast <to = 10> (a)"
    )
    for number in "12":
        text = text.replace(
            f"far{number} = Greater (d{number}, threshold)",
            f"e{number} = Cast <to = 1> (d{number})\n far{number} = Greater (e{number}, wide_threshold)",
        )
    constants = {**CONSTANTS, "wide_threshold": np.float32(0.5)}
    build = partial(block, text, constants, dtype="float16")
    assert_fuses(build, {"mixer_threshold": 0.5}, absorbed=("seed-sparse-mixer",), rtol=3e-3)


def test_logits_widened_before() -> None:
    text = "wide = Cast <to = 1> (logits)" + MIXER.replace("logits", "wide")
    text = text.replace("weights =", "both =") + "\n weights = Cast <to = 10> (both)"
    constants = {"threshold": np.float32(0.5), "ninf": np.float32(-np.inf)}
    build = partial(block, text, constants, dtype="float16")
    assert_fuses(build, {"score": "sparse_mixer"}, absorbed=("input-cast", "seed-sparse-mixer"), rtol=3e-3)


def test_normalised_and_scaled() -> None:
    text = MIXER.replace("weights =", "raw =")
    text += "\n sum = ReduceSum (raw, minus1)\n share = Div (raw, sum)\n weights = Mul (share, two_f)"
    build = partial(block, text, {**CONSTANTS, "two_f": 2.0})
    expected = {"score": "sparse_mixer", "normalize": 1, "scale": 2.0}
    assert_fuses(build, expected, absorbed=("seed-sparse-mixer", "normalize", "scale"))


REFUSALS = {
    "two thresholds": ("Greater (d2, threshold)", "Greater (d2, other)", "have the thresholds 0.5 and 0.25"),
    "less or equal": ("far2 = Greater (d2, threshold)\n    near2 = Where (far2, ninf, rest)",
                      "close2 = LessOrEqual (d2, threshold)\n near2 = Where (close2, rest, ninf)",
                      "is not told by a distance greater than a threshold"),
    "another distance": ("Max (size, m2)", "Max (size, m1)", "what is compared with the threshold is no distance"),
    "another softmax": ("Softmax <axis = -1> (near2)", "Softmax <axis = 0> (near2)", "does not run over the experts"),
    "no mask": ("Softmax <axis = -1> (near1)", "Softmax <axis = -1> (logits)", "no expert is kept from sharing"),
    "other fill": ("Where (far2, ninf, rest)", "Where (far2, other, rest)", "do not become -inf"),
    "other weights": ("GatherElements <axis = -1> (p2, i2)", "GatherElements <axis = -1> (d2, i2)",
                      "not weighed by a softmax"),
    "joined otherwise": ("Concat <axis = -1> (w1, w2)", "Concat <axis = -1> (w2, w1)", "not each joined"),
    "second of all": ("ArgMax <axis = -1> (rest)", "ArgMax <axis = -1> (near1)", "among the logits without the first"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    was, becomes, sentence = REFUSALS[name]
    assert was in MIXER
    build = partial(block, MIXER.replace(was, becomes), {**CONSTANTS, "other": 0.25})
    model = build()
    result = rewrite(model)
    assert {(site.status, site.k) for site in result.sites} == {("left", 1)}
    findings = [finding for site in result.sites for finding in site.findings]
    assert {finding.reason.slug for finding in findings} == {"argmax-form"}
    assert any(sentence in finding.detail for finding in findings), findings
    assert not any(node.op_type == "FusedRouter" for node in model.graph)
    assert_same(build(), model)

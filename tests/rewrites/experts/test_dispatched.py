"""Each expert on the tokens that chose it: what is not put back where it was taken from, or weighed so, stays."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import EXPERTS, HIDDEN, block
from tests.rewrites.experts.experts_models import ROUTER, assert_same
from tests.rewrites.experts.forms import FORMS
from tests.rewrites.experts.spellings import Spelling

ADDED = "dispatched"
APART = "dispatched, put among zeros"


def written(form: str, *changes: tuple[str, str], router: str = ROUTER, outputs: str = "") -> ir.Model:
    """The experts of a form, with some text replaced."""
    spelling = Spelling(form=form)
    text = FORMS[form](spelling)
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    constants = {**spelling.constants(), "more_rows": np.array([40, HIDDEN])}
    return block(router, constants, experts_text=text + "\n y = Identity (routed)", outputs=outputs)


@pytest.mark.parametrize("form", [ADDED, APART])
def test_whole(form: str) -> None:
    original, model = written(form), written(form)
    (site,) = rewrite(model).experts
    assert (site.block, site.form) == ("whole", "experts-dispatched" if form == ADDED else "experts-unrolled")
    assert [node.op_type for node in model.graph] == ["MatMul", "FusedRouter", "FusedExperts", "Identity"]
    assert_same(original, model)


STAYING: dict[str, tuple[ir.Model, str]] = {
    "rows of the places among the choices": (
        written(ADDED, ("flat_token3 = Squeeze (token3,", "flat_token3 = Squeeze (slot3,")),
        "are not the rows of the tokens that chose expert 3",
    ),
    "rows of another expert's tokens": (
        written(ADDED, ("rows3 = Gather (x, flat_token3)", "twice3 = Concat <axis = 0> (token3, token3)\n"
                        " rows3 = Gather (x, flat_token2)"),
                ("term3 = Mul (made23, share3)", "term3 = Mul (made23, share2)"),
                ("(total2, token3,", "(total2, token2,")),
        "adds up other experts than each of some once",
    ),
    "weights of other places": (
        written(ADDED, ("at3 = Concat <axis = -1> (token3, slot3)", "at3 = Concat <axis = -1> (slot3, token3)")),
        "adds up other experts than each of some once",
    ),
    "weights of the first choice": (
        written(ADDED, ("at3 = Concat <axis = -1> (token3, slot3)",
                        "none3 = Sub (slot3, slot3)\n at3 = Concat <axis = -1> (token3, none3)")),
        "adds up other experts than each of some once",
    ),
    "an expert twice": (
        written(ADDED, ("mask3 = Gather (turned, number3)", "mask3 = Gather (turned, number2)")),
        "adds up other experts than each of some once",
    ),
    "some experts": (
        written(
            ADDED,
            ('routed = ScatterND <reduction = "add"> (total6', 'unread = ScatterND <reduction = "add"> (total6'),
            ("total6", "routed"),
        ),
        "there are 7 experts, but",
    ),
    "more rows than tokens": (
        written(ADDED, ("zero_rows = Expand (none_chosen, x_shape)", "zero_rows = Expand (none_chosen, more_rows)")),
        "the rows to which the experts are added, 'zero_rows'",
    ),
    "rows that are put over others": (
        written(ADDED, ('"add"> (total2,', '"max"> (total2,')),
        "adds up other experts than each of some once",
    ),
    "among others than zeros": (
        written(APART, ("empty3 = Expand (none_chosen,", "empty3 = Expand (one_float,")),
        "",
    ),
    "put among zeros where they are larger": (
        written(APART, ("put3 = ScatterElements <axis = 0>", 'put3 = ScatterElements <axis = 0, reduction = "max">')),
        "",
    ),
    "places by another number of choices": (
        written(APART, ("base3 = Mul (token3, two)", "base3 = Mul (token3, one)")),
        "",
    ),
    "read in between": (
        written(ADDED, outputs=f", float[T, {HIDDEN}] total3"), "of some experts is also read by others",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STAYING)
def test_stays(case: str) -> None:
    model, sentence = STAYING[case]
    original = model.clone()
    sites = rewrite(model).experts
    assert {site.status for site in sites} <= {"left"}
    told = [finding.detail for site in sites for finding in site.findings]
    assert any(sentence in detail for detail in told), told
    if case not in ("more rows than tokens", "weights of other places"):  # which do not run
        assert_same(original, model)
    assert not rewrite(model).modified


def test_a_token_may_choose_an_expert_twice_where_its_rows_are_added() -> None:
    """Where they are put among zeros, the second would overwrite the first."""
    router = ROUTER + "\n limited = Min (ids, last_expert)"
    changes = (("(ids, all_experts", "(limited, all_experts"),)
    for form, status in ((ADDED, "whole"), (APART, "left")):
        spelling = Spelling(form=form)
        text = FORMS[form](spelling).replace(*changes[0])
        constants = {**spelling.constants(), "last_expert": np.array([EXPERTS - 2])}
        original = block(router, constants, experts_text=text + "\n y = Identity (routed)")
        model = original.clone()
        (site,) = rewrite(model).experts
        assert site.status == status, site.findings
        assert_same(original, model)

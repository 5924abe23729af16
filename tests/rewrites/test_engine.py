"""The table of rules, and choosing among them."""

from __future__ import annotations

import pytest

from ort_moe.rewrites import RULES, rewrite
from ort_moe.rewrites.engine import OPT_IN, all_rules, choose
from ort_moe.rewrites.rule import RouterRule
from tests.rewrites.blocks import block

ROUTER = """
    scores = Softmax <axis = -1> (logits)
    raw, ids = TopK (scores, k)
    total = ReduceSum <keepdims = 1> (raw, minus1)
    weights = Div (raw, total)"""


@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: f"{rule.title}-{rule.root}")
def test_root_is_where_the_pattern_ends(rule: RouterRule) -> None:
    (end,) = rule.compiled()[0]._target_pattern.output_nodes
    assert end.op_identifier()[1] == rule.root


@pytest.mark.parametrize("name", RULES)
def test_every_rule_states_its_identity(name: str) -> None:
    info = RULES[name]
    assert info.name == name
    assert "->" in info.identity
    assert info.doc.endswith(".")


def test_unknown_names_are_refused_with_the_list() -> None:
    for arguments in ({"rules": ["normalise"]}, {"skip": ["normalise"]}):
        with pytest.raises(
            ValueError, match="unknown rule 'normalise', expected one of shorten-sort, seed-group-mask, "
        ):
            rewrite(block(ROUTER), **arguments)


def test_a_string_is_no_collection_of_names() -> None:
    for arguments in ({"rules": "softmax"}, {"skip": "softmax"}):
        with pytest.raises(ValueError, match="expected a collection of rule names, got the string 'softmax'"):
            rewrite(block(ROUTER), **arguments)


def test_named_rules_bring_the_seed() -> None:
    assert choose(["softmax"], ()) == {"seed-topk", "softmax"}
    (site,) = rewrite(block(ROUTER), rules=["softmax"]).sites
    assert (site.status, site.absorbed) == ("partly", ("softmax",))


def test_rules_that_are_to_be_asked_for() -> None:
    default = set(RULES) - OPT_IN
    assert choose(None, ()) == default
    assert choose(["+shared-gate"], ()) == default | {"shared-gate"}
    assert choose(["+shared-gate"], ["softmax"]) == (default | {"shared-gate"}) - {"softmax"}
    assert choose(["softmax", "+shared-gate"], ()) == {"seed-topk", "softmax", "shared-gate"}
    assert choose([], ()) == {"seed-topk"}
    with pytest.raises(ValueError, match="unknown rule 'no-gate'"):
        choose(["+no-gate"], ())


def test_skipped_rules_do_not_run() -> None:
    (site,) = rewrite(block(ROUTER), skip=["normalize"]).sites
    assert (site.status, site.absorbed) == ("partly", ("softmax",))
    (finding,) = site.findings
    assert finding.detail.startswith("ReduceSum 'reducesum_3' still works on the weights")


def test_without_the_seed_nothing_changes() -> None:
    model = block(ROUTER)
    result = rewrite(model, skip=["seed-topk", "seed-group-mask"])
    assert not result.modified
    (site,) = result.sites
    assert site.status == "left"
    assert site.findings[0].detail == "the rule that seeds a FusedRouter was left out"


def test_records_tell_what_ran() -> None:
    records = {record.name: record for record in rewrite(block(ROUTER)).passes}
    assert records["seed routers"].applied == 1
    assert records["after the choice"].applied == 1
    assert records["before the choice"].applied == 1
    assert records["put back"].applied == 0
    assert all(record.seconds >= 0 for record in records.values())

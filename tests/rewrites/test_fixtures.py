"""Real exports: every router and its experts whole, or listed here with the reason; the outputs as before."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import models.fixtures
from models.fixtures import Fixture
from ort_moe.rewrites import RULES, rewrite
from ort_moe.verification.runnable_model import RunnableModel

NOT_WHOLE: dict[str, tuple[str, str] | None] = {
    "inkling_text_*": ("partly", "shared-normaliser"),
}
"""Fixtures whose routers are not whole: the status and the reason of a finding; None: no site is known for a router.

The first pattern that fits a fixture's name counts.
"""

RTOL = {"fp32": 1e-5, "fp16": 4e-3, "bf16": 1e-5}
"""Of the largest output. bfloat16 runs widened to float32."""


def outputs_of(
    model: ir.Model, path: Path, feeds: dict[str, Any], *, with_library: bool, extra: list[str]
) -> dict[str, Any]:
    """The model's outputs, and values by name; `path` is where to save it."""
    ir.save(model, path)
    with RunnableModel(path) as runnable:
        if runnable.widened:
            feeds = {
                name: array.astype(np.float32) if array.dtype.kind == "V" else array for name, array in feeds.items()
            }
        names = [output.name or "" for output in model.graph.outputs]
        return runnable.session([*names, *extra], with_library=with_library)(feeds)


@pytest.mark.parametrize("fixture", models.fixtures.all(), ids=lambda fixture: fixture.name)
def test_fixture(fixture: Fixture, tmp_path: Path) -> None:
    original, model = ir.load(fixture.path), ir.load(fixture.path)
    result = rewrite(model)
    routers = [site for site in result.sites if site.experts is not None]
    exceptions = [expected for pattern, expected in NOT_WHOLE.items() if fnmatch(fixture.name, pattern)]
    expected = exceptions[0] if exceptions else ("whole", None)
    if expected is None:
        assert not routers
    else:
        status, reason = expected
        assert [site.status for site in routers] == [status] * fixture.layers, [site.findings for site in routers]
        if status != "left":
            assert {(site.experts, site.k) for site in routers} == {(fixture.experts, fixture.k)}
        for site in routers:
            assert (reason is None) == (not site.findings)
            assert reason is None or reason in [finding.reason.slug for finding in site.findings]
    assert not rewrite(model).modified

    assert [site.status for site in result.experts] == ["whole"] * fixture.layers, result.experts

    # What experts return keeps its name, or has that of the sum that they take over, perhaps behind a view; and so do
    # each router's indices: the node's own, or the Cast to int64 behind it, where the original had the TopK's.
    known = {value.name for node in original.graph for value in node.outputs}
    returned = [_returned_name(node, known) for node in model.graph if node.op_type == "FusedExperts"]
    ids = [_indices_name(node) for node in model.graph if node.op_type == "FusedRouter"]
    assert len(ids) == sum(site.status != "left" for site in routers)
    assert known.issuperset((*ids, *returned))
    feeds = fixture.sample_inputs(seed=0)
    was = outputs_of(original, tmp_path / "original.onnx", feeds, with_library=False, extra=[*ids, *returned])
    for with_library in (False, True):
        now = outputs_of(model, tmp_path / "rewritten.onnx", feeds, with_library=with_library, extra=[*ids, *returned])
        assert list(now) == list(was)
        for name, array in was.items():
            if name in ids:
                np.testing.assert_array_equal(np.sort(now[name], -1), np.sort(array, -1), err_msg=name)
            else:
                reference = array.astype(np.float64)
                atol = RTOL[fixture.precision] * np.abs(reference).max()
                np.testing.assert_allclose(now[name].astype(np.float64), reference, rtol=0, atol=atol, err_msg=name)


PARTIAL = ("deepseek_v2_block_dynamo_fp32", "deepseek_v3_block_dynamo_fp32", "lfm2_moe_block_dynamo_fp16")


@pytest.mark.parametrize("name", PARTIAL)
@pytest.mark.parametrize("rule", RULES)
def test_every_partial_router_is_right(name: str, rule: str, tmp_path: Path) -> None:
    """Without any one rule, and with that rule alone, the outputs are as before."""
    fixture = models.fixtures.get(name)
    feeds = fixture.sample_inputs(seed=1)
    (was,) = outputs_of(ir.load(fixture.path), tmp_path / "original.onnx", feeds, with_library=False, extra=[]).values()
    for options in ({"skip": [rule]}, {"rules": [rule]}):
        model = ir.load(fixture.path)
        rewrite(model, **options)
        assert not rewrite(model, **options).modified
        (now,) = outputs_of(model, tmp_path / "rewritten.onnx", feeds, with_library=True, extra=[]).values()
        atol = RTOL[fixture.precision] * np.abs(was.astype(np.float64)).max()
        np.testing.assert_allclose(now.astype(np.float64), was.astype(np.float64), rtol=0, atol=atol)


def _indices_name(router: ir.Node) -> str:
    users = [user for user in router.outputs[1].consumers() if user.op_type == "Cast"]
    return (users[0].outputs[0] if users else router.outputs[1]).name or ""


def _returned_name(experts: ir.Node, known: set[str | None]) -> str:
    value = experts.outputs[0]
    while value.name not in known and [user.op_type for user in value.consumers()] in (["Reshape"], ["Cast"]):
        value = value.consumers()[0].outputs[0]
    return value.name or ""

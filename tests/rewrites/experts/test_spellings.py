"""Whatever the form and however its parts are spelled: experts are fused, and compute what they did."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import HIDDEN, run
from tests.rewrites.experts.experts_models import assert_same
from tests.rewrites.experts.forms import FORMS
from tests.rewrites.experts.spellings import ACTIVATIONS, HALVES, LIMITS, ORDERS, RESIDUALS, Spelling

SPELLINGS = st.builds(
    Spelling,
    form=st.sampled_from(sorted(FORMS)),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    gated=st.booleans(),
    halves=st.sampled_from(sorted(HALVES)),
    limits=st.sampled_from(sorted(LIMITS)),
    order=st.sampled_from(sorted(ORDERS)),
    bias=st.booleans(),
    residual=st.sampled_from(sorted(RESIDUALS)),
    dtype=st.sampled_from(["float", "float16"]),
    transposed=st.booleans(),
)


# Derandomised: the same examples on every machine. Shrinking would take minutes, and the spelling tells enough.
@settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(spelling=SPELLINGS)
def test_every_spelling(spelling: Spelling) -> None:
    original, model = spelling.model(), spelling.model()
    (site,) = rewrite(model).experts
    if spelling.is_fusable:
        assert site.status == "whole", site.findings
        assert site.attributes is not None
        assert site.attributes["activation"] == ACTIVATIONS[spelling.activation][1]
    if spelling.runs:
        assert_same(original, model, rtol=1e-5 if spelling.dtype == "float" else 1e-2)
    assert not rewrite(model).modified


@pytest.mark.parametrize("form", ["dense", "dense by Einsum", "unrolled, by columns of a table"])
def test_a_table_of_more_rows_than_tokens(form: str) -> None:
    """One token is then spread over the rows of the table, of which all but the first are zeros."""
    spelling = Spelling(form=form)
    original, model = spelling.model(), spelling.model()
    for each in (original, model):
        for node in each.graph:
            if node.op_type == "Shape" and node.inputs[0] is not None and node.inputs[0].name == "logits":
                node.replace_input_with(0, each.graph.initializers["gate"])
    rewrite(model)
    x = np.ones((1, HIDDEN), np.float32)
    expected, got = (run(each, x, with_library=False)["y"] for each in (original, model))
    assert got.shape == expected.shape == (HIDDEN, HIDDEN)
    assert np.allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_residual_of_which_a_view_has_other_axes() -> None:
    """The experts' rows are (1, T, H), those that are added were (T, 1, H) before a view."""
    spelling = Spelling(form="unrolled", transposed=True)
    original, model = spelling.model(), spelling.model()
    for each in (original, model):
        graph = each.graph
        x, y = graph.inputs[0], graph.outputs[0]
        readers = list(x.uses())
        zero, one = (ir.Value(name=f"axis{n}", const_value=ir.tensor([n], name=f"axis{n}")) for n in (0, 1))
        for axis in (zero, one):
            graph.register_initializer(axis)
        apart = ir.node("Unsqueeze", [x, zero])
        graph.insert_before(graph.node(0), apart)
        for node, place in readers:
            node.replace_input_with(place, apart.outputs[0])
        last = graph.node(-1)
        nodes = [ir.node("Unsqueeze", [x, one])]
        nodes.append(ir.node("Sin", nodes[-1].outputs))
        nodes.append(ir.node("Squeeze", [nodes[-1].outputs[0], one]))
        nodes.append(ir.node("Squeeze", [last.inputs[0], zero]))
        nodes.append(ir.node("Add", [nodes[-1].outputs[0], nodes[-2].outputs[0]]))
        nodes[-1].outputs[0].type, nodes[-1].outputs[0].shape = y.type, y.shape
        graph.extend(nodes)
        graph.outputs[0] = nodes[-1].outputs[0]
        graph.remove(last, safe=True)
        nodes[-1].outputs[0].name = "y"
    assert [site.status for site in rewrite(model).experts] == ["whole"]
    x_rows = np.random.default_rng(0).standard_normal((5, HIDDEN)).astype(np.float32)
    expected, got = (run(each, x_rows, with_library=False)["y"] for each in (original, model))
    assert np.allclose(got, expected, rtol=1e-4, atol=1e-5)

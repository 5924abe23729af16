"""The nodes around a router as text: all of the router, none of the rest, and no weights."""

from __future__ import annotations

import re

from docs.code_examples import EXAMPLES, Example
from ort_moe.rewrites import rewrite
from ort_moe.rewrites.surroundings import surroundings


def test_shows_the_router_up_to_the_matrix_products() -> None:
    (site,) = rewrite(EXAMPLES["left-over-before"].model()).sites
    lines = site.surroundings
    operators = [re.search(r" = (\S+) ", line) for line in lines]
    assert [each and each[1] for each in operators] == [  # each behind those that make its inputs
        *("MatMul", "Div", "ort_moe.FusedRouter", "Cast", "Gather", "Einsum"),
    ]
    assert "[div_cooled] float[T, 8] cooled = Div (logits, float[T, 1] temperature)" in lines
    assert any("ort_moe.FusedRouter <" in line and "score = softmax" in line for line in lines)
    assert any("Gather (float[8, 4, 4] experts, ids)" in line for line in lines)


def test_small_constants_are_written_out_and_weights_are_not() -> None:
    text = """\
moe (float[T, 4] x) => (float[T, 4] y)
<float[4, 8] gate, float[8, 4, 4] experts, int64[1] k = {2}, float temperature = {0.5}, float[8] offset>
{
    logits = MatMul (x, gate)
    cooled = Selu (logits)
    warmed = Mul (cooled, temperature)
    moved = Add (warmed, offset)
    weights, ids = TopK (moved, k)
    chosen = Gather (experts, ids)
    y = Einsum <equation = "th,tkhi,tk->ti"> (x, chosen, weights)
}"""
    model = Example("", text).model()
    (topk,) = [node for node in model.graph if node.op_type == "TopK"]
    lines = "\n".join(surroundings(topk))
    assert "Mul (cooled, float[] {0.5})" in lines
    assert "TopK (moved, int64[1] {2})" in lines
    assert "MatMul (float[T, 4] x, float[4, 8] gate)" in lines


def test_stops_at_the_next_layer() -> None:
    layers = 40
    lines = [
        f"l{i} = MatMul (x{i}, gate)\n s{i} = Softmax (l{i})\n w{i}, i{i} = TopK (s{i}, k)\n c{i} = Gather (e, i{i})\n"
        f'x{i + 1} = Einsum <equation = "th,tkhi,tk->ti"> (x{i}, c{i}, w{i})'
        for i in range(layers)
    ]
    weights = "<float[4, 8] gate, float[8, 4, 4] e, int64[1] k = {2}>"
    text = "\n".join([f"moe (float[T, 4] x0) => (float[T, 4] x{layers})", weights, "{", *lines, "}"])
    model = Example("", text).model()
    topks = [node for node in model.graph if node.op_type == "TopK"]
    assert all(len(surroundings(node)) == 5 for node in topks)

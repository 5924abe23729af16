"""The stacks of experts' weights behind a router, in every form of expert layer."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from docs.code_examples import Example
from ort_moe.inspection.inspect import Layer, inspect

BLOCK = """\
moe (float[T, 4] x) => (float[T, 4] y)
<float[4, 8] gate, float[8, 4, 6] up, float[8, 6, 4] down, float[8, 6] bias, int64[1] k = {{2}}, int64[1] zero = {{0}},
 int64[1] one = {{1}}, int64[1] two = {{2}}, float nothing = {{0}}, float[4] scale>
{{
    logits = MatMul (x, gate)
    {router}
    {experts}
}}"""

SOFTMAX = "s = Softmax (logits)\n best, ids = TopK (s, k)\n n = Shape (logits)\n none = Expand (nothing, n)\n"
ROWS = SOFTMAX + "rows = ScatterElements <axis = -1> (none, ids, best)\n"
BYTES = {"up": 8 * 4 * 6 * 4, "down": 8 * 6 * 4 * 4}


def layers(tmp_path: Path, router: str, experts: str) -> tuple[Layer, ...]:
    path = tmp_path / "model.onnx"
    onnx.save(ir.to_proto(Example("", BLOCK.format(router=router, experts=experts)).model()), path)
    return inspect(path).layers


@pytest.mark.parametrize(
    ("router", "experts", "all_experts"),
    [
        pytest.param(
            SOFTMAX,
            """a = Gather (up, ids)
            h = Einsum <equation = "th,tkhi->tki"> (x, a)
            b = Gather (down, ids)
            y = Einsum <equation = "tki,tkih,tk->th"> (h, b, best)""",
            False,
            id="gathered",
        ),
        pytest.param(
            ROWS,
            """h = Einsum <equation = "th,ehi->tei"> (x, up)
            a = Relu (h)
            o = Einsum <equation = "tei,eih->teh"> (a, down)
            y = Einsum <equation = "teh,te->th"> (o, rows)""",
            True,
            id="rows weigh the results of stacked products",
        ),
        pytest.param(
            ROWS,
            """x3 = Unsqueeze (x, zero)
            h = MatMul (x3, up)
            b = Unsqueeze (bias, one)
            moved = Add (h, b)
            a = Relu (moved)
            o = MatMul (a, down)
            t = Transpose <perm = [1, 0]> (rows)
            w = Unsqueeze (t, two)
            weighted = Mul (o, w)
            y = ReduceSum <keepdims = 0> (weighted, zero)""",
            True,
            id="rows multiply the results of batched products",
        ),
        pytest.param(
            ROWS,
            """t = Transpose <perm = [1, 0]> (rows)
            w = Unsqueeze (t, two)
            x3 = Unsqueeze (x, zero)
            scaled = Mul (x3, w)
            h = MatMul (scaled, up)
            a = Relu (h)
            o = MatMul (a, down)
            y = ReduceSum <keepdims = 0> (o, zero)""",
            True,
            id="rows multiply the input",
        ),
    ],
)
def test_found(tmp_path: Path, router: str, experts: str, all_experts: bool) -> None:
    (layer,) = layers(tmp_path, router, experts)
    assert sorted(str(weight) for weight in layer.weights) == ["float 8x4x6", "float 8x6x4"]
    assert layer.all_experts is all_experts
    assert layer.bytes_per_token == sum(BYTES.values()) * (1 if all_experts else 2 / 8)


def test_a_layer_has_no_weights_of_the_next(tmp_path: Path) -> None:
    """Through the residual, the second layer's results depend on the first's choice."""
    dense = """h{i} = Einsum <equation = "th,ehi->tei"> (x{i}, up)
        o{i} = Einsum <equation = "tei,eih->teh"> (h{i}, {down})
        m{i} = Einsum <equation = "teh,te->th"> (o{i}, rows{i})
        r{i} = Add (m{i}, x{i})
    """
    routed = ROWS.replace("logits", "l{i}")
    for name in ("s", "best", "ids", "n", "none", "rows"):
        routed = routed.replace(f"({name},", f"({name}{{i}},").replace(f"{name} =", f"{name}{{i}} =")
        routed = routed.replace(f" {name},", f" {name}{{i}},").replace(f" {name})", f" {name}{{i}})")
    text = BLOCK.format(router="x1 = Identity (x)", experts="").replace("logits = MatMul (x, gate)", "")
    body = (
        "l1 = MatMul (x1, gate)\n"
        + routed.format(i=1)
        + dense.format(i=1, down="down")
        + "x2 = LayerNormalization (r1, scale)\n l2 = MatMul (x2, gate)\n"
        + routed.format(i=2)
        + dense.format(i=2, down="other")
        + "y = Identity (r2)\n}"
    )
    text = text.rstrip()[:-1].replace("float[4] scale", "float[4] scale, float[8, 6, 4] other") + body
    path = tmp_path / "model.onnx"
    model = Example("", text).model()
    onnx.save(ir.to_proto(model), path)
    first, second = inspect(path).layers
    assert len(first.weights) == len(second.weights) == 2
    assert first.bytes_per_token == second.bytes_per_token == sum(BYTES.values())


def test_not_recognised(tmp_path: Path) -> None:
    columns = "\n".join(
        f"i{e} = Constant <value_ints = [{e}]> ()\n c{e} = Gather <axis = 1> (rows, i{e})\n o{e} = Mul (x, c{e})"
        for e in range(8)
    )
    experts = f"{columns}\n y = Sum ({', '.join(f'o{e}' for e in range(8))})"
    (layer,) = layers(tmp_path, ROWS, experts)
    assert (layer.weights, layer.bytes_per_token) == ((), None)
    text = str(inspect(tmp_path / "model.onnx"))
    assert "not recognised" in text
    assert "experts' weights read per token: not known" in text
    assert "0 B" not in text

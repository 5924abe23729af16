"""Small MoE blocks whose experts are written as `batched_mm` leaves exporters, in ONNX's text form, piece by piece.

x (T, H) -> router -> repeat -> gather, product -> activation -> gather, product -> weigh -> sum -> y (T, H)

Every piece can be replaced by another text that reads and writes the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from ort_moe.rewrites import ExpertsSite, RewriteResult, rewrite
from tests.rewrites.blocks import DTYPES, EXPERTS, HIDDEN, TOKENS, block, cpu_session

INNER, K = 3, 2

ROUTER = """
    scores = Softmax <axis = -1> (logits)
    best, ids = TopK (scores, k)
    total = ReduceSum <keepdims = 1> (best, minus1)
    weights = Div (best, total)"""

REPEAT = """
    x3 = Unsqueeze (x, one)
    copies = Tile (x3, tile_k)
    rows = Reshape (copies, rows_of_x)"""

LIST = """
    list = Reshape (ids, minus1)"""

FC1 = """
    matrices1 = Gather <axis = 0> (fc1, list)
    column1 = Unsqueeze (rows, minus1)
    product1 = MatMul (matrices1, column1)
    made1 = Squeeze (product1, minus1)"""

SILU = """
    g, u = Split <axis = -1, num_outputs = 2> (made1)
    share = Sigmoid (g)
    opened = Mul (g, share)
    active = Mul (opened, u)"""

FC2 = """
    matrices2 = Gather <axis = 0> (fc2, list)
    column2 = Unsqueeze (active, minus1)
    product2 = MatMul (matrices2, column2)
    made2 = Squeeze (product2, minus1)"""

WEIGH = """
    flat_weights = Reshape (weights, minus1)
    weight_column = Unsqueeze (flat_weights, minus1)
    weighted = Mul (made2, weight_column)"""

SUM = """
    by_token = Reshape (weighted, by_token_shape)
    y = ReduceSum <keepdims = 0> (by_token, one)"""


@dataclass(frozen=True)
class Experts:
    """The pieces of a block.

    Attributes:
        router: Reads `logits`, writes `weights` (T, K) in the experts' type, and `ids` (T, K).
        repeat: Reads `x`, writes `rows`.
        list: Reads `ids`, writes `list`.
        fc1: Reads `rows` and `list`, writes `made1`.
        activation: Reads `made1`, writes `active`.
        fc2: Reads `active` and `list`, writes `made2`.
        weigh: Reads `made2` and `weights`, writes `weighted`.
        sum: Reads `weighted`, writes `y`.
        constants: Further or other initializers.
        gated: Whether fc1 has 2 I rows.
        dtype: Of x and the experts.
        outputs: Further outputs of the graph.
        opset: Version of the standard operator set.
        imports: Further domains, with their versions.
    """

    router: str = ROUTER
    repeat: str = REPEAT
    list: str = LIST
    fc1: str = FC1
    activation: str = SILU
    fc2: str = FC2
    weigh: str = WEIGH
    sum: str = SUM
    constants: Mapping[str, Any] = field(default_factory=dict)
    gated: bool = True
    dtype: str = "float"
    outputs: str = ""
    opset: int = 20
    imports: Mapping[str, int] = field(default_factory=dict)

    def model(self) -> ir.Model:
        """The block, with random weights."""
        rng = np.random.default_rng(5)
        rows = 2 * INNER if self.gated else INNER
        dtype = DTYPES[self.dtype]
        constants = {
            "fc1": rng.standard_normal((EXPERTS, rows, HIDDEN)).astype(dtype),
            "fc2": rng.standard_normal((EXPERTS, HIDDEN, INNER)).astype(dtype),
            "bias1": rng.standard_normal((EXPERTS, rows)).astype(dtype),
            "bias2": rng.standard_normal((EXPERTS, HIDDEN)).astype(dtype),
            "tile_k": np.array([1, K, 1], np.int64),
            "rows_of_x": np.array([-1, HIDDEN], np.int64),
            "by_token_shape": np.array([-1, K, HIDDEN], np.int64),
            **self.constants,
        }
        pieces = (self.repeat, self.list, self.fc1, self.activation, self.fc2, self.weigh, self.sum)
        return block(
            self.router,
            constants,
            dtype=self.dtype,
            experts_text="".join(pieces),
            outputs=self.outputs,
            opset=self.opset,
            imports=self.imports,
        )


def transposed(name: str) -> np.ndarray[Any, Any]:
    """The weights of that name as they are in `Experts`, each matrix transposed."""
    rng = np.random.default_rng(7)
    shape = (EXPERTS, HIDDEN, 2 * INNER) if name == "fc1" else (EXPERTS, INNER, HIDDEN)
    return rng.standard_normal(shape).astype(np.float32)


def fuse(model: ir.Model, **options: Any) -> tuple[ExpertsSite, RewriteResult]:
    """Rewrite a block and return what became of its experts."""
    result = rewrite(model, **options)
    (site,) = result.experts
    return site, result


def assert_fuses(experts: Experts, expected: Mapping[str, Any], *, rtol: float = 1e-5) -> ir.Model:
    """The block becomes a FusedRouter and a FusedExperts with these attributes, and computes what it did."""
    original, model = experts.model(), experts.model()
    site, result = fuse(model)
    assert site.status == "whole", site.findings
    assert site.attributes is not None
    assert {name: site.attributes[name] for name in expected} == dict(expected)
    assert (site.experts, site.k, site.hidden, site.inner) == (EXPERTS, K, HIDDEN, INNER)
    assert result.modified
    assert_same(original, model, rtol=rtol)
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert not rewrite(model).modified
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before
    return model


def assert_stays(experts: Experts, reason: str, sentence: str, **options: Any) -> None:
    """The experts are left under that reason, with that sentence, and the block computes what it did."""
    original, model = experts.model(), experts.model()
    sites = rewrite(model, **options).experts
    assert {site.status for site in sites} == {"left"}
    told = [(finding.reason.slug, finding.detail) for site in sites for finding in site.findings]
    assert any(slug == reason and sentence in detail for slug, detail in told), told
    assert_same(original, model)


def assert_same(original: ir.Model, rewritten: ir.Model, *, rtol: float = 1e-5, seed: int = 1) -> None:
    """Same y in plain ONNX Runtime (the function bodies) and with the library (the kernels)."""
    x = np.random.default_rng(seed).standard_normal((TOKENS, HIDDEN))
    expected = _run(original, x, with_library=False).astype(np.float64)
    assert np.isfinite(expected).all()
    for with_library in (False, True):
        got = _run(rewritten, x, with_library=with_library).astype(np.float64)
        np.testing.assert_allclose(got, expected, rtol=0, atol=rtol * np.abs(expected).max())


def _run(model: ir.Model, x: Any, *, with_library: bool) -> Any:
    session = cpu_session(model, with_library=with_library)
    dtype = {"tensor(float)": np.float32, "tensor(float16)": np.float16}[session.get_inputs()[0].type]
    (y,) = session.run(["y"], {"x": x.astype(dtype)})
    return y

"""Experts whose layers are MatMulNBits: their codes are taken as they are, or the layer is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from ort_moe.rewrites import rewrite
from tests.rewrites.blocks import EXPERTS, block, cpu_session
from tests.rewrites.experts.experts_models import ROUTER

HIDDEN, INNER, TOKENS = 32, 64, 9
"""Of whole blocks."""


@dataclass(frozen=True)
class Packed:
    """Unrolled experts of MatMulNBits."""

    bits: int = 4
    block: int = 16
    gated: bool = True
    zero_points: bool = False
    bias: bool = False
    level: int = 0
    flat: bool = False

    def model(self) -> ir.Model:
        rng = np.random.default_rng(5)
        constants: dict[str, Any] = {"zeros": np.zeros((1, HIDDEN), np.float32), "nothing": 0.0}
        lines, total = ["\n wide = Concat <axis = 1> (" + ", ".join(["x"] * (HIDDEN // 4)) + ")"], "zeros"
        for e in range(EXPERTS):
            constants[f"number{e}"] = np.array(e)
            layers = [("gate", HIDDEN, INNER), ("down", INNER, HIDDEN)]
            for name, depth, rows in layers + ([("up", HIDDEN, INNER)] if self.gated else []):
                constants |= self._weights(f"{name}{e}", depth, rows, rng)
            text = f"\n g{e} = {self._product(f'gate{e}', 'wide', HIDDEN, INNER)}"
            if self.gated:
                text += f"\n u{e} = {self._product(f'up{e}', 'wide', HIDDEN, INNER)}"
                text += f"\n s{e} = Sigmoid (g{e})\n o{e} = Mul (g{e}, s{e})\n a{e} = Mul (o{e}, u{e})"
            else:
                text += f"\n a{e} = Relu (g{e})"
            after = f"total{e}" if e < EXPERTS - 1 else "all"
            text += f"""
                made{e} = {self._product(f"down{e}", f"a{e}", INNER, HIDDEN)}
                is{e} = Equal (ids, number{e})
                masked{e} = Where (is{e}, weights, nothing)
                share{e} = ReduceSum <keepdims = 1> (masked{e}, minus1)
                term{e} = Mul (made{e}, share{e})
                {after} = Add ({total}, term{e})"""
            lines.append(text)
            total = after
        lines.append("\n y = Slice (all, start, four, one)")
        constants |= {"start": np.array([0]), "four": np.array([4])}
        return block(ROUTER, constants, experts_text="".join(lines), imports={"com.microsoft": 1})

    def _weights(self, name: str, depth: int, rows: int, rng: np.random.Generator) -> dict[str, Any]:
        blocks = depth // self.block
        shape = (rows, blocks, self.block * self.bits // 8)
        given = {
            f"{name}_codes": rng.integers(0, 256, shape, dtype=np.uint8),
            f"{name}_scales": rng.uniform(0.01, 0.02, (rows, blocks)).astype(np.float32),
            f"{name}_zeros": rng.integers(0, 256, (rows, (blocks * self.bits + 7) // 8), dtype=np.uint8),
            f"{name}_bias": rng.standard_normal(rows).astype(np.float32),
        }
        return {key: array.reshape(-1) if self.flat and key[-5:] != "codes" else array for key, array in given.items()}

    def _product(self, name: str, rows_of: str, depth: int, rows: int) -> str:
        attributes = f"K = {depth}, N = {rows}, bits = {self.bits}, block_size = {self.block}"
        zeros = f"{name}_zeros" if self.zero_points else '""'
        inputs = [rows_of, f"{name}_codes", f"{name}_scales", *([zeros] if self.zero_points or self.bias else [])]
        inputs += ['""', f"{name}_bias"] if self.bias else []
        level = f", accuracy_level = {self.level}"
        return f"com.microsoft.MatMulNBits <{attributes}{level}> ({', '.join(inputs)})"


def run(model: ir.Model, *, with_library: bool) -> np.ndarray[Any, Any]:
    x = np.random.default_rng(1).standard_normal((TOKENS, 4)).astype(np.float32)
    (y,) = cpu_session(model, with_library=with_library).run(["y"], {"x": x})
    return np.asarray(y)


@pytest.mark.parametrize(
    "packed",
    [
        Packed(),
        Packed(gated=False),
        Packed(bits=8),
        Packed(zero_points=True),
        Packed(bits=8, block=32, zero_points=True),
        Packed(bias=True),
        Packed(block=32, zero_points=True, bias=True, flat=True),
    ],
)
def test_codes_are_taken_as_they_are(packed: Packed) -> None:
    original, model = packed.model(), packed.model()
    (site,) = rewrite(model).experts
    assert site.status == "whole", site.findings
    assert site.attributes is not None
    assert (site.attributes["weight_format"], site.attributes["block_size"]) == (f"int{packed.bits}", packed.block)
    assert (site.hidden, site.inner) == (HIDDEN, INNER)
    expected = run(original, with_library=False)
    for with_library in (False, True):
        got = run(model, with_library=with_library)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    assert not rewrite(model).modified


def test_rows_rounded_to_int8_are_others() -> None:
    (site,) = rewrite(Packed(level=4).model()).experts
    (finding,) = site.findings
    assert (site.status, finding.reason.slug) == ("left", "experts-form")
    assert "may round its rows to int8 (accuracy_level 4), which FusedExperts does not" in finding.detail

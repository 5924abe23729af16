"""No weight is further from what its code stands for than rounding takes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

import models.fixtures
import ort_moe
from ort_moe.choices import BLOCK_SIZES
from ort_moe.ops.experts_config import ExpertsConfig
from ort_moe.packing.pieces import Packing
from ort_moe.reference.fused_experts import ExpertLayer
from ort_moe.verification import verify
from ort_moe.verification.packed_weights import LARGEST_ERROR, largest_error
from tests.ort_moe.large_models import LargeModel
from tests.ort_moe.verification.contrib_layers import damaged

ROWS, DEPTH = 144, 256
"""Two squares of rows for fp8, the second one cut."""

PACKINGS = [
    *(Packing.of(name) for name in ("nvfp4", "mxfp4")),
    *(Packing.of("fp8", size) for size in BLOCK_SIZES),
    *(
        Packing.of(name, size, zero_points=z)
        for name in ("int4", "int8")
        for size in BLOCK_SIZES
        for z in (False, True)
    ),
]


def hard_weights(kind: str, dtype: Any) -> np.ndarray[Any, Any]:
    """(N, D) in float32, exact in the type."""
    rng = np.random.default_rng(5)
    normal = rng.standard_normal((ROWS, DEPTH))
    most = float(ml_dtypes.finfo(dtype).max)
    with np.errstate(all="ignore"):
        weights = {
            "normal": normal * 0.02,
            "heavy tails": rng.standard_t(1.0, (ROWS, DEPTH)) * 0.02,
            "blocks of every size": normal * 10.0 ** rng.uniform(-8, 2, (ROWS, DEPTH // 16)).repeat(16, axis=1),
            "uniform": rng.uniform(-1.0, 1.0, (ROWS, DEPTH)),
            "of one sign": np.abs(normal) + 1.0,
            "zeros but for one": np.where(np.arange(DEPTH) == 7, normal, 0.0),
            "tiny": normal * float(ml_dtypes.finfo(dtype).tiny),
            "largest": np.where(normal > 0, most, rng.uniform(-most, most, (ROWS, DEPTH)))
            * (0.01 if most < 1e6 else 1),
        }[kind]
        held = np.clip(weights, -most, most).astype(dtype)
    return held.astype(np.float32)


KINDS = (
    "normal", "heavy tails", "blocks of every size", "uniform", "of one sign", "zeros but for one", "tiny", "largest",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_packing_stays_within_what_is_allowed(packing: Packing, dtype: Any) -> None:
    config = ExpertsConfig.from_attributes({"activation": "silu", "gated": 0, **packing.attributes})
    found = {}
    for kind in KINDS:
        weights = hard_weights(kind, dtype)
        try:
            parts, _ = packing.pack(weights[None].astype(dtype), float(np.abs(weights).max()), dtype, "weights")
        except ValueError:  # scales beyond the type's range: nothing is packed
            continue
        for widened in {False, dtype == ml_dtypes.bfloat16}:
            if widened and packing.weight_format in ("int4", "int8"):
                parts["scales"] = parts["scales"].astype(np.float32)
            found[kind, widened] = largest_error(config, ExpertLayer(**parts), weights)
    assert found
    assert max(found.values()) <= LARGEST_ERROR[packing.weight_format], found
    assert found["uniform", False] > LARGEST_ERROR[packing.weight_format] / 5  # it says something


def test_other_weights_of_experts_that_lie_as_they_are_packed(tmp_path: Path) -> None:
    """The reference has FusedExperts."""
    source = LargeModel(layers=1, experts=4, k=2, hidden=64, inner=64).write(tmp_path / "model.onnx")
    dense, packed = tmp_path / "dense.onnx", tmp_path / "packed.onnx"
    ort_moe.optimize(source, dense, verify=False)
    report = ort_moe.optimize(dense, packed, weights="nvfp4")
    assert report.verification is not None
    verification = verify(dense, damaged(packed, "fc2_nvfp4_global_scale", 1.3))
    assert "its weights were packed to nvfp4, which changes one of fc2 of expert " in str(verification.failure)


@pytest.mark.parametrize("turned", [False, True], ids=["as they lie", "turned"])
def test_other_weights_of_exported_experts(turned: bool, tmp_path: Path) -> None:
    """The reference's weights are found by what `optimize` makes of it."""
    source = LargeModel(layers=2, experts=4, k=2, hidden=64, inner=64).write(tmp_path / "model.onnx")
    packed = tmp_path / "packed.onnx"
    ort_moe.optimize(source, packed, weights="int4")
    layer = 1 if turned else 0
    names = [name for name in ir.load(packed).graph.initializers if "fc1" in name and name.endswith("int4_scales")]
    verification = verify(source, damaged(packed, names[layer], 1.2))
    statuses = [site.status for site in verification.sites if site.what == "layer of experts"]
    assert statuses == ["passed", "failed"] if turned else ["failed", "passed"]
    assert "its weights were packed to int4, which changes one of fc1 of expert " in str(verification.failure)


def test_bfloat16_runs_widened(tmp_path: Path) -> None:
    fixture = models.fixtures.get("gpt_oss_block_dynamo_bf16")
    packed = tmp_path / "packed.onnx"
    ort_moe.optimize(fixture.path, packed, weights="fp8", block_size=16)
    (name,) = [name for name in ir.load(packed).graph.initializers if "fp8_scales" in name][:1]
    verification = verify(fixture.path, damaged(packed, name, 1.1))
    assert "its weights were packed to fp8, which changes one of " in str(verification.failure)

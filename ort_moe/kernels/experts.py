"""Calls FusedExperts."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ort_moe.kernels.calls import MAPS, RoutingMaps, addresses, choice_number, dtype_number, launch, scratch_bytes
from ort_moe.ops import FUSED_EXPERTS
from ort_moe.ops.experts_config import ExpertsConfig


@dataclass(frozen=True)
class ExpertLayer:
    """Addresses of one of the two layers for all experts, N rows with D elements along the reduction.

    Attributes:
        weights: dense: (E, N, D) of dtype; nvfp4, mxfp4, int4: uint8 (E, N, D / 2); int8: uint8 (E, N, D); fp8:
            float8_e4m3fn (E, N, D).
        scales: nvfp4: float8_e4m3fn (E, N, D / 16); mxfp4: uint8 (E, N, D / 32); int4, int8: of dtype
            (E, N, D / block_size); fp8: float32 (E, ceil(N / block_size), ceil(D / block_size)).
        global_scale: nvfp4, mxfp4: (E) float32; None counts as 1.
        zero_points: int4: uint8 (E, N, ceil(D / block_size / 2)); int8: uint8 (E, N, D / block_size); None counts as 8
            or 128.
        bias: (E, N) of dtype.
    """

    weights: int
    scales: int | None = None
    global_scale: int | None = None
    zero_points: int | None = None
    bias: int | None = None


class _ExpertLayer(ctypes.Structure):
    """ExpertLayer of custom_ops/kernels/experts/fused_experts.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("weights", "scales", "global_scale", "zero_points", "bias"))


class _FusedExpertsCall(ctypes.Structure):
    """OrtMoeFusedExpertsCall of custom_ops/kernels/experts/fused_experts_c.cc."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weights", "indices", *MAPS)),
        *((name, _ExpertLayer) for name in ("fc1", "fc2")),
        *((name, ctypes.c_void_p) for name in ("residual", "y", "scratch")),
        *((name, ctypes.c_int64) for name in ("tokens", "hidden", "inner", "experts", "k", "block_size")),
        *((n, ctypes.c_int32) for n in ("dtype", "weight_format", "activation", "gated", "gate_layout", "weight_on")),
        *((name, ctypes.c_float) for name in ("alpha", "beta", "limit")),
    )


def fused_experts(
    config: ExpertsConfig,
    *,
    tokens: int,
    hidden: int,
    inner: int,
    experts: int,
    k: int,
    dtype: str,
    x: int,
    weights: int,
    indices: int,
    fc1: ExpertLayer,
    fc2: ExpertLayer,
    y: int,
    scratch: int | None,
    maps: RoutingMaps | None = None,
    residual: int | None = None,
    stream: int = 0,
) -> None:
    """Launches FusedExperts on the current CUDA device.

    Args:
        config: The op's attributes.
        tokens: T; 0 launches nothing.
        hidden: H.
        inner: I.
        experts: E.
        k: K.
        dtype: Type of the rows: `float`, `float16` or `bfloat16`.
        x: Address of (T, H) of dtype.
        weights: Address of (T, K) float32.
        indices: Address of (T, K) int32, any values; those outside [0, E) contribute nothing.
        fc1: N = 2 I or I rows, D = H.
        fc2: N = H rows, D = I.
        y: Address of (T, H) of dtype, written.
        scratch: Address of `fused_experts_scratch_bytes` bytes, aligned to 256.
        maps: The maps of the indices; built inside where they are needed and not given.
        residual: Address of (T, H) of dtype; may be y.
        stream: The CUDA stream's handle; 0 is the default stream.

    Raises:
        ValueError: `dtype` is none of the three, or a size but T is below 1.
        RuntimeError: The attributes do not go together, or the launch failed.
    """
    call = _FusedExpertsCall(
        x=x,
        weights=weights,
        indices=indices,
        **addresses(maps),
        fc1=_ExpertLayer(**vars(fc1)),
        fc2=_ExpertLayer(**vars(fc2)),
        residual=residual,
        y=y,
        scratch=scratch,
        **_experts_shape(config, tokens=tokens, hidden=hidden, inner=inner, experts=experts, k=k, dtype=dtype),
        activation=choice_number(FUSED_EXPERTS, "activation", config.activation),
        gate_layout=choice_number(FUSED_EXPERTS, "gate_layout", config.gate_layout),
        weight_on=choice_number(FUSED_EXPERTS, "weight_on", config.weight_on),
        alpha=config.alpha,
        beta=config.beta,
        limit=config.limit,
    )
    launch("fused_experts", call, stream)


def fused_experts_scratch_bytes(
    config: ExpertsConfig,
    *,
    tokens: int,
    hidden: int,
    inner: int,
    experts: int,
    k: int,
    dtype: str,
    with_maps: bool = False,
) -> int:
    """Bytes of scratch that `fused_experts` needs with or without given maps; may be 0."""
    shape = _experts_shape(config, tokens=tokens, hidden=hidden, inner=inner, experts=experts, k=k, dtype=dtype)
    weight_on = choice_number(FUSED_EXPERTS, "weight_on", config.weight_on)
    call = _FusedExpertsCall(**shape, weight_on=weight_on, **(dict.fromkeys(MAPS, 1) if with_maps else {}))
    return scratch_bytes("fused_experts", call)


def _experts_shape(config: ExpertsConfig, *, dtype: str, **sizes: int) -> dict[str, int]:
    for name, size in sizes.items():
        if name != "tokens" and size < 1:
            raise ValueError(f"{name} must be at least 1, but is {size}")
    weight_format = choice_number(FUSED_EXPERTS, "weight_format", config.weight_format)
    return sizes | {
        "block_size": config.block_size,
        "dtype": dtype_number(dtype),
        "weight_format": weight_format,
        "gated": config.gated,
    }

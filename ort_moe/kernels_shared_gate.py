"""Calls the CUDA kernel of SharedGateRouter directly, as `ort_moe.kernels` does the others."""

from __future__ import annotations

import ctypes

from ort_moe.kernel_calls import MAPS, RoutingMaps, launch, scratch_bytes
from ort_moe.router_call import FusedRouterCall, fused_router_call
from ort_moe.router_config import RouterConfig


class _SharedGateRouterCall(ctypes.Structure):
    """OrtMoeSharedGateRouterCall of custom_ops/kernels/shared_gate_router_c.cc."""

    _fields_ = (
        ("router", FusedRouterCall),
        *((name, ctypes.c_void_p) for name in ("hidden", "gate_weight")),
        ("size", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("count", "base")),
        ("scale", ctypes.c_float),
    )


def shared_gate_router(
    config: RouterConfig,
    *,
    rows: int,
    experts: int,
    hidden_size: int,
    shared: int,
    dtype: str,
    logits: int,
    hidden: int,
    gate_weight: int,
    weights: int,
    indices: int,
    shared_base: int,
    shared_scale: float = 1.0,
    selection_bias: int | None = None,
    expert_scale: int | None = None,
    maps: RoutingMaps | None = None,
    scratch: int | None = None,
    stream: int = 0,
) -> None:
    """Launches SharedGateRouter on the current CUDA device.

    Args:
        config: The router's attributes.
        rows: T; 0 launches nothing but a zeroing of the maps' offsets.
        experts: E.
        hidden_size: H, at least 1.
        shared: S, at least 1.
        dtype: Type of logits, hidden rows and gates: `float`, `float16` or `bfloat16`.
        logits: Address of (T, E) of dtype.
        hidden: Address of (T, H) of dtype.
        gate_weight: Address of (S, H) of dtype.
        weights: Address of (T, K + S) float32, written.
        indices: Address of (T, K + S) int32, written.
        shared_base: Index of the first shared expert.
        shared_scale: Multiplies the shared experts' weights.
        selection_bias: Address of (E) float32.
        expert_scale: Address of (E) float32.
        maps: The maps of all columns over E + S experts, written.
        scratch: Address of `shared_gate_router_scratch_bytes` bytes; only with maps.
        stream: The CUDA stream's handle; 0 is the default stream.

    Raises:
        ValueError: `dtype` is none of the three, or hidden_size or shared is below 1.
        RuntimeError: The attributes do not go together, or the launch failed.
    """
    for name, size in (("hidden_size", hidden_size), ("shared", shared)):
        if size < 1:
            raise ValueError(f"{name} must be at least 1, but is {size}")
    router = fused_router_call(
        config,
        rows=rows,
        experts=experts,
        dtype=dtype,
        logits=logits,
        weights=weights,
        indices=indices,
        selection_bias=selection_bias,
        expert_scale=expert_scale,
        maps=maps,
        scratch=scratch,
    )
    call = _SharedGateRouterCall(
        router=router,
        hidden=hidden,
        gate_weight=gate_weight,
        size=hidden_size,
        count=shared,
        base=shared_base,
        scale=shared_scale,
    )
    launch("ort_moe_launch_shared_gate_router", call, stream)


def shared_gate_router_scratch_bytes(config: RouterConfig, *, rows: int, experts: int, shared: int) -> int:
    """Bytes of scratch that `shared_gate_router` needs to build maps; may be 0."""
    router = FusedRouterCall(rows=rows, experts=experts, k=config.k, **dict.fromkeys(MAPS, 1))
    call = _SharedGateRouterCall(router=router, count=shared)
    return scratch_bytes("ort_moe_shared_gate_router_scratch_bytes", call)

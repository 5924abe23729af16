"""Calls FusedRouter, and the router with the gates of shared experts."""

from __future__ import annotations

import ctypes

from ort_moe.kernels.calls import MAPS, RoutingMaps, addresses, choice_number, dtype_number, launch, scratch_bytes
from ort_moe.ops import FUSED_ROUTER
from ort_moe.ops.router_config import RouterConfig


class _FusedRouterCall(ctypes.Structure):
    """OrtMoeFusedRouterCall of custom_ops/kernels/router/fused_router_call.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "selection_bias", "expert_scale", "weights", "indices")),
        *((name, ctypes.c_void_p) for name in (*MAPS, "scratch")),
        *((n, ctypes.c_int64) for n in ("rows", "experts", "k", "num_groups", "topk_groups", "group_score_top")),
        *((n, ctypes.c_int32) for n in ("dtype", "score", "score_after_topk", "bias_on", "weights_from", "normalize")),
        *((name, ctypes.c_float) for name in ("mixer_threshold", "group_fill", "normalize_eps", "normalize_min")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


class _SharedGateRouterCall(ctypes.Structure):
    """OrtMoeSharedGateRouterCall of custom_ops/kernels/router/shared_gate_router_c.cc."""

    _fields_ = (
        ("router", _FusedRouterCall),
        *((name, ctypes.c_void_p) for name in ("hidden", "gate_weight")),
        ("size", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("count", "base")),
        ("scale", ctypes.c_float),
    )


def fused_router(
    config: RouterConfig,
    *,
    rows: int,
    experts: int,
    dtype: str,
    logits: int,
    weights: int,
    indices: int,
    selection_bias: int | None = None,
    expert_scale: int | None = None,
    maps: RoutingMaps | None = None,
    scratch: int | None = None,
    stream: int = 0,
) -> None:
    """Launches FusedRouter on the current CUDA device.

    Args:
        config: The op's attributes.
        rows: T; 0 launches nothing but a zeroing of the maps' offsets.
        experts: E.
        dtype: Type of the logits: `float`, `float16` or `bfloat16`.
        logits: Address of (T, E) of dtype.
        weights: Address of (T, K) float32, written.
        indices: Address of (T, K) int32, written.
        selection_bias: Address of (E) float32.
        expert_scale: Address of (E) float32.
        maps: The maps of the indices, written.
        scratch: Address of `router_scratch_bytes` bytes; only with maps.
        stream: The CUDA stream's handle; 0 is the default stream.

    Raises:
        ValueError: `dtype` is none of the three.
        RuntimeError: The attributes do not go together, or the launch failed.
    """
    call = _fused_router_call(
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
    launch("fused_router", call, stream)


def router_scratch_bytes(config: RouterConfig, *, rows: int, experts: int) -> int:
    """Bytes of scratch that `fused_router` needs to build maps; may be 0."""
    wanted = dict.fromkeys(MAPS, 1)
    call = _FusedRouterCall(rows=rows, experts=experts, k=config.k, **wanted)
    return scratch_bytes("router", call)


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
    router = _fused_router_call(
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
    launch("shared_gate_router", call, stream)


def shared_gate_router_scratch_bytes(config: RouterConfig, *, rows: int, experts: int, shared: int) -> int:
    """Bytes of scratch that `shared_gate_router` needs to build maps; may be 0."""
    router = _FusedRouterCall(rows=rows, experts=experts, k=config.k, **dict.fromkeys(MAPS, 1))
    call = _SharedGateRouterCall(router=router, count=shared)
    return scratch_bytes("shared_gate_router", call)


def _fused_router_call(
    config: RouterConfig,
    *,
    rows: int,
    experts: int,
    dtype: str,
    logits: int,
    weights: int,
    indices: int,
    selection_bias: int | None,
    expert_scale: int | None,
    maps: RoutingMaps | None,
    scratch: int | None,
) -> _FusedRouterCall:
    """The structure of a call; the arguments are those of `fused_router`.

    Raises:
        ValueError: `dtype` is none of the three.
    """
    return _FusedRouterCall(
        logits=logits,
        selection_bias=selection_bias,
        expert_scale=expert_scale,
        weights=weights,
        indices=indices,
        **addresses(maps),
        scratch=scratch,
        rows=rows,
        experts=experts,
        k=config.k,
        num_groups=config.num_groups,
        topk_groups=config.topk_groups,
        group_score_top=config.group_score_top,
        dtype=dtype_number(dtype),
        score=choice_number(FUSED_ROUTER, "score", config.score),
        score_after_topk=config.score_after_topk,
        bias_on=choice_number(FUSED_ROUTER, "bias_on", config.bias_on),
        weights_from=choice_number(FUSED_ROUTER, "weights_from", config.weights_from),
        normalize=config.normalize,
        mixer_threshold=config.mixer_threshold,
        group_fill=config.group_fill,
        normalize_eps=config.normalize_eps,
        normalize_min=config.normalize_min,
        scale=config.scale,
        softcap=config.softcap,
    )

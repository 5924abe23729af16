"""Calls CUDA kernels of the library directly, without ONNX Runtime, on device memory given by address.

For code that has its own tensors and streams: PyTorch (`tensor.data_ptr()`, `stream.cuda_stream`), CuPy, benchmarks.
The launches are asynchronous and can be captured into a CUDA graph.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from ort_moe.experts_config import ExpertsConfig
from ort_moe.kernel_calls import MAPS, addresses, choice_number, dtype_number, launch, scratch_bytes
from ort_moe.kernel_calls import RoutingMaps as RoutingMaps
from ort_moe.ops import FUSED_EXPERTS
from ort_moe.router_call import FusedRouterCall, fused_router_call
from ort_moe.router_config import RouterConfig


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


class _RoutingMapsCall(ctypes.Structure):
    """OrtMoeRoutingMapsCall of custom_ops/kernels/routing_maps_c.cc."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("indices", *MAPS, "scratch")),
        *((name, ctypes.c_int64) for name in ("tokens", "k", "experts")),
    )


class _PermuteTokensCall(ctypes.Structure):
    """OrtMoePermuteTokensCall of custom_ops/kernels/permute_tokens_c.cc."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "indices", "permuted_x", *MAPS, "scratch")),
        *((name, ctypes.c_int64) for name in ("tokens", "hidden", "k", "experts")),
        ("dtype", ctypes.c_int32),
    )


class _FinalizeRoutingCall(ctypes.Structure):
    """OrtMoeFinalizeRoutingCall of custom_ops/kernels/finalize_routing_c.cc."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("expert_output", "weights", "indices", "unpermuted_to_permuted")),
        *((name, ctypes.c_void_p) for name in ("bias", "residual", "y")),
        *((name, ctypes.c_int64) for name in ("tokens", "hidden")),
        *((name, ctypes.c_int32) for name in ("k", "experts", "dtype", "routing_settled")),
    )


class _GatherFinalizeCall(ctypes.Structure):
    """OrtMoeGatherFinalizeCall of custom_ops/kernels/gather_finalize_c.cc."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("expert_output", "weights", "indices", "unpermuted_to_permuted")),
        *((name, ctypes.c_void_p) for name in ("expert_first_token_offset", "bias", "residual", "y")),
        *((name, ctypes.c_int64) for name in ("tokens", "hidden", "padded", "capacity", "local_begin", "local_count")),
        *((name, ctypes.c_int32) for name in ("k", "experts", "dtype")),
    )


class _ExpertLayer(ctypes.Structure):
    """ExpertLayer of custom_ops/kernels/fused_experts.h."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("weights", "scales", "global_scale", "zero_points", "bias"))


class _FusedExpertsCall(ctypes.Structure):
    """OrtMoeFusedExpertsCall of custom_ops/kernels/fused_experts_c.cc."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weights", "indices", *MAPS)),
        *((name, _ExpertLayer) for name in ("fc1", "fc2")),
        *((name, ctypes.c_void_p) for name in ("residual", "y", "scratch")),
        *((name, ctypes.c_int64) for name in ("tokens", "hidden", "inner", "experts", "k", "block_size")),
        *((n, ctypes.c_int32) for n in ("dtype", "weight_format", "activation", "gated", "gate_layout", "weight_on")),
        *((name, ctypes.c_float) for name in ("alpha", "beta", "limit")),
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
    call = fused_router_call(
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
    launch("ort_moe_launch_fused_router", call, stream)


def router_scratch_bytes(config: RouterConfig, *, rows: int, experts: int) -> int:
    """Bytes of scratch that `fused_router` needs to build maps; may be 0."""
    wanted = dict.fromkeys(MAPS, 1)
    call = FusedRouterCall(rows=rows, experts=experts, k=config.k, **wanted)
    return scratch_bytes("ort_moe_router_scratch_bytes", call)


def routing_maps(
    indices: int,
    maps: RoutingMaps,
    *,
    tokens: int,
    k: int,
    experts: int,
    scratch: int | None = None,
    stream: int = 0,
) -> None:
    """Launches the builder of routing maps for choices from elsewhere on the current CUDA device.

    Args:
        indices: Address of (T, K) int32, any values; those outside [0, E) name no expert.
        maps: The maps, written.
        tokens: T.
        k: K.
        experts: E.
        scratch: Address of `routing_maps_scratch_bytes` bytes.
        stream: The CUDA stream's handle; 0 is the default stream.

    Raises:
        RuntimeError: The launch failed.
    """
    call = _RoutingMapsCall(indices=indices, **addresses(maps), scratch=scratch, tokens=tokens, k=k, experts=experts)
    launch("ort_moe_launch_routing_maps", call, stream)


def routing_maps_scratch_bytes(*, tokens: int, k: int, experts: int) -> int:
    """Bytes of scratch that `routing_maps` needs; may be 0."""
    call = _RoutingMapsCall(tokens=tokens, k=k, experts=experts)
    return scratch_bytes("ort_moe_routing_maps_scratch_bytes", call)


def permute_tokens(
    *,
    tokens: int,
    hidden: int,
    k: int,
    experts: int,
    dtype: str,
    x: int,
    indices: int,
    permuted_x: int,
    maps: RoutingMaps,
    scratch: int | None = None,
    stream: int = 0,
) -> None:
    """Launches PermuteTokens on the current CUDA device.

    Args:
        tokens: T; 0 launches nothing but a zeroing of the maps' offsets.
        hidden: H.
        k: K.
        experts: E.
        dtype: Type of the rows: `float`, `float16` or `bfloat16`.
        x: Address of (T, H) of dtype.
        indices: Address of (T, K) int32, any values; those outside [0, E) name no expert.
        permuted_x: Address of (R, H) of dtype, R = T * K, written.
        maps: The maps of the indices, written.
        scratch: Address of `permute_tokens_scratch_bytes` bytes.
        stream: The CUDA stream's handle; 0 is the default stream.

    Raises:
        ValueError: `dtype` is none of the three.
        RuntimeError: The launch failed.
    """
    call = _PermuteTokensCall(
        x=x,
        indices=indices,
        permuted_x=permuted_x,
        **addresses(maps),
        scratch=scratch,
        tokens=tokens,
        hidden=hidden,
        k=k,
        experts=experts,
        dtype=dtype_number(dtype),
    )
    launch("ort_moe_launch_permute_tokens", call, stream)


def permute_tokens_scratch_bytes(*, tokens: int, hidden: int, k: int, experts: int) -> int:
    """Bytes of scratch that `permute_tokens` needs; may be 0."""
    call = _PermuteTokensCall(tokens=tokens, hidden=hidden, k=k, experts=experts)
    return scratch_bytes("ort_moe_permute_tokens_scratch_bytes", call)


def finalize_routing(
    *,
    tokens: int,
    hidden: int,
    k: int,
    dtype: str,
    expert_output: int,
    weights: int,
    indices: int,
    unpermuted_to_permuted: int,
    y: int,
    bias: int | None = None,
    experts: int = 0,
    residual: int | None = None,
    routing_settled: bool = False,
    stream: int = 0,
) -> None:
    """Launches FinalizeRouting on the current CUDA device.

    Args:
        tokens: T; 0 launches nothing.
        hidden: H.
        k: K.
        dtype: Type of the rows: `float`, `float16` or `bfloat16`.
        expert_output: Address of (R, H) of dtype, R = T * K.
        weights: Address of (T, K) float32.
        indices: Address of (T, K) int32; read only with a bias.
        unpermuted_to_permuted: Address of (R) int32.
        y: Address of (T, H) of dtype, written.
        bias: Address of (E, H) of dtype.
        experts: E, of the bias.
        residual: Address of (T, H) of dtype; may be y.
        routing_settled: Weights, indices and map were complete before the stream's previous kernel let this one start,
            so that they may be read while that kernel still runs.
        stream: The CUDA stream's handle; 0 is the default stream.

    Raises:
        ValueError: `dtype` is none of the three.
        RuntimeError: The launch failed.
    """
    call = _FinalizeRoutingCall(
        expert_output=expert_output,
        weights=weights,
        indices=indices,
        unpermuted_to_permuted=unpermuted_to_permuted,
        bias=bias,
        residual=residual,
        y=y,
        tokens=tokens,
        hidden=hidden,
        k=k,
        experts=experts,
        dtype=dtype_number(dtype),
        routing_settled=routing_settled,
    )
    launch("ort_moe_launch_finalize_routing", call, stream)


def gather_finalize(
    *,
    tokens: int,
    hidden: int,
    padded: int,
    capacity: int,
    experts: int,
    local_begin: int,
    local_count: int,
    k: int,
    dtype: str,
    expert_output: int,
    weights: int,
    indices: int,
    unpermuted_to_permuted: int,
    expert_first_token_offset: int,
    y: int,
    bias: int | None = None,
    residual: int | None = None,
    stream: int = 0,
) -> None:
    """Launches GatherFinalize on the current CUDA device.

    Args:
        tokens: T; 0 launches nothing.
        hidden: H.
        padded: Elements from row to row, at least H.
        capacity: M, the rows of each local expert.
        experts: E.
        local_begin: The first local expert.
        local_count: How many there are; local_begin + local_count is at most E.
        k: K.
        dtype: Type of the rows: `float`, `float16` or `bfloat16`.
        expert_output: Address of (local_count, M, padded) of dtype.
        weights: Address of (T, K) float32.
        indices: Address of (T, K) int32.
        unpermuted_to_permuted: Address of (R) int32, R = T * K.
        expert_first_token_offset: Address of (E + 1) int64.
        y: Address of (T, H) of dtype, written.
        bias: Address of (E, H) of dtype.
        residual: Address of (T, H) of dtype; may be y.
        stream: The CUDA stream's handle; 0 is the default stream.

    Raises:
        ValueError: `dtype` is none of the three.
        RuntimeError: The launch failed.
    """
    call = _GatherFinalizeCall(
        expert_output=expert_output,
        weights=weights,
        indices=indices,
        unpermuted_to_permuted=unpermuted_to_permuted,
        expert_first_token_offset=expert_first_token_offset,
        bias=bias,
        residual=residual,
        y=y,
        tokens=tokens,
        hidden=hidden,
        padded=padded,
        capacity=capacity,
        local_begin=local_begin,
        local_count=local_count,
        k=k,
        experts=experts,
        dtype=dtype_number(dtype),
    )
    launch("ort_moe_launch_gather_finalize", call, stream)


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
    launch("ort_moe_launch_fused_experts", call, stream)


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
    return scratch_bytes("ort_moe_fused_experts_scratch_bytes", call)


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

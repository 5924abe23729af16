"""Calls FinalizeRouting and GatherFinalize."""

from __future__ import annotations

import ctypes

from ort_moe.kernels.calls import dtype_number, launch


class _FinalizeRoutingCall(ctypes.Structure):
    """OrtMoeFinalizeRoutingCall of custom_ops/kernels/finalize/finalize_routing_c.cc."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("expert_output", "weights", "indices", "unpermuted_to_permuted")),
        *((name, ctypes.c_void_p) for name in ("bias", "residual", "y")),
        *((name, ctypes.c_int64) for name in ("tokens", "hidden")),
        *((name, ctypes.c_int32) for name in ("k", "experts", "dtype", "routing_settled")),
    )


class _GatherFinalizeCall(ctypes.Structure):
    """OrtMoeGatherFinalizeCall of custom_ops/kernels/finalize/gather_finalize_c.cc."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("expert_output", "weights", "indices", "unpermuted_to_permuted")),
        *((name, ctypes.c_void_p) for name in ("expert_first_token_offset", "bias", "residual", "y")),
        *((name, ctypes.c_int64) for name in ("tokens", "hidden", "padded", "capacity", "local_begin", "local_count")),
        *((name, ctypes.c_int32) for name in ("k", "experts", "dtype")),
    )


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
    launch("finalize_routing", call, stream)


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
    launch("gather_finalize", call, stream)

"""Calls the builder of routing maps, and PermuteTokens."""

from __future__ import annotations

import ctypes

from ort_moe.kernels.calls import MAPS, RoutingMaps, addresses, dtype_number, launch, scratch_bytes


class _RoutingMapsCall(ctypes.Structure):
    """OrtMoeRoutingMapsCall of custom_ops/kernels/maps/routing_maps_c.cc."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("indices", *MAPS, "scratch")),
        *((name, ctypes.c_int64) for name in ("tokens", "k", "experts")),
    )


class _PermuteTokensCall(ctypes.Structure):
    """OrtMoePermuteTokensCall of custom_ops/kernels/permute/permute_tokens_c.cc."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "indices", "permuted_x", *MAPS, "scratch")),
        *((name, ctypes.c_int64) for name in ("tokens", "hidden", "k", "experts")),
        ("dtype", ctypes.c_int32),
    )


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
    launch("routing_maps", call, stream)


def routing_maps_scratch_bytes(*, tokens: int, k: int, experts: int) -> int:
    """Bytes of scratch that `routing_maps` needs; may be 0."""
    call = _RoutingMapsCall(tokens=tokens, k=k, experts=experts)
    return scratch_bytes("routing_maps", call)


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
    launch("permute_tokens", call, stream)


def permute_tokens_scratch_bytes(*, tokens: int, hidden: int, k: int, experts: int) -> int:
    """Bytes of scratch that `permute_tokens` needs; may be 0."""
    call = _PermuteTokensCall(tokens=tokens, hidden=hidden, k=k, experts=experts)
    return scratch_bytes("permute_tokens", call)

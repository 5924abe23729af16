"""Calls CUDA kernels of the library directly, without ONNX Runtime, on device memory given by address.

For code that has its own tensors and streams: PyTorch (`tensor.data_ptr()`, `stream.cuda_stream`), CuPy, benchmarks.
The launches are asynchronous and can be captured into a CUDA graph.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from ort_moe.library import library_path
from ort_moe.ops import ACTIVATION_TYPES, FUSED_ROUTER
from ort_moe.router_config import RouterConfig


class _FusedRouterCall(ctypes.Structure):
    """OrtMoeFusedRouterCall of custom_ops/kernels/fused_router_c.cc."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "selection_bias", "expert_scale", "weights", "indices")),
        *((n, ctypes.c_int64) for n in ("rows", "experts", "k", "num_groups", "topk_groups", "group_score_top")),
        *((n, ctypes.c_int32) for n in ("dtype", "score", "score_after_topk", "bias_on", "weights_from", "normalize")),
        *((name, ctypes.c_float) for name in ("mixer_threshold", "group_fill", "normalize_eps", "normalize_min")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


@cache
def _launcher(name: str) -> Any:
    library = ctypes.CDLL(str(library_path()))
    if not hasattr(library, name):
        raise RuntimeError(f"{library_path()} was built without CUDA kernels: it has no {name}")
    launch = getattr(library, name)
    launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    launch.restype = ctypes.c_char_p
    return launch


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
    stream: int = 0,
) -> None:
    """Launches FusedRouter on the current CUDA device.

    Args:
        config: The op's attributes.
        rows: T; 0 launches nothing.
        experts: E.
        dtype: Type of the logits: `float`, `float16` or `bfloat16`.
        logits: Address of (T, E) of dtype.
        weights: Address of (T, K) float32, written.
        indices: Address of (T, K) int32, written.
        selection_bias: Address of (E) float32.
        expert_scale: Address of (E) float32.
        stream: The CUDA stream's handle; 0 is the default stream.

    Raises:
        ValueError: `dtype` is none of the three.
        RuntimeError: The attributes do not go together, or the launch failed.
    """
    if dtype not in ACTIVATION_TYPES:
        raise ValueError(f"dtype must be one of {', '.join(ACTIVATION_TYPES)}, but is {dtype!r}")
    call = _FusedRouterCall(
        logits=logits,
        selection_bias=selection_bias,
        expert_scale=expert_scale,
        weights=weights,
        indices=indices,
        rows=rows,
        experts=experts,
        k=config.k,
        num_groups=config.num_groups,
        topk_groups=config.topk_groups,
        group_score_top=config.group_score_top,
        dtype=ACTIVATION_TYPES.index(dtype),
        score=_choice("score", config.score),
        score_after_topk=config.score_after_topk,
        bias_on=_choice("bias_on", config.bias_on),
        weights_from=_choice("weights_from", config.weights_from),
        normalize=config.normalize,
        mixer_threshold=config.mixer_threshold,
        group_fill=config.group_fill,
        normalize_eps=config.normalize_eps,
        normalize_min=config.normalize_min,
        scale=config.scale,
        softcap=config.softcap,
    )
    error: bytes | None = _launcher("ort_moe_launch_fused_router")(ctypes.byref(call), stream)
    if error is not None:
        raise RuntimeError(error.decode())


def _choice(name: str, value: str) -> int:
    """Number of an attribute's choice: the C++ enumerations have the order of the op table."""
    return FUSED_ROUTER.attribute(name).choices.index(value)

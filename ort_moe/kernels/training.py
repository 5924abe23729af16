"""Calls the training ops' kernels directly, without ONNX Runtime, on memory given by address.

Each call launches on a CUDA stream of the current device, asynchronously, and can be captured into a CUDA graph; with
`cpu_threads` all addresses are host memory, and it returns when that many threads at most have done the work. For code
that has its own tensors; `ort_moe.torch` is such code.
"""

from __future__ import annotations

import ctypes
from typing import Any

from ort_moe.kernels.calls import choice_number, dtype_number, launch_or_run, scratch_bytes
from ort_moe.ops import AUX_LOSS, ROUTER_PROBS, ROUTER_SCORES
from ort_moe.ops.router_config import RouterConfig
from ort_moe.ops.training_config import AuxLossConfig, RouterScoresConfig

MAP_FORMATS = ("byte", "bit")
"""How a map is stored: one byte an expert, (T, E), 0 or 1; or one bit, (T, ceil(E / 8)), expert e in bit e mod 8 of
byte e / 8."""

COUNT_TYPES = AUX_LOSS.inputs[1].types
"""What counts of tokens may be: `int32`, `int64` or `float`."""


class _RouterProbsCall(ctypes.Structure):
    """OrtMoeRouterProbsCall of custom_ops/kernels/training/router_probs_c.cc."""

    _fields_ = (
        *((n, ctypes.c_void_p) for n in ("logits", "selection_bias", "expert_scale", "probs", "map", "indices")),
        *((n, ctypes.c_void_p) for n in ("grad_probs", "grad_logits")),
        *((n, ctypes.c_int64) for n in ("rows", "experts", "k", "num_groups", "topk_groups", "group_score_top")),
        *((n, ctypes.c_int32) for n in ("dtype", "map_format", "score", "score_after_topk", "bias_on", "normalize")),
        *((n, ctypes.c_float) for n in ("group_fill", "normalize_eps", "normalize_min", "scale", "softcap")),
    )


class _RouterScoresCall(ctypes.Structure):
    """OrtMoeRouterScoresCall of custom_ops/kernels/training/router_scores_c.cc."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "scores", "map", "grad_scores", "grad_logits")),
        *((name, ctypes.c_int64) for name in ("rows", "experts", "k")),
        *((name, ctypes.c_int32) for name in ("dtype", "map_format", "score", "normalize")),
        *((name, ctypes.c_float) for name in ("normalize_eps", "softcap")),
    )


class _AuxLossCall(ctypes.Structure):
    """OrtMoeAuxLossCall of custom_ops/kernels/training/aux_loss_c.cc."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("probs", "tokens_per_expert", "total", "loss", "scratch")),
        *((name, ctypes.c_void_p) for name in ("grad_loss", "grad_probs")),
        *((name, ctypes.c_int64) for name in ("rows", "experts", "k", "total_tokens")),
        *((name, ctypes.c_int32) for name in ("dtype", "count_type", "total_type")),
        ("coeff", ctypes.c_float),
    )


def router_probs(
    config: RouterConfig,
    *,
    rows: int,
    experts: int,
    dtype: str,
    logits: int,
    probs: int,
    routing_map: int,
    map_format: str = "byte",
    indices: int | None = None,
    selection_bias: int | None = None,
    expert_scale: int | None = None,
    stream: int = 0,
    cpu_threads: int | None = None,
) -> None:
    """Launches RouterProbs.

    Args:
        config: The op's attributes, of `ort_moe.ops.training_config.router_probs_config`.
        rows: T; 0 launches nothing.
        experts: E.
        dtype: Type of logits and probs: `float`, `float16` or `bfloat16`.
        logits: Address of (T, E) of dtype.
        probs: Address of (T, E) of dtype, written.
        routing_map: Address of the map, written.
        map_format: One of MAP_FORMATS.
        indices: Address of (T, K) int32, written; None: not wanted.
        selection_bias: Address of (E) float32.
        expert_scale: Address of (E) float32.
        stream: The CUDA stream's handle; 0 is the default stream.
        cpu_threads: All addresses are host memory.

    Raises:
        ValueError: `dtype` or `map_format` is none of those.
        RuntimeError: The attributes do not go together, or the launch failed.
    """
    call = _RouterProbsCall(
        logits=logits,
        selection_bias=selection_bias,
        expert_scale=expert_scale,
        probs=probs,
        map=routing_map,
        indices=indices,
        **_router_probs_fields(config, rows, experts, dtype, map_format),
    )
    launch_or_run("router_probs", call, stream, cpu_threads)


def router_probs_grad(
    config: RouterConfig,
    *,
    rows: int,
    experts: int,
    dtype: str,
    logits: int,
    routing_map: int,
    grad_probs: int,
    grad_logits: int,
    map_format: str = "byte",
    expert_scale: int | None = None,
    stream: int = 0,
    cpu_threads: int | None = None,
) -> None:
    """Launches the gradient of RouterProbs.

    Args:
        config: The op's attributes, of `ort_moe.ops.training_config.router_probs_config`.
        rows: T; 0 launches nothing.
        experts: E.
        dtype: Type of the logits and of both gradients: `float`, `float16` or `bfloat16`.
        logits: Address of (T, E) of dtype.
        routing_map: Address of the map.
        grad_probs: Address of (T, E) of dtype; not looked at where the map has no mark.
        grad_logits: Address of (T, E) of dtype, written.
        map_format: One of MAP_FORMATS.
        expert_scale: Address of (E) float32.
        stream: The CUDA stream's handle; 0 is the default stream.
        cpu_threads: All addresses are host memory.

    Raises:
        ValueError: `dtype` or `map_format` is none of those.
        RuntimeError: The attributes do not go together, or the launch failed.
    """
    call = _RouterProbsCall(
        logits=logits,
        map=routing_map,
        expert_scale=expert_scale,
        grad_probs=grad_probs,
        grad_logits=grad_logits,
        **_router_probs_fields(config, rows, experts, dtype, map_format),
    )
    launch_or_run("router_probs_grad", call, stream, cpu_threads)


def router_scores(
    config: RouterScoresConfig,
    *,
    rows: int,
    experts: int,
    dtype: str,
    logits: int,
    scores: int,
    routing_map: int,
    map_format: str = "byte",
    stream: int = 0,
    cpu_threads: int | None = None,
) -> None:
    """Launches RouterScores.

    Args:
        config: The op's attributes.
        rows: T; 0 launches nothing.
        experts: E.
        dtype: Type of logits and scores: `float`, `float16` or `bfloat16`.
        logits: Address of (T, E) of dtype.
        scores: Address of (T, E) of dtype, written.
        routing_map: Address of the map, written.
        map_format: One of MAP_FORMATS.
        stream: The CUDA stream's handle; 0 is the default stream.
        cpu_threads: All addresses are host memory.

    Raises:
        ValueError: `dtype` or `map_format` is none of those.
        RuntimeError: The attributes do not go together, or the launch failed.
    """
    fields = _router_scores_fields(config, rows, experts, dtype)
    call = _RouterScoresCall(
        logits=logits, scores=scores, map=routing_map, map_format=_map_format_number(map_format), **fields
    )
    launch_or_run("router_scores", call, stream, cpu_threads)


def router_scores_grad(
    config: RouterScoresConfig,
    *,
    rows: int,
    experts: int,
    dtype: str,
    logits: int,
    grad_scores: int,
    grad_logits: int,
    stream: int = 0,
    cpu_threads: int | None = None,
) -> None:
    """Launches the gradient of RouterScores.

    Args:
        config: The op's attributes.
        rows: T; 0 launches nothing.
        experts: E.
        dtype: Type of the logits and of both gradients: `float`, `float16` or `bfloat16`.
        logits: Address of (T, E) of dtype.
        grad_scores: Address of (T, E) of dtype.
        grad_logits: Address of (T, E) of dtype, written.
        stream: The CUDA stream's handle; 0 is the default stream.
        cpu_threads: All addresses are host memory.

    Raises:
        ValueError: `dtype` is none of those.
        RuntimeError: The attributes do not go together, or the launch failed.
    """
    fields = _router_scores_fields(config, rows, experts, dtype)
    call = _RouterScoresCall(logits=logits, grad_scores=grad_scores, grad_logits=grad_logits, **fields)
    launch_or_run("router_scores_grad", call, stream, cpu_threads)


def aux_loss(
    config: AuxLossConfig,
    *,
    rows: int,
    experts: int,
    dtype: str,
    probs: int,
    tokens_per_expert: int,
    loss: int,
    count_type: str = "int64",
    total: int | None = None,
    total_type: str = "int64",
    scratch: int | None = None,
    stream: int = 0,
    cpu_threads: int | None = None,
) -> None:
    """Launches AuxLoss.

    Args:
        config: The op's attributes.
        rows: T; 0: the loss is 0.
        experts: E.
        dtype: Type of probs: `float`, `float16` or `bfloat16`.
        probs: Address of (T, E) of dtype.
        tokens_per_expert: Address of (E) of count_type.
        loss: Address of one float32, written.
        count_type: One of COUNT_TYPES.
        total: Address of one number of total_type; None: the attribute, or where that is 0 the rows.
        total_type: One of COUNT_TYPES.
        scratch: Address of `aux_loss_scratch_bytes` bytes on the device; none on the host.
        stream: The CUDA stream's handle; 0 is the default stream.
        cpu_threads: All addresses are host memory.

    Raises:
        ValueError: A type is none of those.
        RuntimeError: The attributes do not go together, or the launch failed.
    """
    fields = _aux_loss_fields(config, rows, experts, dtype, count_type, total_type)
    call = _AuxLossCall(
        probs=probs, tokens_per_expert=tokens_per_expert, total=total, loss=loss, scratch=scratch, **fields
    )
    launch_or_run("aux_loss", call, stream, cpu_threads)


def aux_loss_scratch_bytes(*, rows: int, experts: int, dtype: str) -> int:
    """Bytes of device memory that `aux_loss` needs for its length; may be 0."""
    call = _AuxLossCall(rows=rows, experts=experts, dtype=dtype_number(dtype))
    return scratch_bytes("aux_loss", call)


def aux_loss_grad(
    config: AuxLossConfig,
    *,
    rows: int,
    experts: int,
    dtype: str,
    tokens_per_expert: int,
    grad_loss: int,
    grad_probs: int,
    count_type: str = "int64",
    total: int | None = None,
    total_type: str = "int64",
    stream: int = 0,
    cpu_threads: int | None = None,
) -> None:
    """Launches the gradient of AuxLoss.

    Args:
        config: The op's attributes.
        rows: T; 0 launches nothing.
        experts: E.
        dtype: Type of the gradient of probs: `float`, `float16` or `bfloat16`.
        tokens_per_expert: Address of (E) of count_type.
        grad_loss: Address of one float32.
        grad_probs: Address of (T, E) of dtype, written.
        count_type: One of COUNT_TYPES.
        total: Address of one number of total_type; None: the attribute, or where that is 0 the rows.
        total_type: One of COUNT_TYPES.
        stream: The CUDA stream's handle; 0 is the default stream.
        cpu_threads: All addresses are host memory.

    Raises:
        ValueError: A type is none of those.
        RuntimeError: The attributes do not go together, or the launch failed.
    """
    fields = _aux_loss_fields(config, rows, experts, dtype, count_type, total_type)
    call = _AuxLossCall(
        tokens_per_expert=tokens_per_expert, total=total, grad_loss=grad_loss, grad_probs=grad_probs, **fields
    )
    launch_or_run("aux_loss_grad", call, stream, cpu_threads)


def _router_probs_fields(config: RouterConfig, rows: int, experts: int, dtype: str, map_format: str) -> dict[str, Any]:
    return {
        "rows": rows,
        "experts": experts,
        "k": config.k,
        "num_groups": config.num_groups,
        "topk_groups": config.topk_groups,
        "group_score_top": config.group_score_top,
        "dtype": dtype_number(dtype),
        "map_format": _map_format_number(map_format),
        "score": choice_number(ROUTER_PROBS, "score", config.score),
        "score_after_topk": config.score_after_topk,
        "bias_on": choice_number(ROUTER_PROBS, "bias_on", config.bias_on),
        "normalize": config.normalize,
        "group_fill": config.group_fill,
        "normalize_eps": config.normalize_eps,
        "normalize_min": config.normalize_min,
        "scale": config.scale,
        "softcap": config.softcap,
    }


def _router_scores_fields(config: RouterScoresConfig, rows: int, experts: int, dtype: str) -> dict[str, Any]:
    return {
        "rows": rows,
        "experts": experts,
        "k": config.k,
        "dtype": dtype_number(dtype),
        "score": choice_number(ROUTER_SCORES, "score", config.score),
        "normalize": config.normalize,
        "normalize_eps": config.normalize_eps,
        "softcap": config.softcap,
    }


def _aux_loss_fields(
    config: AuxLossConfig, rows: int, experts: int, dtype: str, count_type: str, total_type: str
) -> dict[str, Any]:
    return {
        "rows": rows,
        "experts": experts,
        "k": config.k,
        "total_tokens": config.total_tokens,
        "dtype": dtype_number(dtype),
        "count_type": _number("count_type", count_type, COUNT_TYPES),
        "total_type": _number("total_type", total_type, COUNT_TYPES),
        "coeff": config.coeff,
    }


def _map_format_number(map_format: str) -> int:
    return _number("map_format", map_format, MAP_FORMATS)


def _number(name: str, value: str, choices: tuple[str, ...]) -> int:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, but is {value!r}")
    return choices.index(value)

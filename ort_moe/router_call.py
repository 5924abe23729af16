"""What a router's launcher takes, by ctypes."""

from __future__ import annotations

import ctypes

from ort_moe.kernel_calls import MAPS, RoutingMaps, addresses, choice_number, dtype_number
from ort_moe.ops import FUSED_ROUTER
from ort_moe.router_config import RouterConfig


class FusedRouterCall(ctypes.Structure):
    """OrtMoeFusedRouterCall of custom_ops/kernels/fused_router_call.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "selection_bias", "expert_scale", "weights", "indices")),
        *((name, ctypes.c_void_p) for name in (*MAPS, "scratch")),
        *((n, ctypes.c_int64) for n in ("rows", "experts", "k", "num_groups", "topk_groups", "group_score_top")),
        *((n, ctypes.c_int32) for n in ("dtype", "score", "score_after_topk", "bias_on", "weights_from", "normalize")),
        *((name, ctypes.c_float) for name in ("mixer_threshold", "group_fill", "normalize_eps", "normalize_min")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    )


def fused_router_call(
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
) -> FusedRouterCall:
    """The structure of a call; the arguments are those of `ort_moe.kernels.fused_router`.

    Raises:
        ValueError: `dtype` is none of the three.
    """
    return FusedRouterCall(
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

"""Routers in training as functions of tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ort_moe.torch import library_ops


class RouterProbs(NamedTuple):
    """What `router_probs` returns.

    Attributes:
        probs: (..., E) of the type of the logits: the weights of the chosen, zero elsewhere.
        routing_map: (..., E) bool, or as bits (..., ceil(E / 8)) uint8, expert e in bit e mod 8 of byte e / 8.
        indices: (..., K) int32 in rank order; None unless asked for.
    """

    probs: torch.Tensor
    routing_map: torch.Tensor
    indices: torch.Tensor | None


class RouterScores(NamedTuple):
    """What `router_scores` returns.

    Attributes:
        scores: (..., E) of the type of the logits.
        routing_map: (..., E) bool, or as bits (..., ceil(E / 8)) uint8.
    """

    scores: torch.Tensor
    routing_map: torch.Tensor


def router_probs(
    logits: torch.Tensor,
    k: int,
    *,
    score: str = "softmax",
    selection_bias: torch.Tensor | None = None,
    expert_scale: torch.Tensor | None = None,
    score_after_topk: bool = False,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_score_top: int = 1,
    group_fill: float = -math.inf,
    normalize: bool = False,
    normalize_eps: float = 0.0,
    normalize_min: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
    map_format: str = "byte",
    with_indices: bool = False,
) -> RouterProbs:
    """Chooses k experts a row as FusedRouter does; its weights stand at the places of the chosen.

    Differentiable in logits and expert_scale. The keywords but the last two are the attributes of RouterProbs in the
    op reference.

    Args:
        logits: (..., E) float32, float16 or bfloat16.
        k: Experts chosen a row.
        score: `softmax`, `sigmoid`, `sqrtsoftplus` or `none`.
        selection_bias: (E) float32, added to the keys for the choice; it gets no gradient.
        expert_scale: (E) float32, multiplies the weights.
        score_after_topk: Rank the logits, then score the chosen alone.
        num_groups: Groups of neighbouring experts.
        topk_groups: Groups kept.
        group_score_top: Best keys whose sum is the score of a group.
        group_fill: Key of the experts outside the kept groups: -inf or 0.
        normalize: Divide the weights by their sum + normalize_eps, at least normalize_min.
        normalize_eps: See normalize.
        normalize_min: See normalize.
        scale: Multiplies every weight.
        softcap: Soft cap of the logits; 0: none.
        map_format: `byte` or `bit`.
        with_indices: Also return the indices.

    Raises:
        ValueError: A tensor or an option is not what the op takes.
    """
    attributes = library_ops.in_order(
        library_ops.PROBS_ATTRIBUTES,
        {
            "k": k,
            "score": score,
            "score_after_topk": int(score_after_topk),
            "bias_on": "score",
            "num_groups": num_groups,
            "topk_groups": topk_groups,
            "group_score_top": group_score_top,
            "group_fill": group_fill,
            "normalize": int(normalize),
            "normalize_eps": normalize_eps,
            "normalize_min": normalize_min,
            "scale": scale,
            "softcap": softcap,
            "map_format": map_format,
        },
    )
    indices: torch.Tensor | None = None
    if with_indices:
        results = torch.ops.ort_moe.router_probs_indices(logits, selection_bias, expert_scale, *attributes)
        probs, routing_map, indices = results
    else:
        probs, routing_map = torch.ops.ort_moe.router_probs(logits, selection_bias, expert_scale, *attributes)
    return RouterProbs(probs, routing_map, indices)


def router_scores(
    logits: torch.Tensor,
    k: int,
    *,
    score: str = "softmax",
    normalize: bool = False,
    normalize_eps: float = 0.0,
    softcap: float = 0.0,
    map_format: str = "byte",
) -> RouterScores:
    """The scores of all experts that an auxiliary loss balances, and which are the k best of a row.

    Differentiable in logits. The keywords but the last are the attributes of RouterScores in the op reference.

    Args:
        logits: (..., E) float32, float16 or bfloat16.
        k: Experts marked a row.
        score: `softmax`, `sigmoid` or `sqrtsoftplus`.
        normalize: Divide the scores by their sum + normalize_eps.
        normalize_eps: See normalize.
        softcap: Soft cap of the logits; 0: none.
        map_format: `byte` or `bit`.

    Raises:
        ValueError: A tensor or an option is not what the op takes.
    """
    attributes = library_ops.in_order(
        library_ops.SCORES_ATTRIBUTES,
        {
            "k": k,
            "score": score,
            "normalize": int(normalize),
            "normalize_eps": normalize_eps,
            "softcap": softcap,
            "map_format": map_format,
        },
    )
    return RouterScores(*torch.ops.ort_moe.router_scores(logits, *attributes))


def aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    *,
    k: int,
    coeff: float,
    total: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss that balances the load of experts.

    C * sum_e (sum_t probs[t, e]) * tokens_per_expert[e], C = E * coeff / (k * total^2).
    Differentiable in probs. The same bits from run to run: no atomics.

    Args:
        probs: (..., E) float32, float16 or bfloat16: scores of the experts.
        tokens_per_expert: (E) int32, int64 or float32: tokens that chose each.
        k: Experts chosen a token.
        coeff: Weight of the loss.
        total: Tokens in all; a tensor of one number is read on its device. None: the rows of probs.

    Returns:
        A scalar, float32.

    Raises:
        ValueError: A tensor or an option is not what the op takes.
    """
    on_device = total if isinstance(total, torch.Tensor) else None
    tokens = 0 if total is None or isinstance(total, torch.Tensor) else total
    loss: torch.Tensor = torch.ops.ort_moe.aux_loss(probs, tokens_per_expert, on_device, k, coeff, tokens)
    return loss

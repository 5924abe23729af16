"""A router in plain PyTorch operations, in the type of its logits: what gradients and trainings are compared with."""

from __future__ import annotations

import math
from typing import Any

import torch

SCORES = {
    "softmax": lambda x: torch.softmax(x, -1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda x: torch.nn.functional.softplus(x).sqrt(),
    "none": lambda x: x,
}


def plain_router(
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
    normalize: bool = False,
    normalize_eps: float = 0.0,
    normalize_min: float = 0.0,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense weights (T, E) and the map, as the op reference has them; logits without ties."""
    x = softcap * torch.tanh(logits / softcap) if softcap else logits
    scores = x if score_after_topk else SCORES[score](x)
    keys = scores.detach()
    if selection_bias is not None:
        keys = keys + selection_bias
    if topk_groups < num_groups:
        grouped = keys.unflatten(-1, (num_groups, -1))
        best = grouped.topk(group_score_top, -1).values.sum(-1).topk(topk_groups, -1).indices
        kept = torch.zeros(grouped.shape[:-1], dtype=torch.bool).scatter(-1, best, True)
        keys = grouped.masked_fill(~kept[..., None], -math.inf).flatten(-2)
    chosen = keys.topk(k, -1).indices
    weights = scores.gather(-1, chosen)
    if score_after_topk:
        weights = SCORES[score](weights)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + normalize_eps).clamp_min(normalize_min)
    weights = weights * scale
    if expert_scale is not None:
        weights = weights * expert_scale.to(weights.dtype)[chosen]
    return torch.zeros_like(x).scatter(-1, chosen, weights), torch.zeros_like(x, dtype=torch.bool).scatter(
        -1, chosen, True
    )


def plain_scores(logits: torch.Tensor, score: str, normalize: bool, normalize_eps: float) -> torch.Tensor:
    """The scores of full rows."""
    scores = SCORES[score](logits)
    return scores / (scores.sum(-1, keepdim=True) + normalize_eps) if normalize else scores


def plain_loss(probs: torch.Tensor, counts: torch.Tensor, k: int, coeff: float, total: Any) -> torch.Tensor:
    """The auxiliary loss."""
    return probs.shape[-1] * coeff / (k * total**2) * (probs.sum(0) * counts).sum()

"""A router as a module."""

from __future__ import annotations

from typing import Any

import torch

from ort_moe.torch.functions import RouterProbs, router_probs


class Router(torch.nn.Module):
    """Logits of experts by a matrix, and `router_probs` of them.

    Attributes:
        weight: (E, H), learned.
        selection_bias: (E) float32, a buffer that a load balancer may move, or None.
    """

    selection_bias: torch.Tensor | None

    def __init__(self, hidden: int, experts: int, k: int, *, has_selection_bias: bool = False, **options: Any) -> None:
        """Makes a router.

        Args:
            hidden: H.
            experts: E.
            k: Experts chosen a token.
            has_selection_bias: Whether there is a bias for the choice, zero at first.
            **options: Further keywords of `router_probs`.
        """
        super().__init__()
        self.k, self.options = k, options
        self.weight = torch.nn.Parameter(torch.randn(experts, hidden) * hidden**-0.5)
        self.register_buffer("selection_bias", torch.zeros(experts) if has_selection_bias else None)

    def forward(self, x: torch.Tensor) -> RouterProbs:
        """Routes tokens (..., H)."""
        logits = torch.nn.functional.linear(x, self.weight)
        return router_probs(logits, self.k, selection_bias=self.selection_bias, **self.options)

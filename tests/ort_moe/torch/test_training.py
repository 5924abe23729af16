"""A small mixture of experts, trained with our router and with plain PyTorch operations, ends alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import ort_moe.torch as moe
from tests.ort_moe.torch.plain_router import plain_loss, plain_router

pytestmark = pytest.mark.export

TOKENS, HIDDEN, INNER, EXPERTS, K, STEPS = 64, 16, 16, 8, 2, 100
COEFF = 0.02
OPTIONS = {"score": "sigmoid", "normalize": True, "normalize_eps": 1e-20}

Routing = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def ours(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and auxiliary loss by our ops."""
    routed = moe.router_probs(logits, K, **OPTIONS)
    scores = moe.router_scores(logits, K, **OPTIONS)
    return routed.probs, moe.aux_loss(scores.scores, routed.routing_map.sum(0), k=K, coeff=COEFF)


def plain(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and auxiliary loss by PyTorch's operations."""
    probs, routing_map = plain_router(logits, K, **OPTIONS)
    scores = torch.sigmoid(logits)
    scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    return probs, plain_loss(scores, routing_map.sum(0), K, COEFF, len(logits))


def train(routing: Routing) -> tuple[list[float], torch.Tensor]:
    """The losses of the steps, and the router's matrix behind them."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    gate = (random(EXPERTS, HIDDEN) * HIDDEN**-0.5).requires_grad_()
    fc1 = (random(EXPERTS, HIDDEN, INNER) * HIDDEN**-0.5).requires_grad_()
    fc2 = (random(EXPERTS, INNER, HIDDEN) * INNER**-0.5).requires_grad_()
    # A teacher of the same shape: what is learned depends on which expert a token goes to.
    centres, maps = random(EXPERTS, HIDDEN), random(EXPERTS, HIDDEN, HIDDEN) * HIDDEN**-0.5
    optimizer = torch.optim.Adam((gate, fc1, fc2), lr=0.01)
    losses = []
    for _ in range(STEPS):
        x = random(TOKENS, HIDDEN)
        target = torch.einsum("th,thi->ti", x, maps[(x @ centres.T).argmax(-1)])
        probs, balance = routing(x @ gate.T)
        inner = torch.relu(torch.einsum("th,ehi->tei", x, fc1))
        y = torch.einsum("te,tei,eih->th", probs, inner, fc2)
        loss = torch.nn.functional.mse_loss(y, target) + balance
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, gate.detach()


def test_a_hundred_steps_end_alike() -> None:
    our_losses, our_gate = train(ours)
    plain_losses, plain_gate = train(plain)
    assert our_losses[-1] < 0.8 * our_losses[0]
    assert our_losses == pytest.approx(plain_losses, rel=1e-3)
    torch.testing.assert_close(our_gate, plain_gate, rtol=0.0, atol=2e-3)

"""How tokens fall upon experts in a benchmark: logits whose choices are even, by Zipf's law, or onto one expert."""

from __future__ import annotations

import torch

LOADS = ("uniform", "zipf", "one")
"""uniform: every expert is as likely; zipf: the n-th most popular expert 1 / n as likely as the first; one: every token
chooses one expert first, and the others evenly."""

_FAR = 8.0
"""Above all logits that are drawn otherwise."""


def draw_logits(load: str, logits: torch.Tensor, seed: int) -> None:
    """Draws the logits of every layer anew: its tokens go elsewhere.

    Args:
        load: One of LOADS.
        logits: (layers, T, E), written.
        seed: Of the draw; the same for the same device.
    """
    device = logits.device
    generator = torch.Generator(device).manual_seed(seed)
    layers, _, experts = logits.shape
    if load == "uniform":
        logits.copy_(torch.randn(logits.shape, generator=generator, device=device))
        return
    places = torch.rand(layers, 1, experts, generator=generator, device=device).argsort(-1)
    if load == "one":
        logits.copy_(torch.randn(logits.shape, generator=generator, device=device))
        logits.masked_fill_(places == 0, _FAR)
    elif load == "zipf":
        # The largest of log p + Gumbel noise are a draw without replacement by p.
        uniform = torch.rand(logits.shape, generator=generator, device=device).clamp_(1e-7, 1.0 - 1e-7)
        logits.copy_(-torch.log(places + 1.0) - torch.log(-torch.log(uniform)))
    else:
        raise ValueError(f"load must be one of {', '.join(LOADS)}, but is {load!r}")

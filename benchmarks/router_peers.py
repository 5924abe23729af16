"""Times of the routers and builders of maps that other projects installed here, on logits such as ours."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from benchmarks import peers
from benchmarks.output import Measured
from benchmarks.router_works import Buffers, Shape, router_buffers


class Rows:
    """The buffers as tensors of rows, as peers take them."""

    def __init__(self, buffers: Buffers) -> None:
        tokens, experts, k = buffers.tokens, buffers.shape.experts, buffers.shape.k
        self.bias = buffers.bias
        self.logits, self.weights, self.indices = (
            array[:, : tokens * width].unflatten(1, (tokens, width))
            for array, width in ((buffers.logits, experts), (buffers.weights, k), (buffers.indices, k))
        )
        self.own_weights, self.own_indices = torch.empty_like(self.weights), torch.empty_like(self.indices)
        self.kept: dict[int, Any] = {}  # what peers return, so that no two of a graph's launches write to one place

    def route(self, n: int, _: int, call: peers.Route) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs a peer's router on call n."""
        self.kept[n] = call(self.logits[n], self.bias, self.own_weights[n], self.own_indices[n])
        chosen: tuple[torch.Tensor, torch.Tensor] = self.kept[n]
        return chosen

    def wrong(self, call: peers.Route) -> float:
        """The share of call 0's rows in which a peer does not choose as good experts as ours, or weighs them apart."""
        weights, indices = self.route(0, 0, call)
        logits = self.logits[0].float()
        keys = logits if self.bias is None else torch.sigmoid(logits) + self.bias
        right = torch.ones(len(keys), dtype=torch.bool, device="cuda")
        pairs = [(keys.gather(1, indices.long()), keys.gather(1, self.indices[0].long())), (weights, self.weights[0])]
        for theirs, ours in pairs:
            in_order = (each.sort(dim=1).values for each in (theirs, ours))
            right &= torch.isclose(*in_order, rtol=1e-3, atol=1e-6).all(1)
        return 1 - float(right.float().mean())


@functools.cache
def routers_beside(shape: Shape, tokens: int, compiled: bool) -> tuple[Measured, ...]:
    """What the routers that are here take, and how often they are wrong.

    Args:
        shape: Without maps.
        tokens: T.
        compiled: PyTorch's ops compiled, too.
    """
    buffers = router_buffers(shape, tokens)
    buffers.launch(0, torch.cuda.current_stream().cuda_stream)
    rows = Rows(buffers)
    measured: list[Measured] = []
    for peer in peers.routers(shape.k, shape.attributes, compiled):
        launch = functools.partial(rows.route, call=peer.call)
        wrong = functools.partial(rows.wrong, peer.call)
        measured += peers.measure(peer.name, peer.version, launch, wrong, launches=buffers.count)
    return tuple(measured)


def pairs_beside(shape: Shape, tokens: int, compiled: bool) -> tuple[Measured, ...]:
    """The same of the fastest router and, behind it, each builder of maps that is here."""
    times = routers_beside(replace(shape, maps=False, peer={}), tokens, compiled)
    if not times:
        return ()
    best = min(times, key=lambda peer: peer.us)
    (route,) = (each.call for each in peers.routers(shape.k, shape.attributes, compiled) if each.name == best.name)
    rows = Rows(router_buffers(shape, tokens))
    measured: list[Measured] = []

    def launch(n: int, stream: int, align: peers.Align) -> tuple[torch.Tensor, ...]:
        weights, indices = rows.route(n, stream, route)
        built = align(indices, shape.experts)
        rows.kept[n] = (weights, indices, *built)
        return indices, *built

    def wrong(align: peers.Align) -> float:
        return max(best.wrong, _misplaced(*launch(0, 0, align)))

    for builder in peers.aligners(tokens * shape.k, shape.experts):
        name, align = f"{best.label} + {builder.name}", builder.call
        call, check = functools.partial(launch, align=align), functools.partial(wrong, align)
        measured += peers.measure(name, builder.version, call, check, launches=len(rows.logits))
    return tuple(measured)


def _misplaced(indices: torch.Tensor, order: torch.Tensor, experts: torch.Tensor, used: torch.Tensor) -> float:
    """The share of choices that do not stand in a block of their expert."""
    order = order[: int(used[0])]
    stands = order < indices.numel()
    expert = experts.repeat_interleave(peers.ALIGNED)[: len(order)]
    return 1 - float((indices.flatten()[order[stands]] == expert[stands]).sum()) / indices.numel()

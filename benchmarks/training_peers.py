"""Times of TransformerEngine and of PyTorch's ops on the calls of training, where they are installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import peers, transformer_engine
from benchmarks.output import Measured
from benchmarks.peers import COMPILED, PYTORCH
from benchmarks.training_buffers import COEFF, Buffers
from benchmarks.training_works import Work

Tensor = torch.Tensor
Call = Callable[[int, int], Any]
Results = Callable[[], tuple[Tensor, ...]]
LAUNCHES, REPEATS = 24, 7
EPS = 1e-20


def beside(buffers: Buffers, *, compiled: bool) -> list[Measured]:
    """What those that are here take on the same arrays, and the share of rows that they get wrong.

    Args:
        buffers: Of a work with random logits; ours has run on the first of them.
        compiled: PyTorch's ops by torch.compile, too.
    """
    measured: list[Measured] = []
    for name, version, call, results in _peers(buffers, compiled):

        def launch(n: int, stream: int, call: Call = call) -> None:
            call(n % buffers.count, stream)

        def wrong(call: Call = call, results: Results = results) -> float:
            call(0, torch.cuda.current_stream().cuda_stream)
            return wrong_rows(buffers, *results())

        measured += peers.measure(name, version, launch, wrong, launches=LAUNCHES, repeats=REPEATS)
    return measured


def _peers(buffers: Buffers, compiled: bool) -> Iterator[tuple[str, str, Call, Results]]:
    """Name, version, call, and what gives the results of call 0."""
    found = transformer_engine.library()
    if found is not None:
        yield transformer_engine.NAME, found[1], *_transformer_engine(buffers)
    ops = pytorch_ops(buffers.work)
    kept: dict[int, tuple[Tensor, ...]] = {}

    def run(run_ops: Callable[..., tuple[Tensor, ...]]) -> tuple[Call, Results]:
        def call(n: int, _: int) -> None:
            kept[n] = run_ops(*_inputs(buffers, n))

        return call, lambda: kept[0]

    yield PYTORCH, torch.__version__, *run(ops)
    if compiled:
        yield COMPILED, torch.__version__, *run(torch.compile(ops, dynamic=False))


# --- TransformerEngine ---


def _transformer_engine(buffers: Buffers) -> tuple[Call, Results]:
    work, attributes = buffers.work, buffers.work.attributes
    if work.op.startswith("loss"):
        losses = [
            transformer_engine.Loss(buffers.logits[n], buffers.counts, k=work.k, coeff=COEFF)
            for n in range(buffers.count)
        ]
        for loss in losses:
            loss.forward(torch.cuda.current_stream().cuda_stream)
        if work.op == "loss":
            return lambda n, stream: losses[n].forward(stream), lambda: (losses[0].loss,)
        return lambda n, stream: losses[n].backward(stream), lambda: (losses[0].grad_out,)
    routers = [
        transformer_engine.Router(
            buffers.logits[n],
            buffers.grad[n],
            k=work.k,
            score=transformer_engine.SOFTMAX if attributes["score"] == "softmax" else transformer_engine.SIGMOID,
            after_topk=bool(attributes.get("score_after_topk", 0)),
            scale=float(attributes.get("scale", 1.0)),
            bias=buffers.bias if work.scoring == "sigmoid + bias" else None,
        )
        for n in range(buffers.count)
    ]
    kind, _, grad = work.op.partition(" ")
    if grad:
        for router in routers:
            getattr(router, kind)(torch.cuda.current_stream().cuda_stream)
    name = f"{kind}_grad" if grad else kind
    out = "grad_out" if grad else "out"
    return (
        lambda n, stream: getattr(routers[n], name)(stream),
        lambda: (getattr(routers[0], out), routers[0].map),
    )


# --- PyTorch ---


def _inputs(buffers: Buffers, n: int) -> tuple[Tensor, ...]:
    x, grad, chosen = buffers.logits[n], buffers.grad[n], buffers.map[n]
    return {
        "probs": (x, buffers.bias),
        "probs grad": (x, grad, chosen),
        "scores": (x,),
        "scores grad": (x, grad),
        "loss": (x, buffers.counts),
        "loss grad": (x, buffers.counts, buffers.loss),
    }[buffers.work.op]


def pytorch_ops(work: Work) -> Callable[..., tuple[Tensor, ...]]:
    """The work in PyTorch's ops, in float32 between the ends."""
    k, softmax = work.k, work.attributes.get("score") == "softmax"
    scale = float(work.attributes.get("scale", 1.0))
    factor = work.experts * COEFF / (k * work.tokens**2)

    def spread(x: Tensor, ids: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        chosen = torch.zeros_like(x, dtype=torch.uint8).scatter_(1, ids, 1)
        return torch.zeros_like(x).scatter_(1, ids, values.to(x.dtype)), chosen

    def probs(x: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        if work.scoring == "softmax of the chosen":
            best, ids = x.topk(k, dim=-1)
            return spread(x, ids, torch.softmax(best, dim=-1, dtype=torch.float32))
        if work.scoring == "softmax of all":
            best, ids = torch.softmax(x, dim=-1, dtype=torch.float32).topk(k, dim=-1)
            return spread(x, ids, best)
        s = torch.sigmoid(x.float())
        ids = (s + bias).topk(k, dim=-1).indices
        values = s.gather(1, ids)
        return spread(x, ids, scale * values / (values.sum(-1, keepdim=True) + EPS))

    def probs_grad(x: Tensor, grad: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
        stays = chosen.bool()
        g = scale * grad.float().masked_fill(~stays, 0.0)
        if softmax:
            among = x if work.scoring == "softmax of all" else x.masked_fill(~stays, -torch.inf)
            p = torch.softmax(among, dim=-1, dtype=torch.float32)
            return ((p * (g - (g * p).sum(-1, keepdim=True))).to(x.dtype),)
        s = torch.sigmoid(x.float())
        return (_share_grad(s, g, s * stays).masked_fill(~stays, 0.0).to(x.dtype),)

    def scores(x: Tensor) -> tuple[Tensor, ...]:
        chosen = torch.zeros_like(x, dtype=torch.uint8).scatter_(1, x.topk(k, dim=-1).indices, 1)
        if softmax:
            return torch.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype), chosen
        s = torch.sigmoid(x.float())
        return (s / (s.sum(-1, keepdim=True) + EPS)).to(x.dtype), chosen

    def scores_grad(x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        g = grad.float()
        if softmax:
            p = torch.softmax(x, dim=-1, dtype=torch.float32)
            return ((p * (g - (g * p).sum(-1, keepdim=True))).to(x.dtype),)
        s = torch.sigmoid(x.float())
        return (_share_grad(s, g, s).to(x.dtype),)

    def loss(x: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        return (factor * (x.sum(0, dtype=torch.float32) * counts).sum(),)

    def loss_grad(x: Tensor, counts: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        return ((factor * grad * counts).to(x.dtype).expand(x.shape).contiguous(),)

    return {
        "probs": probs,
        "probs grad": probs_grad,
        "scores": scores,
        "scores grad": scores_grad,
        "loss": loss,
        "loss grad": loss_grad,
    }[work.op]


def _share_grad(s: Tensor, grad: Tensor, shared: Tensor) -> Tensor:
    """The gradient with regard to x of sigmoid values' shares in the sum of some of them."""
    total = shared.sum(-1, keepdim=True) + EPS
    return s * (1 - s) * (grad / total - (grad * shared).sum(-1, keepdim=True) / total**2)


# --- Are they right? ---


def wrong_rows(buffers: Buffers, out: Tensor, chosen: Tensor | None = None) -> float:
    """The share of rows, or of the one loss, in which a peer's results on call 0 are not ours.

    A peer may choose another of several that rank alike.

    Args:
        buffers: Ours has run on their first arrays.
        out: What the peer wrote.
        chosen: The map it wrote or read, if any.
    """
    work, ours = buffers.work, buffers.loss_out if buffers.work.op == "loss" else buffers.out[0]
    digits = {"rtol": 1e-3, "atol": 1e-6} if work.dtype == "float" else {"rtol": 2e-2, "atol": 1e-3}

    def close(theirs: Tensor, mine: Tensor) -> Tensor:
        return (
            torch.isclose(theirs.float(), mine.float(), **digits).reshape(len(theirs) if theirs.dim() else 1, -1).all(1)
        )

    if work.op in ("probs", "scores"):
        assert chosen is not None
        keys = torch.sigmoid(buffers.logits[0].float()) + (buffers.bias if work.scoring == "sigmoid + bias" else 0.0)
        kept = (torch.where(each.bool(), keys, -torch.inf).sort(dim=1).values for each in (chosen, buffers.map[0]))
        right = close(*kept)
        right &= close(out.sort(dim=1).values, ours.sort(dim=1).values)
    else:
        right = close(out, ours.reshape(out.shape))
        if work.op == "probs grad" and chosen is not None:
            right |= (chosen != buffers.map[0]).any(1)
    return 1 - float(right.float().mean())

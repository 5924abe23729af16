"""RouterProbs, RouterScores, AuxLoss and their gradients against the peer's recorded times and against the memory.

    python -m benchmarks.training_router [--json OUT] [--only 512/22]

Times per call in a CUDA graph of many, replayed from a cold cache, every call on its own buffers as far as memory goes,
in us. "Shape" is a kernel that reads and writes the same arrays and computes nothing of use, timed beside ours; a
gradient of ours that reads only what the map marks may be faster. The peer is TransformerEngine, as recorded once on an
H200 in graphs from a cold cache; not run here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import timing
from benchmarks.output import beside_peer, publish
from benchmarks.timing import TORCH_TYPES
from benchmarks.training_works import Work, works
from ort_moe.kernels import training
from ort_moe.training_config import AuxLossConfig, RouterScoresConfig, router_probs_config

PEER = "TransformerEngine"
BUFFER_BYTES = 600 << 20  # of all buffers of a graph: many times the L2 cache


def logits_of(work: Work, count: int) -> torch.Tensor:
    """(count, T, E) of the texture."""
    x = torch.randn(count, work.tokens, work.experts, device="cuda")
    if work.texture == "sorted":
        x = x.sort(dim=-1).values
    elif work.texture == "equal":
        x.fill_(0.25)
    elif work.texture == "ties":
        x = (x * 2).round() / 2
    elif work.texture == "nan":
        x[:, ::2, 5] = torch.nan
    return x.to(TORCH_TYPES[work.dtype])


class Buffers:
    """Arrays of `count` independent calls of one work."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.count = max(3, min(64, BUFFER_BYTES // work.given_bytes))
        shape, dtype = (self.count, work.tokens, work.experts), TORCH_TYPES[work.dtype]
        self.logits = logits_of(work, self.count)
        self.grad = torch.randn(shape, device="cuda").to(dtype)
        self.out = torch.empty(shape, dtype=dtype, device="cuda")
        self.map = torch.empty(shape, dtype=torch.uint8, device="cuda")
        self.bias = torch.randn(work.experts, device="cuda") * 0.1
        self.counts = torch.randint(0, 100, (work.experts,), device="cuda", dtype=torch.int64)
        self.loss = torch.ones(1, device="cuda")
        self.scratch = torch.empty(4096, dtype=torch.uint8, device="cuda")
        if work.op == "probs grad":
            for n in range(self.count):
                self.probs(n, torch.cuda.current_stream().cuda_stream)

    @property
    def sizes(self) -> dict[str, Any]:
        return {"rows": self.work.tokens, "experts": self.work.experts, "dtype": self.work.dtype}

    def launch(self, n: int, stream: int) -> None:
        """Runs call n."""
        calls: dict[str, Callable[[int, int], None]] = {
            "probs": self.probs,
            "probs grad": self.probs_grad,
            "scores": self.scores,
            "scores grad": self.scores_grad,
            "loss": self.aux_loss,
            "loss grad": self.aux_loss_grad,
        }
        calls[self.work.op](n % self.count, stream)

    def probs(self, n: int, stream: int) -> None:
        training.router_probs(
            router_probs_config(self.work.attributes),
            **self.sizes,
            logits=self.logits[n].data_ptr(),
            probs=self.out[n].data_ptr(),
            routing_map=self.map[n].data_ptr(),
            selection_bias=self.bias.data_ptr() if self.work.scoring == "sigmoid + bias" else None,
            stream=stream,
        )

    def probs_grad(self, n: int, stream: int) -> None:
        training.router_probs_grad(
            router_probs_config(self.work.attributes),
            **self.sizes,
            logits=self.logits[n].data_ptr(),
            routing_map=self.map[n].data_ptr(),
            grad_probs=self.grad[n].data_ptr(),
            grad_logits=self.out[n].data_ptr(),
            stream=stream,
        )

    def scores(self, n: int, stream: int) -> None:
        training.router_scores(
            RouterScoresConfig.from_attributes(self.work.attributes),
            **self.sizes,
            logits=self.logits[n].data_ptr(),
            scores=self.out[n].data_ptr(),
            routing_map=self.map[n].data_ptr(),
            stream=stream,
        )

    def scores_grad(self, n: int, stream: int) -> None:
        training.router_scores_grad(
            RouterScoresConfig.from_attributes(self.work.attributes),
            **self.sizes,
            logits=self.logits[n].data_ptr(),
            grad_scores=self.grad[n].data_ptr(),
            grad_logits=self.out[n].data_ptr(),
            stream=stream,
        )

    def _loss(self) -> dict[str, Any]:
        counts = {"tokens_per_expert": self.counts.data_ptr(), "count_type": "int64"}
        return {"config": AuxLossConfig.from_attributes({"k": self.work.k, "coeff": 1e-2}), **self.sizes, **counts}

    def aux_loss(self, n: int, stream: int) -> None:
        loss: dict[str, Any] = {"loss": self.loss.data_ptr(), "scratch": self.scratch.data_ptr()}
        training.aux_loss(**self._loss(), probs=self.logits[n].data_ptr(), **loss, stream=stream)

    def aux_loss_grad(self, n: int, stream: int) -> None:
        grads: dict[str, Any] = {"grad_loss": self.loss.data_ptr(), "grad_probs": self.out[n].data_ptr()}
        training.aux_loss_grad(**self._loss(), **grads, stream=stream)

    def move(self, n: int, stream: int) -> None:
        """Runs the kernel that moves the arrays of call n, on torch's current stream."""
        from benchmarks.moving import move

        n %= self.count
        arrays = (self.logits[n], self.grad[n])[: self.work.reads]
        maps = {"probs": (None, self.map[n]), "scores": (None, self.map[n]), "probs grad": (self.map[n], None)}
        map_in, map_out = maps.get(self.work.op, (None, None))
        move(arrays, map_in, self.out[n] if self.work.writes else None, map_out)


def measure(work: Work, copy_gbps: float, *, with_shape: bool) -> dict[str, Any]:
    """One row of the results."""
    buffers = Buffers(work)
    launches = max(24, buffers.count)
    ours = timing.graph_time(buffers.launch, launches=launches, repeats=9)
    shape = timing.graph_time(buffers.move, launches=launches, repeats=9) if with_shape else None
    return {
        "shape": work.name,
        "tokens": work.tokens,
        "ours_us": round(ours, 2),
        "shape_us": None if shape is None else round(shape, 2),
        **beside_peer(ours, None if work.peer_us is None else (work.peer_us, PEER), work.moved_bytes, copy_gbps),
    }


COLUMNS = {
    "call": "shape",
    "T": "tokens",
    "ours": "ours_us",
    "shape": "shape_us",
    "peer": "peer_us",
    "ours/peer": "ratio_to_peer",
    "GB/s": "gbps",
    "% of copy": "percent_of_copy",
}


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--json", type=Path, metavar="OUT", help="also write the results here")
    options.add_argument("--only", help="works whose name contains this")
    args = options.parse_args()
    timing.require_gpu()
    torch.manual_seed(0)
    copy_gbps = timing.copy_bandwidth()
    rows: list[dict[str, Any]] = []
    shapes: dict[tuple[str, int], float | None] = {}
    for work in works():
        if args.only is not None and args.only not in work.name:
            continue
        alike = (work.op.split()[-1], work.given_bytes)  # moves the same
        row = measure(work, copy_gbps, with_shape=alike not in shapes and work.texture == "random")
        row["shape_us"] = shapes.setdefault(alike, row["shape_us"])
        rows.append(row)
    publish(rows, COLUMNS, timing.environment() | {"copy_gbps": round(copy_gbps, 1)}, args.json)


if __name__ == "__main__":
    main()

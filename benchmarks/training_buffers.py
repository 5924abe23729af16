"""Arrays of the calls that the benchmark of the training ops times, and our launches on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.timing import TORCH_TYPES
from benchmarks.training_works import Work
from ort_moe.kernels import training
from ort_moe.ops.training_config import AuxLossConfig, RouterScoresConfig, router_probs_config

BUFFER_BYTES = 600 << 20  # of all buffers of a graph: many times the L2 cache
COEFF = 1e-2


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
        self.loss = torch.ones(1, device="cuda")  # its gradient
        self.loss_out = torch.zeros(1, device="cuda")
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
        return {"config": AuxLossConfig.from_attributes({"k": self.work.k, "coeff": COEFF}), **self.sizes, **counts}

    def aux_loss(self, n: int, stream: int) -> None:
        loss: dict[str, Any] = {"loss": self.loss_out.data_ptr(), "scratch": self.scratch.data_ptr()}
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

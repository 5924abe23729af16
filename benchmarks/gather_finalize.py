"""GatherFinalize beside a gather and a FinalizeRouting, the peers installed, and a kernel that moves the same bytes.

    python -m benchmarks.gather_finalize [--json OUT] [--tokens 1 64] [--only 128/8/7168]

Times per launch in a CUDA graph of many, replayed from a cold cache, every launch on its own buffers as far as memory
goes, in us:
- ours: one GatherFinalize from the masked layout of all experts;
- pair: PyTorch's index_select of the rows in use into permuted order, given their places, and our FinalizeRouting;
- moving: a kernel that reads and writes as many bytes as ours;
- peer: the faster of vLLM's finalize and PyTorch's embedding_bag, each given the row of every choice in the masked
  layout, where they are installed, and of what is published for a kernel like ours on another GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import command, peers, timing
from benchmarks.moving import moving_time
from benchmarks.output import Measured, beside_peer
from ort_moe import kernels
from ort_moe.reference.gather_finalize import gather_finalize

TOKENS = (1, 4, 16, 32, 64)
MANY_TOKENS = 8192
MAX_LAUNCHES = 100
MAX_ROW_BYTES = 4 << 30  # of all buffers of a graph
PUBLISHED = (10.0, "published for a B200: 10 to 16 us")
FAR = 0.02  # of a row's norm: further from ours than bfloat16 explains


@dataclass(frozen=True)
class Shape:
    """A row of the table in bfloat16: E/K/H."""

    experts: int
    k: int
    hidden: int

    @property
    def name(self) -> str:
        return f"{self.experts}/{self.k}/{self.hidden} bfloat16"

    def bytes_read(self, tokens: int) -> int:
        return tokens * self.k * (self.hidden * 2 + 12) + self.experts * 8

    def bytes_written(self, tokens: int) -> int:
        return tokens * self.hidden * 2


SHAPES = tuple(Shape(experts, k, hidden) for experts in (64, 128) for k in (4, 8) for hidden in (4096, 7168))


class Buffers:
    """Rows in the masked layout and in permuted order, routing data and outputs of independent calls."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        self.shape, self.tokens = shape, tokens
        rows = tokens * shape.k
        scores = torch.rand(tokens, shape.experts, device="cuda").topk(shape.k, dim=-1).indices
        most = int(scores.flatten().bincount().max())
        # What the experts of every call have room for.
        self.capacity = tokens if tokens <= max(TOKENS) else (most * 5 // 4 + 127) // 128 * 128
        masked_bytes = (shape.experts * self.capacity + rows) * shape.hidden * 2
        self.count = count = max(2, min(MAX_LAUNCHES, MAX_ROW_BYTES // masked_bytes))
        choices = [torch.rand(tokens, shape.experts, device="cuda").topk(shape.k, dim=-1).indices for _ in range(count)]
        self.indices = torch.stack(choices).to(torch.int32)
        by_expert = self.indices.reshape(count, rows).argsort(dim=-1, stable=True)
        order = torch.arange(rows, device="cuda").expand(count, -1)
        permuted = torch.empty_like(by_expert).scatter_(1, by_expert, order)
        permuted = permuted.reshape(count, tokens, shape.k).transpose(1, 2).reshape(count, rows)
        self.permuted = permuted.to(torch.int32).contiguous()
        counts = torch.zeros(count, shape.experts, dtype=torch.int64, device="cuda")
        counts.scatter_add_(1, self.indices.reshape(count, rows).long(), torch.ones_like(order))
        self.offset = torch.zeros(count, shape.experts + 1, dtype=torch.int64, device="cuda")
        self.offset[:, 1:] = counts.cumsum(1)
        expert = self.indices.reshape(count, rows).gather(1, by_expert).long()
        self.places = expert * self.capacity + order - self.offset.gather(1, expert)
        of_choices = self.permuted.long().reshape(count, shape.k, tokens).transpose(1, 2).reshape(count, rows)
        self.rows = self.places.gather(1, of_choices).to(torch.int32).reshape(count, tokens, shape.k)
        self.weights = torch.rand(count, tokens, shape.k, device="cuda")
        size = (count, shape.experts * self.capacity, shape.hidden)
        self.masked = torch.empty(size, dtype=torch.bfloat16, device="cuda")
        for buffer in self.masked:
            buffer.normal_()
        self.gathered = torch.empty(count, rows, shape.hidden, dtype=torch.bfloat16, device="cuda")
        self.y, self.y_of_pair = (
            torch.empty(count, tokens, shape.hidden, dtype=torch.bfloat16, device="cuda") for _ in range(2)
        )

    def launch(self, n: int, stream: int) -> None:
        """Runs our kernel on call n."""
        n %= self.count
        kernels.gather_finalize(
            tokens=self.tokens,
            hidden=self.shape.hidden,
            padded=self.shape.hidden,
            capacity=self.capacity,
            experts=self.shape.experts,
            local_begin=0,
            local_count=self.shape.experts,
            k=self.shape.k,
            dtype="bfloat16",
            expert_output=self.masked[n].data_ptr(),
            weights=self.weights[n].data_ptr(),
            indices=self.indices[n].data_ptr(),
            unpermuted_to_permuted=self.permuted[n].data_ptr(),
            expert_first_token_offset=self.offset[n].data_ptr(),
            y=self.y[n].data_ptr(),
            stream=stream,
        )

    def launch_pair(self, n: int, stream: int) -> None:
        """Runs the gather and the FinalizeRouting on call n."""
        n %= self.count
        torch.index_select(self.masked[n], 0, self.places[n], out=self.gathered[n])
        kernels.finalize_routing(
            tokens=self.tokens,
            hidden=self.shape.hidden,
            k=self.shape.k,
            dtype="bfloat16",
            expert_output=self.gathered[n].data_ptr(),
            weights=self.weights[n].data_ptr(),
            indices=self.indices[n].data_ptr(),
            unpermuted_to_permuted=self.permuted[n].data_ptr(),
            y=self.y_of_pair[n].data_ptr(),
            stream=stream,
        )

    def measure(self, peer: peers.Peer[peers.Finalize], launches: int) -> list[Measured]:
        """What a peer takes, and the share of call 0's rows in which it is not near ours."""
        kept: dict[int, torch.Tensor] = {}

        def launch(n: int, _: int) -> None:
            n %= self.count
            kept[n] = peer.call(self.masked[n], self.weights[n], self.rows[n], self.y_of_pair[n])

        def wrong() -> float:
            launch(0, 0)
            theirs, ours = kept[0].float(), self.y[0].float()
            far = (theirs - ours).norm(dim=1) > FAR * ours.norm(dim=1)
            return float(far.float().mean())

        return peers.measure(peer.name, peer.version, launch, wrong, launches=launches)

    def check(self) -> None:
        """Holds ours against the pair, and call 0 against the emulation where it is small; bit for bit."""
        import ml_dtypes

        if not torch.equal(self.y.view(torch.int16), self.y_of_pair.view(torch.int16)):
            raise AssertionError(f"{self.shape.name}, T = {self.tokens}: the output is not the pair's")
        if self.tokens > 1:
            return
        shape = self.shape
        masked, got = (t[0].view(torch.uint16).cpu().numpy().view(ml_dtypes.bfloat16) for t in (self.masked, self.y))
        arrays = (t[0].cpu().numpy() for t in (self.weights, self.indices, self.permuted, self.offset))
        masked = masked.reshape(shape.experts, self.capacity, shape.hidden)
        if (got != gather_finalize(masked, *arrays, hidden_size=shape.hidden, local_count=shape.experts)).any():
            raise AssertionError(f"{shape.name}, T = {self.tokens}: the output is not the emulation's")


def measure(shape: Shape, tokens: int, copy_gbps: float) -> dict[str, Any]:
    """One row of the results."""
    buffers = Buffers(shape, tokens)
    launches = max(16, buffers.count)
    ours, pair = (timing.graph_time(launch, launches=launches) for launch in (buffers.launch, buffers.launch_pair))
    buffers.check()
    measured = [each for peer in peers.finalizers() for each in buffers.measure(peer, launches)]
    read, written = shape.bytes_read(tokens), shape.bytes_written(tokens)
    published = PUBLISHED if tokens <= max(TOKENS) else None
    return {
        "shape": shape.name,
        "tokens": tokens,
        "ours_us": round(ours, 3),
        "pair_us": round(pair, 3),
        "moving_us": round(moving_time(read, written), 3),
        "pair_to_ours": round(pair / ours, 2),
        **beside_peer(ours, published, read + written, copy_gbps, measured),
    }


COLUMNS = {
    "shape": "shape",
    "T": "tokens",
    "ours": "ours_us",
    "pair": "pair_us",
    "pair/ours": "pair_to_ours",
    "moving": "moving_us",
    "peer": "peer_us",
    "ours/peer": "ratio_to_peer",
    "GB/s": "gbps",
    "% of copy": "percent_of_copy",
    "by": "peer",
    "is": "peer_is",
}


def main(argv: list[str] | None = None) -> None:
    args = command.parser(__doc__, TOKENS).parse_args(argv)
    shapes = [(shape, tokens) for shape in SHAPES for tokens in args.tokens]
    if args.tokens == TOKENS:
        shapes.append((SHAPES[-1], MANY_TOKENS))
    command.run_pairs(args, shapes, measure, COLUMNS)


if __name__ == "__main__":
    main()

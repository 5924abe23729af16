"""SharedGateRouter against PyTorch's kernels, a merged gate and published times, and against what moves the same bytes.

    python -m benchmarks.shared_gate [--json OUT] [--tokens 1 64] [--only S=1]

Times per call in a CUDA graph of many, replayed from a cold cache, every call on its own buffers as far as memory goes,
in us:
- ours: one SharedGateRouter;
- torch: the same columns by PyTorch: top-k, softmax into a strided view, a product in half precision, sigmoid into a
  strided view; indices of shared experts are constant;
- apart: our FusedRouter, a product in half precision and sigmoid, by PyTorch, each into a tensor of its own;
- sliced: ours, and what brings its columns apart: the same three tensors;
- ours + gate: the product that makes the logits, by PyTorch, and one SharedGateRouter;
- merged: one product for the logits and the shared gates, by PyTorch, its columns copied apart, our FusedRouter, and
  sigmoid into a strided view;
- moving: a kernel that reads and writes as many bytes as ours;
- published: on another GPU, as recorded; not run here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import command, timing
from benchmarks.moving import moving_time
from benchmarks.output import beside_peer
from ort_moe import kernels
from ort_moe.ops.router_config import RouterConfig
from ort_moe.reference.shared_gate_router import shared_gate_router

EXPERTS, CHOSEN, HIDDEN = 512, 10, 4096
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
FEW_TOKENS = 64
SHARED = (2, 8)
MAX_LAUNCHES = 300
MAX_ROW_BYTES = 1 << 30  # of all hidden rows of a graph
PUBLISHED = (14.6, 13.9, 15.2, 14.8, 15.8, 16.6, 23.5, 44.2)
PUBLISHER = "MI355X"


@dataclass(frozen=True)
class Shape:
    """A row of the table in bfloat16: so many shared experts."""

    shared: int

    @property
    def name(self) -> str:
        return f"{EXPERTS}/{CHOSEN}/{HIDDEN} S={self.shared} bfloat16"

    def bytes_read(self, tokens: int) -> int:
        return tokens * (EXPERTS + HIDDEN) * 2 + self.shared * HIDDEN * 2

    def bytes_written(self, tokens: int) -> int:
        return tokens * (CHOSEN + self.shared) * 8


class Buffers:
    """Inputs and outputs of `count` independent calls, and the weights that they share."""

    def __init__(self, shape: Shape, tokens: int) -> None:
        self.shape, self.tokens = shape, tokens
        self.count = count = max(2, min(MAX_LAUNCHES, MAX_ROW_BYTES // (tokens * HIDDEN * 2)))
        self.config = RouterConfig.from_attributes({"k": CHOSEN, "score": "softmax", "normalize": 1})
        kind = {"dtype": torch.bfloat16, "device": "cuda"}
        self.hidden = torch.randn(count, tokens, HIDDEN, **kind)
        self.gate = torch.randn(EXPERTS + shape.shared, HIDDEN, **kind) * HIDDEN**-0.5
        self.gate_weight = self.gate[EXPERTS:].contiguous()
        self.logits = torch.randn(count, tokens, EXPERTS, **kind)
        columns = CHOSEN + shape.shared
        self.weights = torch.empty(count, tokens, columns, device="cuda")
        self.indices = torch.empty(count, tokens, columns, dtype=torch.int32, device="cuda")
        self.ids = torch.empty(count, tokens, columns, dtype=torch.int64, device="cuda")
        self.mixed = torch.empty(count, tokens, columns, **kind)
        self.merged = torch.empty(tokens, EXPERTS + shape.shared, **kind)
        self.dense = torch.empty(tokens, EXPERTS, **kind)
        self.dot = torch.empty(tokens, shape.shared, **kind)
        self.own_weights = torch.empty(tokens, CHOSEN, device="cuda")
        self.own_indices = torch.empty(tokens, CHOSEN, dtype=torch.int32, device="cuda")

    def launch(self, n: int, stream: int, logits: torch.Tensor | None = None) -> None:
        """Runs our kernel on call n."""
        n %= self.count
        kernels.shared_gate_router(
            self.config,
            rows=self.tokens,
            experts=EXPERTS,
            hidden_size=HIDDEN,
            shared=self.shape.shared,
            dtype="bfloat16",
            logits=(self.logits[n] if logits is None else logits).data_ptr(),
            hidden=self.hidden[n].data_ptr(),
            gate_weight=self.gate_weight.data_ptr(),
            weights=self.weights[n].data_ptr(),
            indices=self.indices[n].data_ptr(),
            shared_base=EXPERTS,
            stream=stream,
        )

    def launch_torch(self, n: int, _: int) -> None:
        """Runs PyTorch's kernels on call n."""
        n %= self.count
        best, ids = torch.topk(self.logits[n], CHOSEN, dim=-1)
        self.ids[n, :, :CHOSEN] = ids
        self.mixed[n, :, :CHOSEN] = torch.softmax(best, dim=-1)
        torch.mm(self.hidden[n], self.gate_weight.T, out=self.dot)
        torch.sigmoid(self.dot, out=self.mixed[n, :, CHOSEN:])

    def launch_apart(self, n: int, stream: int) -> None:
        """Our router, and the gates by PyTorch."""
        n %= self.count
        self._route(self.logits[n], self.own_weights, self.own_indices, stream)
        torch.mm(self.hidden[n], self.gate_weight.T, out=self.dot)
        torch.sigmoid(self.dot, out=self.dot)

    def launch_sliced(self, n: int, stream: int) -> None:
        """Our kernel, and its columns apart."""
        self.launch(n, stream)
        n %= self.count
        self.own_weights.copy_(self.weights[n, :, :CHOSEN])
        self.own_indices.copy_(self.indices[n, :, :CHOSEN])
        self.dot.copy_(self.weights[n, :, CHOSEN:])

    def launch_with_gate(self, n: int, stream: int) -> None:
        """The product for the logits, and our kernel."""
        torch.mm(self.hidden[n % self.count], self.gate[:EXPERTS].T, out=self.dense)
        self.launch(n, stream, self.dense)

    def launch_merged(self, n: int, stream: int) -> None:
        """The product for logits and gates, our router, and what brings them together."""
        n %= self.count
        torch.mm(self.hidden[n], self.gate.T, out=self.merged)
        self.dense.copy_(self.merged[:, :EXPERTS])
        self._route(self.dense, self.weights[n], self.indices[n], stream)
        torch.sigmoid(self.merged[:, EXPERTS:], out=self.mixed[n, :, CHOSEN:])

    def _route(self, logits: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, stream: int) -> None:
        kernels.fused_router(
            self.config,
            rows=self.tokens,
            experts=EXPERTS,
            dtype="bfloat16",
            logits=logits.data_ptr(),
            weights=weights.data_ptr(),
            indices=indices.data_ptr(),
            stream=stream,
        )

    def check(self) -> None:
        """Holds call 0's outputs against the emulation, bit for bit."""
        import ml_dtypes

        arrays = (self.logits[0], self.hidden[0], self.gate_weight)
        logits, hidden, gate = (t.view(torch.uint16).cpu().numpy().view(ml_dtypes.bfloat16) for t in arrays)
        attributes = self.config.attributes() | {"shared_base": EXPERTS, "shared_scale": 1.0}
        weights, indices = shared_gate_router(logits, hidden, gate, **attributes)
        same = (self.indices[0].cpu().numpy() == indices).all() and (self.weights[0].cpu().numpy() == weights).all()
        if not same:
            raise AssertionError(f"{self.shape.name}, T = {self.tokens}: the outputs are not the emulation's")


def measure(shape: Shape, tokens: int, copy_gbps: float) -> dict[str, Any]:
    """One row of the results."""
    buffers = Buffers(shape, tokens)
    launches = max(16, buffers.count)
    ours = timing.graph_time(buffers.launch, launches=launches)
    if tokens <= FEW_TOKENS:
        buffers.check()
    others = {
        "torch_us": buffers.launch_torch,
        "apart_us": buffers.launch_apart,
        "sliced_us": buffers.launch_sliced,
        "with_gate_us": buffers.launch_with_gate,
        "merged_us": buffers.launch_merged,
    }
    read, written = shape.bytes_read(tokens), shape.bytes_written(tokens)
    published = (PUBLISHED[TOKENS.index(tokens)], PUBLISHER) if shape.shared == 1 and tokens in TOKENS else None
    return {
        "shape": shape.name,
        "tokens": tokens,
        "ours_us": round(ours, 3),
        **{name: round(timing.graph_time(launch, launches=launches), 3) for name, launch in others.items()},
        "moving_us": round(moving_time(read, written, launches=MAX_LAUNCHES), 3),
        **beside_peer(ours, published, read + written, copy_gbps),
    }


COLUMNS = {
    "shape": "shape",
    "T": "tokens",
    "ours": "ours_us",
    "torch": "torch_us",
    "apart": "apart_us",
    "sliced": "sliced_us",
    "ours + gate": "with_gate_us",
    "merged": "merged_us",
    "moving": "moving_us",
    "published": "peer_us",
    "GB/s": "gbps",
    "% of copy": "percent_of_copy",
}


def main(argv: list[str] | None = None) -> None:
    args = command.parser(__doc__, TOKENS).parse_args(argv)
    pairs = [(Shape(1), tokens) for tokens in args.tokens]
    pairs += [(Shape(shared), FEW_TOKENS) for shared in SHARED if FEW_TOKENS in args.tokens]
    command.run_pairs(args, pairs, measure, COLUMNS)


if __name__ == "__main__":
    main()

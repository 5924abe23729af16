"""FusedRouter against the same router as standard nodes in ONNX Runtime, and against the peers' recorded times.

    python -m benchmarks.router [--json OUT] [--tokens 1 64] [--only 512/10] [--maps] [--without-ort]

With --maps the routers build the routing maps too, and the peers' times are those of their router and map builder.

Three times per shape, each in us per router:
- ours: the launcher in a CUDA graph of many launches, replayed from a cold cache, every launch on its own buffers;
- ours in ORT, and unfused ORT: sessions with CUDA graphs whose model holds many independent routers on their own
  buffers; host time of a run divided by the routers, so a run's own overhead of some 15 us is spread over them;
  (not timed with maps, which standard nodes have no use for);
- peer: the best of vLLM, SGLang's CUDA kernel and SGLang's Triton kernel with PDL, as recorded once on an H200 in
  graphs from a cold cache; not run here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from benchmarks import command, timing
from benchmarks.output import beside_peer
from benchmarks.timing import TORCH_TYPES
from ort_moe import kernels
from ort_moe.ops import DOMAIN, FUSED_ROUTER, ROUTING_MAPS, VERSION, AttributeValue
from ort_moe.reference.fused_router import fused_router
from ort_moe.reference.routing_maps import routing_maps
from ort_moe.router_config import RouterConfig

TOKENS = (1, 4, 64, 1024, 8192)
MAX_LAUNCHES = 1000
MAX_LOGIT_BYTES = 1 << 30  # of all buffers of a graph
SPACING = 4096  # bytes between the buffers of small launches: no two share a DRAM page's burst

SOFTMAX: dict[str, AttributeValue] = {"score": "softmax", "normalize": 1}
GROUPED: dict[str, AttributeValue] = {
    "score": "sigmoid",
    "normalize": 1,
    "normalize_eps": 1e-20,
    "scale": 2.5,
    "num_groups": 8,
    "topk_groups": 4,
    "group_score_top": 2,
    "group_fill": 0.0,
}


@dataclass(frozen=True)
class Shape:
    """A router of the table: experts/k, its logits' type, attributes, and the best peer's us by tokens."""

    experts: int
    k: int
    dtype: str
    attributes: dict[str, AttributeValue] = field(default_factory=lambda: SOFTMAX)
    peer: dict[int, tuple[float, str]] = field(default_factory=dict)
    maps: bool = False

    @property
    def grouped(self) -> bool:
        return "num_groups" in self.attributes

    @property
    def name(self) -> str:
        grouped, maps = " grouped sigmoid + bias" if self.grouped else "", " + maps" if self.maps else ""
        return f"{self.experts}/{self.k} {self.dtype}{grouped}{maps}"

    def bytes_moved(self, tokens: int) -> int:
        of_maps = tokens * self.k * 12 + (self.experts + 1) * 8 if self.maps else 0
        return tokens * (self.experts * TORCH_TYPES[self.dtype].itemsize + self.k * 8) + of_maps


TRITON, SGLANG, VLLM = "SGLang Triton + PDL", "SGLang CUDA", "vLLM"
PAIR = "best top-k + best map builder"
SHAPES = (
    Shape(8, 2, "bfloat16", peer={1: (1.17, TRITON), 8192: (1.74, SGLANG)}),
    Shape(64, 6, "bfloat16", peer={1: (1.90, TRITON), 8192: (3.80, TRITON)}),
    Shape(128, 8, "bfloat16", peer={1: (2.44, TRITON), 8192: (7.8, TRITON)}),
    Shape(256, 8, "bfloat16", peer={1: (2.38, TRITON), 8192: (12.7, TRITON)}),
    Shape(512, 10, "bfloat16", peer={1: (3.37, TRITON), 8192: (25.2, TRITON)}),
    Shape(512, 10, "float", peer={1: (3.75, TRITON), 8192: (26.1, SGLANG)}),
    Shape(256, 8, "bfloat16", GROUPED, peer={1: (3.26, VLLM), 8192: (18.6, SGLANG)}),
    Shape(128, 8, "bfloat16", maps=True),
    Shape(256, 8, "bfloat16", maps=True),
    Shape(512, 10, "bfloat16", peer={1: (7.1, PAIR), 4: (7.4, PAIR), 64: (8.3, PAIR)}, maps=True),
    Shape(256, 8, "bfloat16", GROUPED, maps=True),
)


class Buffers:
    """Logits and outputs of `count` independent routers, far apart in memory, and the vectors they share."""

    def __init__(self, shape: Shape, tokens: int, count: int) -> None:
        self.shape, self.tokens, self.count = shape, tokens, count
        self.config = RouterConfig.from_attributes({"k": shape.k, **shape.attributes})
        dtype = TORCH_TYPES[shape.dtype]
        self.logits = _spaced(count, tokens * shape.experts, dtype)
        self.logits.copy_(torch.randn(self.logits.shape, device="cuda"))
        self.weights = _spaced(count, tokens * shape.k, torch.float32)
        self.indices = _spaced(count, tokens * shape.k, torch.int32)
        self.bias = torch.randn(shape.experts, device="cuda") * 0.1 if shape.grouped else None
        rows = tokens * shape.k
        sizes = (rows, rows, rows, shape.experts + 1)
        types = [getattr(torch, tensor.types[0]) for tensor in ROUTING_MAPS]
        self.maps = [_spaced(count, *map_) for map_ in zip(sizes, types, strict=True)] if shape.maps else []
        scratch = kernels.router_scratch_bytes(self.config, rows=tokens, experts=shape.experts) if shape.maps else 0
        self.scratch = torch.empty(max(scratch, 1), dtype=torch.uint8, device="cuda")  # launches follow each other

    def launch(self, n: int, stream: int) -> None:
        """Runs our kernel on router n."""
        kernels.fused_router(
            self.config,
            rows=self.tokens,
            experts=self.shape.experts,
            dtype=self.shape.dtype,
            logits=self.logits[n].data_ptr(),
            weights=self.weights[n].data_ptr(),
            indices=self.indices[n].data_ptr(),
            selection_bias=None if self.bias is None else self.bias.data_ptr(),
            maps=kernels.RoutingMaps(*(m[n].data_ptr() for m in self.maps)) if self.maps else None,
            scratch=self.scratch.data_ptr(),
            stream=stream,
        )

    def check(self) -> None:
        """Holds router 0's outputs against the emulation, bit for bit."""
        shape, tokens = self.shape, self.tokens
        logits = self.logits[0, : tokens * shape.experts].float().cpu().numpy().reshape(tokens, shape.experts)
        bias = None if self.bias is None else self.bias.cpu().numpy()
        weights, indices = fused_router(logits, bias, k=shape.k, **shape.attributes)
        got_weights = self.weights[0, : tokens * shape.k].cpu().numpy().reshape(tokens, shape.k)
        got_indices = self.indices[0, : tokens * shape.k].cpu().numpy().reshape(tokens, shape.k)
        if (got_weights != weights).any() or (got_indices != indices).any():
            raise AssertionError(f"{shape.name}, T = {tokens}: the outputs are not the emulation's")
        for got, expected in zip(self.maps, routing_maps(indices, shape.experts), strict=bool(self.maps)):
            if (got[0, : len(expected)].cpu().numpy() != expected).any():
                raise AssertionError(f"{shape.name}, T = {tokens}: the maps are not the reference's")


def _spaced(count: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    step = -(-elements * dtype.itemsize // SPACING) * SPACING // dtype.itemsize
    return torch.zeros(count, step, dtype=dtype, device="cuda")


def our_time(shape: Shape, tokens: int) -> float:
    """us per launch in a graph from a cold cache."""
    logit_bytes = max(tokens * shape.experts * TORCH_TYPES[shape.dtype].itemsize, SPACING)
    launches = max(16, min(MAX_LAUNCHES, MAX_LOGIT_BYTES // logit_bytes))
    buffers = Buffers(shape, tokens, launches)
    time = timing.graph_time(buffers.launch, launches=launches)
    if tokens <= 64:
        buffers.check()
    return time


# --- Sessions of ONNX Runtime ---

_SOFTMAX_NODES = """
    x{n} = Cast <to = 1> (logits{n})
    p{n} = Softmax <axis = -1> (x{n})
    v{n}, ids{n} = TopK (p{n}, k)
    sum{n} = ReduceSum <keepdims = 1> (v{n}, last)
    weights{n} = Div (v{n}, sum{n})
    indices{n} = Cast <to = 6> (ids{n})
"""

_GROUPED_NODES = """
    x{n} = Cast <to = 1> (logits{n})
    s{n} = Sigmoid (x{n})
    key{n} = Add (s{n}, bias)
    grouped{n} = Reshape (key{n}, by_group)
    best{n}, best_ids{n} = TopK (grouped{n}, two)
    group_score{n} = ReduceSum <keepdims = 0> (best{n}, last)
    kept{n}, kept_ids{n} = TopK (group_score{n}, kept_groups)
    mask{n} = ScatterElements <axis = 1> (none_kept, kept_ids{n}, all_kept)
    by_group_mask{n} = Unsqueeze (mask{n}, last)
    wide{n} = Expand (by_group_mask{n}, by_group)
    flat{n} = Reshape (wide{n}, by_expert)
    stays{n} = Cast <to = 9> (flat{n})
    masked{n} = Where (stays{n}, key{n}, zero)
    chosen{n}, ids{n} = TopK (masked{n}, k)
    v{n} = GatherElements <axis = 1> (s{n}, ids{n})
    sum{n} = ReduceSum <keepdims = 1> (v{n}, last)
    divisor{n} = Add (sum{n}, eps)
    share{n} = Div (v{n}, divisor{n})
    weights{n} = Mul (share{n}, scale)
    indices{n} = Cast <to = 6> (ids{n})
"""


def _initializers(buffers: Buffers) -> dict[str, torch.Tensor]:
    shape, tokens = buffers.shape, buffers.tokens
    tensors = {"k": torch.tensor([shape.k]), "last": torch.tensor([-1])}
    if buffers.bias is not None:
        groups, kept = int(shape.attributes["num_groups"]), int(shape.attributes["topk_groups"])
        tensors |= {
            "bias": buffers.bias.cpu(),
            "by_group": torch.tensor([tokens, groups, shape.experts // groups]),
            "by_expert": torch.tensor([tokens, shape.experts]),
            "two": torch.tensor([2]),
            "kept_groups": torch.tensor([kept]),
            "none_kept": torch.zeros(tokens, groups),
            "all_kept": torch.ones(tokens, kept),
            "zero": torch.tensor(0.0),
            "eps": torch.tensor(1e-20),
            "scale": torch.tensor(float(shape.attributes["scale"])),
        }
    return tensors


def _output_types(shape: Shape) -> dict[str, int]:
    """ONNX element types of a router's outputs by name."""
    outputs = FUSED_ROUTER.outputs if shape.maps else FUSED_ROUTER.outputs[:2]
    return {tensor.name: TensorProto.DataType.Value(tensor.types[0].upper()) for tensor in outputs}


def _output_shape(buffers: Buffers, name: str) -> tuple[int, ...]:
    shape, tokens = buffers.shape, buffers.tokens
    if name in ("weights", "indices"):
        return tokens, shape.k
    return (shape.experts + 1 if name == "expert_first_token_offset" else tokens * shape.k,)


def _model(buffers: Buffers, *, fused: bool) -> onnx.ModelProto:
    """A model of `buffers.count` independent routers, as our node or as standard nodes."""
    shape, tokens = buffers.shape, buffers.tokens
    nodes: list[onnx.NodeProto] = []
    for n in range(buffers.count):
        if fused:
            inputs = [f"logits{n}"] + (["bias"] if shape.grouped else [])
            attributes = FUSED_ROUTER.complete({"k": shape.k, **shape.attributes})
            outputs = [f"{name}{n}" for name in _output_types(shape)]
            nodes.append(helper.make_node("FusedRouter", inputs, outputs, domain=DOMAIN, **attributes))
        else:
            text = (_GROUPED_NODES if shape.grouped else _SOFTMAX_NODES).format(n=n)
            nodes += onnx.parser.parse_graph(f"routers () => () {{{text}}}").node
    element_type = TensorProto.DataType.Value(shape.dtype.upper())
    used = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "routers",
        [
            helper.make_tensor_value_info(f"logits{n}", element_type, (tokens, shape.experts))
            for n in range(buffers.count)
        ],
        [
            helper.make_tensor_value_info(f"{name}{n}", kind, _output_shape(buffers, name))
            for n in range(buffers.count)
            for name, kind in _output_types(shape).items()
        ],
        [numpy_helper.from_array(t.numpy(), name) for name, t in _initializers(buffers).items() if name in used],
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _runner(buffers: Buffers, *, fused: bool) -> Callable[[], None]:
    """Runs a session of the routers as a CUDA graph."""
    import onnxruntime

    from ort_moe.library import register

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if fused:
        register(options)
    model = _model(buffers, fused=fused).SerializeToString()
    provider = ("CUDAExecutionProvider", {"enable_cuda_graph": "1"})
    session = onnxruntime.InferenceSession(model, options, providers=[provider])
    binding = session.io_binding()
    shape, tokens = buffers.shape, buffers.tokens
    logit_type = TensorProto.DataType.Value(shape.dtype.upper())
    for n in range(buffers.count):
        address = buffers.logits[n].data_ptr()
        binding.bind_input(f"logits{n}", "cuda", 0, logit_type, (tokens, shape.experts), address)
        arrays = [buffers.weights, buffers.indices, *buffers.maps]
        for (name, kind), array in zip(_output_types(shape).items(), arrays, strict=True):
            binding.bind_output(f"{name}{n}", "cuda", 0, kind, _output_shape(buffers, name), array[n].data_ptr())
    return lambda: session.run_with_iobinding(binding)


def ort_time(shape: Shape, tokens: int, *, fused: bool) -> float:
    """us per router in a session with a CUDA graph."""
    buffers = Buffers(shape, tokens, count=16 if tokens >= 1024 else 64)
    return timing.session_time(_runner(buffers, fused=fused), nodes=buffers.count)


# --- The table ---


def measure(shape: Shape, tokens: int, copy_gbps: float, *, with_ort: bool) -> dict[str, Any]:
    """One row of the results."""
    ours = our_time(shape, tokens)
    return {
        "shape": shape.name,
        "tokens": tokens,
        "ours_us": round(ours, 3),
        "ours_ort_us": round(ort_time(shape, tokens, fused=True), 2) if with_ort else None,
        "unfused_ort_us": round(ort_time(shape, tokens, fused=False), 2) if with_ort and not shape.maps else None,
        **beside_peer(ours, shape.peer.get(tokens), shape.bytes_moved(tokens), copy_gbps),
    }


COLUMNS = {
    "shape": "shape",
    "T": "tokens",
    "ours": "ours_us",
    "ours in ORT": "ours_ort_us",
    "unfused ORT": "unfused_ort_us",
    "peer": "peer_us",
    "ours/peer": "ratio_to_peer",
    "GB/s": "gbps",
    "% of copy": "percent_of_copy",
}


def main() -> None:
    parser = command.parser(__doc__, TOKENS)
    parser.add_argument("--maps", action="store_true", help="time routers that build the routing maps, not the others")
    parser.add_argument("--without-ort", action="store_true", help="time our launcher alone")
    args = parser.parse_args()
    shapes = [shape for shape in SHAPES if shape.maps == args.maps]
    rows = command.run(args, shapes, partial(measure, with_ort=not args.without_ort), COLUMNS)
    ratios = [row["ratio_to_peer"] for row in rows if row["ratio_to_peer"] is not None]
    if ratios:
        print(f"times in us per router; ours/peer: geometric mean {math.prod(ratios) ** (1 / len(ratios)):.2f}")


if __name__ == "__main__":
    main()

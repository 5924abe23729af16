"""Sessions of ONNX Runtime of many independent routers, as our node or as standard nodes."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from benchmarks import timing
from benchmarks.router_works import Buffers, Shape
from ort_moe.ops import DOMAIN, FUSED_ROUTER, VERSION

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

    from ort_moe.installation.library import register

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

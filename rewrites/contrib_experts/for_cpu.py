"""Contrib nodes that ONNX Runtime runs on CUDA alone, spelled as others that its CPU kernels run: to verify models.

The CPU takes gate and value interleaved, in one layer; NVFP4 packed along K and with swiglu, from ONNX Runtime 1.32 on;
neither MXFP4 nor FP8, whose weights become floats. The node is another one, and the numbers are the same.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ort_moe.graphs.node_kinds import is_contrib_moe
from ort_moe.ops import AttributeValue
from ort_moe.packing import fp8, mxfp4, nvfp4
from ort_moe.rewrites.contrib_experts.block import ContribBlock, given_inputs, read
from ort_moe.rewrites.contrib_experts.layers import quant_type
from ort_moe.rewrites.contrib_experts.sources import Source, register, viewed
from ort_moe.rewrites.contrib_experts.write import (
    activation,
    contrib_node,
    integer_packing,
    with_gates_interleaved,
)
from ort_moe.rewrites.names import Names, take_over
from ort_moe.rewrites.rule import Refusal
from ort_moe.rewrites.values import Array, integer


def runs_on_cpu(node: ir.Node) -> bool:
    """Whether ONNX Runtime's CPU kernels may run a contrib node of experts."""
    if "fc3_experts_weights" in given_inputs(node) or integer(node, "swiglu_fusion", 0) == 2:
        return False
    kind = quant_type(node)
    if node.op_type == "MoE" or kind == "int":
        return True
    is_gated = node.attributes.get_string("activation_type", "relu") == "swiglu"
    return kind == "nvfp4" and integer(node, "weights_prepacked", -1) == 1 and is_gated


def respell_for_cpu(model: ir.Model) -> int:
    """Replace, in place, the nodes of the graph that the CPU does not run, where it runs others; their number."""
    names: Names | None = None
    respelt = 0
    for node in [node for node in model.graph if is_contrib_moe(node) and not runs_on_cpu(node)]:
        try:
            block = read(node, "cpu")
            attributes, constants = _spelling(block)
        except Refusal:
            continue  # ONNX Runtime will say that it does not run it
        names = names or Names(model.graph)
        given = {name: register(model.graph, source, "for_cpu", names) for name, source in constants.items()}
        given |= {"input": block.x, "router_probs": block.logits}
        if block.router_weights is not None:
            given["router_weights"] = block.router_weights
        new = contrib_node(given, attributes, node.name)
        model.graph.insert_before(node, new)
        kept = node.outputs[0]
        new.outputs[0].type, new.outputs[0].shape = kept.type, kept.shape
        take_over(kept, new.outputs[0])
        model.graph.remove(node, safe=True)
        respelt += 1
    return respelt


def _spelling(block: ContribBlock) -> tuple[dict[str, AttributeValue], dict[str, Source]]:
    """Attributes and constants of a node that the CPU runs.

    Raises:
        Refusal: There is none.
    """
    kind, constants = block.weight_format, dict(block.layers)
    attributes = {**activation(block.attributes), "k": block.k, "normalize_routing_weights": int(block.normalize)}
    if kind in ("int4", "int8"):
        attributes |= integer_packing(block.attributes)
    elif kind == "nvfp4" and block.attributes["gated"]:
        attributes |= {"quant_type": "nvfp4", "expert_weight_bits": 4, "block_size": 16, "weights_prepacked": 1}
    elif kind != "dense":
        if block.router_weights is not None:
            raise Refusal("a node of floats has no router weights", "contrib-form")
        constants = {
            name: _floats(block, name.removesuffix("_weights")) if name.endswith("_weights") else source
            for name, source in constants.items()
            if name.endswith(("_weights", "_bias"))
        }
    constants = with_gates_interleaved(block.attributes, constants)
    if "weights_prepacked" in attributes and kind == "nvfp4":
        for layer in ("fc1", "fc2"):
            weights = constants[f"{layer}_weights"]
            experts, rows, half = weights.shape
            constants[f"{layer}_weights"] = viewed(weights, weights.dtype, (experts, 2 * half, rows // 2))
    return attributes, constants


def _floats(block: ContribBlock, layer: str) -> Source:
    """The weights of a layer that are packed, in the type of x."""
    weights, scales = block.layers[f"{layer}_weights"], block.layers[f"{layer}_scales"]
    scale = block.layers.get(f"{layer}_global_scale")
    experts, rows, width = weights.shape

    def entry(expert: int) -> Array:
        codes, steps = weights.entry(expert)[None], np.ascontiguousarray(scales.entry(expert))[None]
        if scale is None:
            floats = fp8.dequantize(fp8.Fp8(codes, steps, int(block.attributes["block_size"])))
        else:
            of_expert = np.asarray(scale.entry(expert)).reshape(1)
            if block.weight_format == "nvfp4":
                floats = nvfp4.dequantize(nvfp4.Nvfp4(codes, steps, of_expert))
            else:
                floats = mxfp4.dequantize(mxfp4.Mxfp4(codes, steps, of_expert))
        numbers: Array = floats[0].astype(block.dtype.numpy())
        return numbers

    return Source(block.dtype, (experts, rows, width if scale is None else 2 * width), entry, weights.values)

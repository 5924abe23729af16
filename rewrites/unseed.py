"""FusedRouter(x, k) -> TopK(x, k), for a FusedRouter that absorbed nothing.

A bare FusedRouter does what the TopK did and gains nothing, so its TopK is put back as it was, with its attributes,
its type and the names of its outputs.
"""

from __future__ import annotations

import json

import numpy as np
import onnx_ir as ir

from ort_moe.rewrites.names import Names, new_constant
from ort_moe.rewrites.router_node import TOPK, TOPK_ATTRIBUTES, TOPK_DTYPE, Router, is_router
from ort_moe.rewrites.values import consumers, is_op


def unseed(graph: ir.Graph) -> int:
    """Put back the TopK of every bare FusedRouter seeded in this run, also in bodies; the number put back."""
    bare = [node for node in graph.all_nodes() if is_router(node) and will_be_put_back(node)]
    names = Names(graph) if bare else None
    for node in bare:
        assert names is not None
        assert node.graph is not None
        _put_back(node.graph, Router.read(node), names)
    return len(bare)


def will_be_put_back(router: ir.Node) -> bool:
    """Whether `unseed` turns this FusedRouter back into its TopK."""
    return TOPK_ATTRIBUTES in router.metadata_props and Router.read(router).is_bare


def forget(graph: ir.Graph) -> None:
    """Drop what only `unseed` needs from the nodes that stay: bookkeeping, and the names of weights that nobody reads.

    Those need not be the values that the TopK had under that name.
    """
    names = None
    for node in graph.all_nodes():
        if not is_router(node):
            continue
        weights, is_new = node.outputs[0], TOPK_ATTRIBUTES in node.metadata_props
        if is_new and not (weights.uses() or weights.is_graph_output()):
            names = names or Names(graph)
            weights.name = names.unused("unread_weights")
        node.metadata_props.pop(TOPK_ATTRIBUTES, None)
        node.metadata_props.pop(TOPK_DTYPE, None)


def _put_back(graph: ir.Graph, router: Router, names: Names) -> None:
    metadata = dict(router.node.metadata_props)
    name, attributes = metadata.pop(TOPK), json.loads(metadata.pop(TOPK_ATTRIBUTES))
    logits = _cast_before(graph, router, ir.DataType[metadata.pop(TOPK_DTYPE)], names)
    k = new_constant(graph, names.unused(f"{name}_k"), np.array([router.k], np.int64))
    topk = ir.node(
        "TopK",
        [logits, k],
        attributes,
        num_outputs=2,
        name=name or None,
        metadata_props=metadata,
    )
    graph.insert_before(router.node, topk)
    values, ids = topk.outputs
    values.name, ids.name = names.unused("val"), names.unused("val")
    values.type, ids.type = logits.type, ir.TensorType(ir.DataType.INT64)
    values.shape, ids.shape = router.weights.shape, router.indices.shape
    _hand_over(graph, router.weights, values)
    _hand_over(graph, router.indices, ids)
    graph.remove(router.node, safe=True)


def _cast_before(graph: ir.Graph, router: Router, dtype: ir.DataType, names: Names) -> ir.Value:
    """The logits in the type that the TopK ranked: a cast alone may have been absorbed, and TopK takes fewer types."""
    logits = router.logits
    if logits.dtype == dtype:
        return logits
    cast = ir.node("Cast", [logits], {"to": dtype})
    cast.outputs[0].name = names.unused("val")
    graph.insert_before(router.node, cast)
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(dtype), logits.shape
    return cast.outputs[0]


def _hand_over(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Give the consumers of `old` its original `new`; casts back to the type of `new` go."""
    if old.dtype == new.dtype:
        new.name = old.name
        old.replace_all_uses_with(new, replace_graph_outputs=True)
        return
    for node in list(consumers(old)):
        # A cast in a body may make the body's output, which what is made around it cannot be.
        if is_op(node, "Cast") and node.outputs[0].dtype == new.dtype and node.graph is graph:
            new.name = node.outputs[0].name
            node.outputs[0].replace_all_uses_with(new, replace_graph_outputs=True)
            graph.remove(node, safe=True)
    if old.uses() or old.is_graph_output():
        cast = ir.node("Cast", [new], {"to": old.dtype})
        cast.outputs[0].name, cast.outputs[0].type, cast.outputs[0].shape = old.name, old.type, old.shape
        producer = new.producer()
        assert producer is not None
        graph.insert_after(producer, cast)
        old.replace_all_uses_with(cast.outputs[0], replace_graph_outputs=True)

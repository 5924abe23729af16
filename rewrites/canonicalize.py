"""Bring a graph into the one form that the rules know.

Constants become initializers, the arithmetic of shapes and of single numbers is folded, types and shapes are inferred
where the file lacks them, and identities, repeated and unused nodes go: in the main graph and in the bodies of If, Loop
and Scan.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from ort_moe.rewrites.computed_shapes import fix_computed_shapes
from ort_moe.rewrites.names import Names
from ort_moe.rewrites.shape_inference import infer_shapes, lacks_types
from ort_moe.rewrites.tidy import pass_by
from ort_moe.rewrites.values import Array, constant, is_op

_SHAPE_ARITHMETIC = (
    "Add", "Cast", "Concat", "ConstantOfShape", "Equal", "Gather", "Mul", "Reshape", "Squeeze", "Sub", "Unsqueeze",
    "Where",
)  # fmt: skip
_SHAPE_ELEMENTS = 64
"""Elements up to which integers are taken for the arithmetic of a shape."""
_MOST_VIEWS = 4
"""Computed shapes one behind the other in a router: into groups and back, by either side of a mask."""
_NUMBER_ARITHMETIC = ("Add", "Div", "Mul", "Neg", "Reciprocal", "Sqrt", "Sub")
"""Ops by which one floating-point constant is written as an expression of others."""


def spell_standard_domain(model: ir.Model) -> None:
    """Spell the standard domain as the empty string, its other name, in place."""
    bodies: tuple[ir.Graph | ir.Function, ...] = (model.graph, *model.functions.values())
    for graph in bodies:
        imports = graph.opset_imports
        if "ai.onnx" in imports:
            version = imports.pop("ai.onnx")
            imports.setdefault("", version)
        for node in graph.all_nodes():
            if node.domain == "ai.onnx":
                node.domain = ""


def name_nodes(model: ir.Model) -> None:
    """Name the nodes that have no name after their outputs, in place: findings and the report speak of them by name."""
    for node in model.graph.all_nodes():
        if not node.name:
            node.name = f"{node.op_type}_{node.outputs[0].name}"


def canonicalize(model: ir.Model) -> tuple[bool, str | None]:
    """Canonicalise, in place, a model whose standard domain is the empty string.

    Returns:
        Whether constants were lifted or nodes removed, and what shape inference complained of, if it failed.
    """
    lift = common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)
    modified = lift(model).modified
    opset = model.graph.opset_imports[""]
    for graph in model.graphs():
        modified = fold_constants(graph, opset) or modified
    complaint = None
    if lacks_types(model.graph):
        modified = sink_integers(model.graph) or modified
        complaint = infer_shapes(model)
        # A shape that is fixed may tell the lengths that another needs: of the groups, then of all experts.
        for _ in range(_MOST_VIEWS):
            if complaint is not None or not fix_computed_shapes(model):
                break
            modified, complaint = True, infer_shapes(model)
    modified = spell_casts(model.graph) or modified
    return clean_up(model) or modified, complaint


def clean_up(model: ir.Model) -> bool:
    """Sort, then drop unused nodes, identities and repeated nodes; True if that changed more than the order."""
    # Unused nodes go first: a repeated expression takes the name of its first copy, which must be one that is in use.
    model.graph.sort()
    modified = common.RemoveUnusedNodesPass()(model).modified
    for graph in model.graphs():
        modified = drop_identities(graph) or modified
        # The pass looks at the main graph of what it is given alone.
        alone = ir.Model(graph, ir_version=model.ir_version)
        modified = common.CommonSubexpressionEliminationPass()(alone).modified or modified
    for body in model.graph.subgraphs():
        modified = _drop_unused_initializers(body) or modified
    return modified


def put_in_order(model: ir.Model) -> None:
    """Sort the nodes, which rewrites may insert behind their consumers, and drop the initializers that nobody reads."""
    for graph in model.graphs():
        _drop_unused_initializers(graph)
    model.graph.sort()


def drop_identities(graph: ir.Graph) -> bool:
    """Hand the consumers of each Identity its input; one that makes an output of the graph stays."""
    # Not onnx_ir's pass: it also takes an Identity that makes a value of the outer graph the output of a branch, which
    # leaves the branch without its output.
    dropped = False
    for node in graph:
        if is_op(node, "Identity") and pass_by(node):
            graph.remove(node, safe=True)
            dropped = True
    return dropped


def _drop_unused_initializers(graph: ir.Graph) -> bool:
    unused = [
        name
        for name, value in graph.initializers.items()
        if not (value.uses() or value.is_graph_output() or value.is_graph_input())
    ]
    for name in unused:
        del graph.initializers[name]
    return bool(unused)


def sink_integers(graph: ir.Graph) -> bool:
    """Give each body in the graph its own copies of the small integer constants that it reads from around it.

    They are shapes, axes and the like, which shape inference does not see across the border of a body.
    """
    bodies = list(graph.subgraphs())
    names = Names(graph) if bodies else None
    sunk = False
    for body in bodies:
        copies: dict[ir.Value, ir.Value] = {}
        for node in body:
            for position, value in enumerate(node.inputs):
                if value is None or not value.is_initializer() or value.graph is body:
                    continue
                array = constant(value, _SHAPE_ELEMENTS)
                if array is None or array.dtype.kind != "i":
                    continue
                if value not in copies:
                    assert names is not None
                    name = names.unused(value.name or "constant")
                    copies[value] = ir.Value(
                        name=name, type=value.type, shape=value.shape, const_value=ir.tensor(array, name=name)
                    )
                    body.register_initializer(copies[value])
                node.replace_input_with(position, copies[value])
                sunk = True
    return sunk


def spell_casts(graph: ir.Graph) -> bool:
    """CastLike(x, y) -> Cast(x), where the type of y is known."""
    spelt = False
    for node in graph.all_nodes():
        like = node.inputs[1] if is_op(node, "CastLike") else None
        if like is not None and like.dtype is not None:
            node.op_type = "Cast"
            node.resize_inputs(1)
            node.attributes.add(ir.AttrInt64("to", like.dtype))
            spelt = True
    return spelt


def fold_constants(graph: ir.Graph, opset: int) -> bool:
    """Replace by its value what is computed of constants: shapes, as in legacy exports, and single numbers."""
    folded = False
    for node in graph:
        result = _folded(node, opset)
        if result is None:
            continue
        output = node.outputs[0]
        value = ir.Value(name=output.name, const_value=ir.tensor(result, name=output.name))
        value.shape, value.dtype = ir.Shape(result.shape), ir.DataType.from_numpy(result.dtype)
        output.replace_all_uses_with(value)
        graph.remove(node, safe=True)
        graph.register_initializer(value)
        folded = True
    return folded


def _folded(node: ir.Node, opset: int) -> Array | None:
    """The node's output, if that and all inputs are constants small enough, and of one kind."""
    if len(node.outputs) != 1 or node.outputs[0].is_graph_output():
        return None
    for op_types, kinds, most in ((_SHAPE_ARITHMETIC, "iub", _SHAPE_ELEMENTS), (_NUMBER_ARITHMETIC, "f", 1)):
        inputs = [constant(value, most) for value in node.inputs] if is_op(node, *op_types) else [None]
        if any(array is None or array.dtype.kind not in kinds for array in inputs):
            continue
        result = _evaluate(node, [array for array in inputs if array is not None], opset)
        if result is not None and result.size <= most and result.dtype.kind in kinds:
            return result
    return None


def _evaluate(node: ir.Node, inputs: list[Array], opset: int) -> Array | None:
    """The node's output for these inputs, by ONNX's reference; None where the node is not valid."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    if node.op_type == "ConstantOfShape" and inputs[0].prod() > _SHAPE_ELEMENTS:
        return None
    names = [f"input_{position}" for position in range(len(inputs))]
    proto = ir.to_proto(node)
    assert isinstance(proto, onnx.NodeProto)
    del proto.input[:], proto.output[:]
    proto.input.extend(names)
    proto.output.append("output")
    graph = onnx.helper.make_graph(
        [proto], "node", [onnx.ValueInfoProto(name=name) for name in names], [onnx.ValueInfoProto(name="output")]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)])
    try:
        with np.errstate(all="ignore"):
            (result,) = ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=True)))
    except Exception:  # an invalid node is the runtime's to refuse
        return None
    return np.asarray(result) if isinstance(result, np.ndarray | np.generic) else None

"""Edits of nodes: the same step in another spelling."""

from __future__ import annotations

import functools

import numpy as np
import onnx_ir as ir

from tests.rewrites.mutations.mutant import Mutant, array_of, mutation, number_like, rank_of, with_constant


@mutation
def count_axis_from_the_other_end(mutant: Mutant) -> bool:
    for node in mutant.nodes("Softmax", "TopK", "GatherElements", "ScatterElements"):
        if node.inputs[0] is None or node.inputs[0].shape is None:
            continue
        axis = node.attributes.get_int("axis", -1 if node.op_type in ("Softmax", "TopK") else 0)
        rank = rank_of(node.inputs[0])
        node.attributes["axis"] = ir.AttrInt64("axis", axis - rank if axis >= 0 else axis + rank)
        return True
    return False


@mutation
def count_axes_from_the_other_end(mutant: Mutant) -> bool:
    for node in mutant.nodes("ReduceSum", "ReduceMax", "Squeeze"):
        axes = array_of(node.inputs[1]) if len(node.inputs) > 1 else None
        if axes is None or node.inputs[0] is None or node.inputs[0].shape is None:
            continue
        rank = rank_of(node.inputs[0])
        node.replace_input_with(1, mutant.constant(np.where(axes < 0, axes + rank, axes - rank)))
        return True
    return False


@mutation
def swap_operands(mutant: Mutant) -> bool:
    for node in mutant.nodes("Add", "Mul", "Max"):
        first, second = node.inputs
        node.replace_input_with(0, second)
        node.replace_input_with(1, first)
        return True
    return False


@mutation
def divide_by_reciprocal(mutant: Mutant) -> bool:
    for node in mutant.nodes("Div"):
        x, divisor = node.inputs
        mutant.take_over(node, mutant.write("Mul", x, mutant.write("Reciprocal", divisor, at=node), at=node))
        return True
    return False


@mutation
def divide_by_one_over(mutant: Mutant) -> bool:
    for node in mutant.nodes("Div"):
        x, divisor = node.inputs
        one = number_like(node.outputs[0], 1.0)
        mutant.take_over(node, mutant.write("Mul", mutant.write("Div", one, divisor, at=node), x, at=node))
        return True
    return False


@mutation
def divide_by_power(mutant: Mutant) -> bool:
    for node in mutant.nodes("Div"):
        x, divisor = node.inputs
        inverse = mutant.write("Pow", divisor, number_like(node.outputs[0], -1.0), at=node)
        mutant.take_over(node, mutant.write("Mul", x, inverse, at=node))
        return True
    return False


@mutation
def divide_by_inverse_scale(mutant: Mutant) -> bool:
    for node in mutant.nodes("Mul"):
        operands = with_constant(node)
        if operands is None or 0 in operands[1]:
            continue
        x, factor = operands
        inverse = np.array(1 / factor, factor.dtype)
        if not np.allclose(1 / inverse.astype(np.float64), factor, rtol=1e-6, atol=0):
            continue
        mutant.take_over(node, mutant.write("Div", x, inverse, at=node))
        return True
    return False


@mutation
def split_factor(mutant: Mutant) -> bool:
    for node in mutant.nodes("Mul"):
        operands = with_constant(node)
        if operands is None:
            continue
        x, factor = operands
        half = mutant.write("Mul", x, number_like(node.outputs[0], 0.5), at=node)
        mutant.take_over(node, mutant.write("Mul", half, np.array(2 * factor), at=node))
        return True
    return False


@mutation
def split_summand(mutant: Mutant) -> bool:
    for node in mutant.nodes("Add"):
        operands = with_constant(node)
        if operands is None:
            continue
        x, summand = operands
        half = np.array(summand / 2)
        part = mutant.write("Add", x, half, at=node)
        mutant.take_over(node, mutant.write("Add", np.array(summand - half), part, at=node))
        return True
    return False


@mutation
def subtract_negated_constant(mutant: Mutant) -> bool:
    for node in mutant.nodes("Add"):
        operands = with_constant(node)
        if operands is None:
            continue
        x, summand = operands
        mutant.take_over(node, mutant.write("Sub", x, np.array(-summand), at=node))
        return True
    return False


@mutation
def subtract_negation(mutant: Mutant) -> bool:
    for node in mutant.nodes("Add"):
        x, summand = node.inputs
        mutant.take_over(node, mutant.write("Sub", x, mutant.write("Neg", summand, at=node), at=node))
        return True
    return False


@mutation
def negate_twice(mutant: Mutant) -> bool:
    for node in mutant.nodes("Mul"):
        operands = with_constant(node)
        if operands is None:
            continue
        x, factor = operands
        mutant.take_over(node, mutant.write("Neg", mutant.write("Mul", x, np.array(-factor), at=node), at=node))
        return True
    return False


@mutation
def reduce_and_unsqueeze(mutant: Mutant) -> bool:
    for node in mutant.nodes("ReduceSum", "ReduceMax"):
        if node.attributes.get_int("keepdims", 1) != 1:
            continue
        reduced = mutant.write(node.op_type, *node.inputs, at=node, keepdims=0)
        mutant.take_over(node, mutant.write("Unsqueeze", reduced, np.array([-1]), at=node))
        return True
    return False


@mutation
def reduce_and_squeeze(mutant: Mutant) -> bool:
    for node in mutant.nodes("ReduceSum", "ReduceMax"):
        if node.attributes.get_int("keepdims", 1) != 0:
            continue
        reduced = mutant.write(node.op_type, *node.inputs, at=node, keepdims=1)
        mutant.take_over(node, mutant.write("Squeeze", reduced, np.array([-1]), at=node))
        return True
    return False


@mutation
def sum_magnitudes(mutant: Mutant) -> bool:
    """The scores of the chosen are not negative."""
    for node in mutant.nodes("ReduceSum"):
        if node.attributes.get_int("keepdims", 1) != 1 or (mutant.opset < 18):
            continue
        mutant.take_over(node, mutant.write("ReduceL1", *node.inputs, at=node))
        return True
    return False


@mutation
def clip_or_max(mutant: Mutant) -> bool:
    for node in mutant.nodes("Clip", "Max"):
        x, least = node.inputs[:2]
        mutant.take_over(node, mutant.write("Max" if node.op_type == "Clip" else "Clip", x, least, at=node))
        return True
    return False


@mutation
def sigmoid_by_exp(mutant: Mutant) -> bool:
    for node in mutant.nodes("Sigmoid"):
        (x,) = node.inputs
        one = number_like(node.outputs[0], 1.0)
        grown = mutant.write("Exp", mutant.write("Neg", x, at=node), at=node)
        mutant.take_over(node, mutant.write("Div", one, mutant.write("Add", one, grown, at=node), at=node))
        return True
    return False


@mutation
def softmax_over_the_first_axis(mutant: Mutant) -> bool:
    for node in mutant.nodes("Softmax"):
        (x,) = node.inputs
        if rank_of(x) != 2:
            continue
        turned = mutant.write("Softmax", mutant.write("Transpose", x, at=node, perm=[1, 0]), at=node, axis=0)
        mutant.take_over(node, mutant.write("Transpose", turned, at=node, perm=[1, 0]))
        return True
    return False


@mutation
def softmax_by_exp(mutant: Mutant) -> bool:
    for node in mutant.nodes("Softmax"):
        (x,) = node.inputs
        last = np.array([-1])
        grown = mutant.write(
            "Exp", mutant.write("Sub", x, mutant.write("ReduceMax", x, last, at=node), at=node), at=node
        )
        mutant.take_over(node, mutant.write("Div", grown, mutant.write("ReduceSum", grown, last, at=node), at=node))
        return True
    return False


@mutation
def softmax_by_log(mutant: Mutant) -> bool:
    for node in mutant.nodes("Softmax"):
        (x,) = node.inputs
        mutant.take_over(node, mutant.write("Exp", mutant.write("LogSoftmax", x, at=node, axis=-1), at=node))
        return True
    return False


@mutation
def gather_by_coordinates(mutant: Mutant) -> bool:
    for node in mutant.nodes("GatherElements"):
        scores, ids = node.inputs
        if rank_of(scores) != 2:
            continue
        rows = mutant.write("Unsqueeze", ids, np.array([-1]), at=node)
        mutant.take_over(node, mutant.write("GatherND", scores, rows, at=node, batch_dims=1))
        return True
    return False


@mutation
def invert_condition(mutant: Mutant) -> bool:
    for node in mutant.nodes("Where"):
        condition, a, b = node.inputs
        mutant.take_over(node, mutant.write("Where", mutant.write("Not", condition, at=node), b, a, at=node))
        return True
    return False


@mutation
def merge_inverted_condition(mutant: Mutant) -> bool:
    for node in mutant.nodes("Where"):
        condition, a, b = node.inputs
        inverted = None if condition is None else condition.producer()
        if inverted is None or inverted.op_type != "Not":
            continue
        mutant.take_over(node, mutant.write("Where", inverted.inputs[0], b, a, at=node))
        return True
    return False


@mutation
def compare_the_other_way(mutant: Mutant) -> bool:
    for node in mutant.nodes("Greater", "Less"):
        a, b = node.inputs
        mutant.take_over(node, mutant.write("Less" if node.op_type == "Greater" else "Greater", b, a, at=node))
        return True
    return False


@mutation
def root_by_power(mutant: Mutant) -> bool:
    for node in mutant.nodes("Sqrt"):
        (x,) = node.inputs
        mutant.take_over(node, mutant.write("Pow", x, number_like(node.outputs[0], 0.5), at=node))
        return True
    return False


@mutation
def split_linear_layer(mutant: Mutant) -> bool:
    for node in mutant.nodes("Gemm"):
        x, weight, bias = (*node.inputs, None)[:3]
        array = array_of(weight)
        if array is None or node.attributes.get_int("transB", 0) != 1:
            continue
        product = mutant.write("MatMul", x, np.ascontiguousarray(array.T), at=node)
        mutant.take_over(node, product if bias is None else mutant.write("Add", product, bias, at=node))
        return True
    return False


@mutation
def transpose_weight(mutant: Mutant) -> bool:
    for node in mutant.nodes("Gemm"):
        x, weight, bias = (*node.inputs, None)[:3]
        if array_of(weight) is None or node.attributes.get_int("transB", 0) != 1:
            continue
        product = mutant.write("MatMul", x, mutant.write("Transpose", weight, at=node, perm=[1, 0]), at=node)
        mutant.take_over(node, product if bias is None else mutant.write("Add", bias, product, at=node))
        return True
    return False


@mutation
def constant_as_node(mutant: Mutant) -> bool:
    for node in mutant.nodes("Add", "Mul", "Div", "Clip", "TopK", "ReduceSum", "Where", "Greater"):
        for position, value in enumerate(node.inputs):
            array = array_of(value)
            if array is not None:
                node.replace_input_with(position, mutant.write("Constant", at=node, value=ir.tensor(array)))
                return True
    return False


@mutation
def compute_twice(mutant: Mutant) -> bool:
    for value in mutant.values():
        node, uses = value.producer(), list(value.uses())
        assert node is not None
        if len(uses) < 2 or len(node.outputs) > 1 or node.op_type in ("Gemm", "MatMul"):
            continue  # two linear layers that compute the same are beyond the router
        reader, position = mutant.rng.choice(uses)
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        reader.replace_input_with(position, mutant.write(node.op_type, *node.inputs, at=node, **attributes))
        return True
    return False


@mutation
def score_in_double(mutant: Mutant) -> bool:
    for node in mutant.nodes("Softmax", "Sigmoid", "Sqrt"):
        if node.outputs[0].dtype != ir.DataType.FLOAT:
            continue
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        wide = mutant.write("Cast", node.inputs[0], at=node, to=ir.DataType.DOUBLE)
        scored = mutant.write(node.op_type, wide, at=node, **attributes)
        mutant.take_over(node, mutant.write("Cast", scored, at=node, to=ir.DataType.FLOAT))
        return True
    return False


def _negated(mutant: Mutant, value: ir.Value, at: ir.Node) -> ir.Value:
    return mutant.write("Neg", value, at=at)


@mutation
def choose_the_smallest_of_the_negated(mutant: Mutant) -> bool:
    for node in mutant.nodes("TopK"):
        if not node.attributes.get_int("largest", 1):
            continue
        x = node.inputs[0]
        assert x is not None
        node.replace_input_with(0, mutant.write("Neg", x, at=node))
        node.attributes["largest"] = ir.AttrInt64("largest", 0)
        if node.outputs[0].uses():
            mutant.divert(node.outputs[0], functools.partial(_negated, mutant, node.outputs[0]))
        return True
    return False


@mutation
def extra_output(mutant: Mutant) -> bool:
    """Not absorbed where the value is: a stated reason, then."""
    for value in mutant.values():
        if not value.is_graph_output():
            mutant.model.graph.outputs.append(value)
            producer = value.producer()
            assert producer is not None
            mutant.stopped += [value.name or "", producer.name or ""]
            return True
    return False

"""The stacks of experts' weights behind a router: what one token reads of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

from ort_moe.graphs.node_kinds import experts_inputs, is_experts
from ort_moe.graphs.operators import PRODUCTS
from ort_moe.ops import FUSED_EXPERTS

if TYPE_CHECKING:
    import onnx_ir as ir

_IDS_PASS = {"Cast", "Reshape", "Unsqueeze", "Squeeze", "Flatten", "Identity", "Concat", "Where", "Tile", "Expand"}
_WEIGHTS_PASS = {"Cast", "Transpose", "Identity", "Reshape", "DequantizeLinear", "Unsqueeze"}
_PARTS = {"Split", "Slice", "Squeeze", "Gather"}
"""What takes one expert's weights out of a stack."""
_GATHERS = {"Gather", "GatherND", "GatherBlockQuantized"}
_EXPERTS_INDICES = FUSED_EXPERTS.input_index("indices")
_STACKED = ("_weights", "_scales", "_zero_points")
"""Ends of the names of FusedExperts' inputs that hold a matrix for each expert."""
_ENDS = {"ReduceSum", "ReduceMean", "Shape", "Size"}
"""Where the sum over experts has been taken, or something else than activations begins."""
_SUMS = {"Add", "Sum"}
_MOST_VALUES = 20_000
"""Values looked at for one router; experts written out one by one take some ten nodes each."""


@dataclass(frozen=True)
class ExpertWeight:
    """A stack of weights of which experts' parts are read.

    Attributes:
        shape: Its shape; the experts come first.
        dtype: Element type, as ONNX names it.
        nbytes: Bytes of the whole.
    """

    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype.lower()} {'x'.join(map(str, self.shape))}"


@dataclass
class ExpertWeights:
    """What is behind a router.

    Attributes:
        stacks: In the order in which they were met.
        all_experts: Whether each token goes through every expert, as where the choice only masks their results.
        copied: Whether the parts of each choice are copied before they are multiplied.
    """

    stacks: tuple[ExpertWeight, ...] = ()
    all_experts: bool = False
    copied: bool = False


def expert_weights(ids: ir.Value, experts: int | None) -> ExpertWeights:
    """Finds the stacks that the choice `ids` (..., K) selects from, or whose products it masks."""
    chosen = _Walk(experts)
    chosen.gathered(ids)
    if chosen.found:
        return ExpertWeights(tuple(chosen.found.values()), copied=chosen.copied)
    walk = _Walk(experts)
    walk.forward(ids)
    return ExpertWeights(tuple(walk.found.values()), bool(walk.found) and walk.all_experts)


def copied_per_choice(ids: ir.Value) -> int:
    """Bytes of float32 that a layer which copies the matrices of each choice copies at a time for one; 0: it does not.

    Args:
        ids: The choice (..., K).
    """
    walk = _Walk(None)
    walk.gathered(ids)
    if not walk.copied:
        return 0
    return max((prod(weight.shape[1:]) * 4 for weight in walk.found.values()), default=0)


def stack(value: ir.Value | None, experts: int | None) -> tuple[ExpertWeight, ir.Value] | None:
    """The constant behind a value, if it is a stack of at least matrices with one for each expert."""
    while value is not None and value.const_value is None:
        producer = value.producer()
        if producer is None or producer.op_type not in _WEIGHTS_PASS:
            return None
        value = producer.inputs[0]
    if value is None or value.const_value is None:
        return None
    shape = tuple(int(size) for size in value.const_value.shape.numpy())
    if len(shape) < 3 or (experts is not None and shape[0] != experts):
        return None
    return ExpertWeight(shape, value.const_value.dtype.name, value.const_value.nbytes), value


def fused_stacks(node: ir.Node) -> Iterator[ExpertWeight]:
    """The stacks of a FusedExperts that are constants."""
    for name, value in experts_inputs(node).items():
        taken = stack(value, None) if name.endswith(_STACKED) else None
        if taken is not None:
            yield taken[0]


@dataclass
class _Walk:
    """A search through the graph around one router."""

    experts: int | None
    found: dict[ir.Value, ExpertWeight] = field(default_factory=dict)
    all_experts: bool = False
    copied: bool = False

    def gathered(self, ids: ir.Value) -> None:
        """Follows expert ids forward to the gathers of stacked weights, and to FusedExperts, which gathers inside."""
        queue, seen = deque([ids]), {ids}
        while queue:
            for node, position in queue.popleft().uses():
                if node.op_type in _GATHERS and position == 1:
                    self.copied = self._take(node.inputs[0]) or self.copied
                elif is_experts(node) and position == _EXPERTS_INDICES:
                    for name, value in experts_inputs(node).items():
                        if name.endswith(_STACKED):
                            self._take(value)
                elif node.op_type in _IDS_PASS and node.outputs[0] not in seen:
                    seen.add(node.outputs[0])
                    queue.append(node.outputs[0])

    def forward(self, ids: ir.Value) -> None:
        """Follows all that depends on the ids to the products with stacks, or with one expert's part of a stack."""
        queue, seen = deque([(ids, False)]), {ids}
        while queue and len(seen) < _MOST_VALUES:
            value, sorted_rows = queue.popleft()
            for node, position in value.uses():
                others = [other for place, other in enumerate(node.inputs) if place != position and other is not None]
                if node.op_type in PRODUCTS or node.op_type == "Mul":
                    taken = [other for other in others if self._take(other)]
                    if taken:
                        self.all_experts = self.all_experts or not sorted_rows
                    else:
                        self._backward(others)
                    if not taken and node.op_type in PRODUCTS:
                        continue
                elif _ends(node, others):
                    continue
                # A gather of rows of activations leaves each expert those that have chosen it.
                selects = sorted_rows or (node.op_type in _GATHERS and position == 1)
                for output in node.outputs:
                    if output not in seen:
                        seen.add(output)
                        queue.append((output, selects))

    def _backward(self, values: list[ir.Value]) -> None:
        """Looks for stacks in what made these values, within the layer."""
        before, selects = len(self.found), False
        queue, seen = deque(values), set(values)
        while queue and len(seen) < _MOST_VALUES:
            node = queue.popleft().producer()
            if node is None:
                continue
            inputs = [value for value in node.inputs if value is not None]
            selects = selects or (node.op_type in _GATHERS and _is_computed(inputs[0]))
            if node.op_type in PRODUCTS:
                inputs = [value for value in inputs if not self._take(value)]
                if len(inputs) == len(node.inputs):
                    continue
            elif _ends(node, inputs[1:]):
                continue
            fresh = [value for value in inputs if value not in seen]
            seen.update(fresh)
            queue.extend(fresh)
        if len(self.found) > before and not selects:
            self.all_experts = True

    def _take(self, value: ir.Value | None) -> bool:
        """Whether the value is a stack or one expert's part of one; keeps it."""
        while value is not None and (part := value.producer()) is not None and part.op_type in _PARTS:
            value = part.inputs[0]
        taken = stack(value, self.experts)
        if taken is not None:
            self.found[taken[1]] = taken[0]
        return taken is not None


def _ends(node: ir.Node, others: list[ir.Value]) -> bool:
    """Whether the layer ends here: at the sum over experts, at a norm, at the residual."""
    if node.op_type in _ENDS or node.op_type.endswith("Normalization"):
        return True
    return node.op_type in _SUMS and any(_is_computed(value) for value in others)


def _is_computed(value: ir.Value) -> bool:
    """Whether the value is more than a constant, or what a gather takes of one, as the biases of experts are."""
    return all(source.const_value is None for source in _sources(value))


def _sources(value: ir.Value) -> Iterator[ir.Value]:
    """The value, and what it was taken or reshaped from."""
    yield value
    while (node := value.producer()) is not None and node.op_type in (_PARTS | _GATHERS | _WEIGHTS_PASS):
        source = node.inputs[0]
        if source is None:
            return
        value = source
        yield value

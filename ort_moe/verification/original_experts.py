"""The weights of the original's experts, as they were before they were packed: where they lie in the original."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from ort_moe.errors import ModelError
from ort_moe.files.loading import load_model
from ort_moe.files.streamed_tensor import StreamedTensor
from ort_moe.graphs.node_kinds import experts_inputs, is_contrib_moe, is_experts
from ort_moe.verification.packed_weights import Weights, config_of, fits
from ort_moe.verification.runnable_model import RunnableModel

if TYPE_CHECKING:
    import onnx_ir as ir

    from ort_moe.rewrites.contrib_experts.block import ContribBlock

_LAYERS = ("fc1", "fc2")


class OriginalExperts:
    """Finds the weights that packed ones were made of; the original is looked at when the first are asked for.

    Args:
        original: The original.
    """

    def __init__(self, original: RunnableModel) -> None:
        self._original = original

    def packed_by(self, node: ir.Node) -> Weights | None:
        """What a FusedExperts has packed, by what `optimize` makes of the original; None where that is not known."""
        before = self._fused.get(node.name)
        if before is None:
            return None
        was, now = config_of(before), config_of(node)
        if was.weight_format != "dense" or (was.gated, was.gate_layout) != (now.gated, now.gate_layout):
            return None
        given = experts_inputs(before)
        weights = {layer: tensor for layer in _LAYERS if (tensor := given[f"{layer}_weights"].const_value) is not None}
        return weights if len(weights) == len(_LAYERS) and fits(node, weights) else None

    def is_packed_alike(self, output: str, node: ir.Node) -> bool:
        """Whether the contrib node with that output has codes as a FusedExperts has: then they are its own."""
        block, config = self._block(output), config_of(node)
        if isinstance(block, str):
            return False
        return (block.weight_format, block.attributes["block_size"]) == (config.weight_format, config.block_size)

    def of_contrib(self, output: str) -> Weights | str:
        """Those of the contrib node with that output, in the order of FusedExperts; or why they are not known."""
        import onnx_ir as ir

        block = self._block(output)
        if isinstance(block, str):
            return block
        if block.weight_format != "dense":
            return f"the original's weights are packed, too, in {block.weight_format}"
        sources = {layer: block.layers[f"{layer}_weights"] for layer in _LAYERS}
        return {
            layer: StreamedTensor(source.released_entry, source.dtype, ir.Shape(source.shape), source.base)
            for layer, source in sources.items()
        }

    def _block(self, output: str) -> ContribBlock | str:
        """What the contrib node with that output is; or why it cannot be read."""
        from ort_moe.rewrites.contrib_experts.block import read
        from ort_moe.rewrites.rule import Refusal

        node = next(each for each in self._given.graph if is_contrib_moe(each) and each.outputs[0].name == output)
        try:
            return read(node, "cpu")
        except Refusal as refusal:
            return f"the original's weights cannot be read: {refusal}"

    @cached_property
    def _given(self) -> ir.Model:
        """The original as it lies in its file: neither widened nor respelt."""
        original = self._original
        return load_model(original.path) if original.widened or original.respelt else original.model

    @cached_property
    def _fused(self) -> dict[str | None, ir.Node]:
        """The FusedExperts by their names that the original has or becomes."""
        from ort_moe.rewrites import rewrite

        model = self._given.clone()  # shares the weights
        try:
            rewrite(model)
        except ModelError:
            return {}
        return {node.name: node for node in model.graph if is_experts(node)}

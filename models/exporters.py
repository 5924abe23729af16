"""The exporters that people use, each as torch module -> ONNX graph without metadata. Needs torch and transformers."""

import io
from collections.abc import Callable, Mapping, Sequence

import onnx
import onnx_ir as ir
import torch

from ort_moe.exporting.graph import export_graph, quiet, strip_metadata

Feeds = Mapping[str, torch.Tensor]

AXES = {0: "batch", 1: "sequence"}
"""Of every input: what is dynamic, unless the shapes are static."""


def export_dynamo(module: torch.nn.Module, feeds: Feeds, outputs: Sequence[str], opset: int, static: bool) -> ir.Model:
    """torch.onnx.export(dynamo=True)."""
    program = torch.onnx.export(
        module,
        tuple(feeds.values()),
        dynamo=True,
        opset_version=opset,
        input_names=list(feeds),
        output_names=list(outputs),
        dynamic_shapes=None if static else tuple(AXES for _ in feeds),
        verbose=False,
    )
    assert program is not None
    return program.model


def export_legacy(module: torch.nn.Module, feeds: Feeds, outputs: Sequence[str], opset: int, static: bool) -> ir.Model:
    """torch.onnx.export(dynamo=False), which traces TorchScript."""
    # Outputs beyond the first are router logits, (batch * sequence, E).
    axes = dict.fromkeys((*feeds, outputs[0]), AXES) | {name: {0: "tokens"} for name in outputs[1:]}
    buffer = io.BytesIO()
    torch.onnx.export(
        module,
        tuple(feeds.values()),
        buffer,
        dynamo=False,
        opset_version=opset,
        input_names=list(feeds),
        output_names=list(outputs),
        dynamic_axes=None if static else axes,
    )
    return ir.serde.deserialize_model(onnx.load_from_string(buffer.getvalue()))


def export_transformers(
    module: torch.nn.Module, feeds: Feeds, outputs: Sequence[str], opset: int, static: bool
) -> ir.Model:
    """transformers' own exporter: torch.export with patches and translations of its own."""
    dims = {axis: torch.export.Dim(name, min=1) for axis, name in AXES.items()}
    model = export_graph(module, feeds, None if static else dict.fromkeys(feeds, dims), opset=opset)
    # It names outputs after what a model returns.
    for value, name in zip(model.graph.outputs, outputs, strict=True):
        value.name = name
    return model


Exporter = Callable[[torch.nn.Module, Feeds, Sequence[str], int, bool], ir.Model]

EXPORTERS: Mapping[str, tuple[Exporter, str]] = {
    "dynamo": (export_dynamo, "batched_mm"),
    "legacy": (export_legacy, "batched_mm"),
    "transformers": (export_transformers, "batched_mm"),
    "transformers_grouped": (export_transformers, "grouped_mm"),
}
"""By name: what exports, and transformers' implementation of the experts that it exports.

The rest does not export: torch's exporters have no translation of grouped_mm, and the eager experts, a loop over the
experts that were hit, bake the example's choice of experts into the graph.
"""


def export_module(
    exporter: str, module: torch.nn.Module, feeds: Feeds, outputs: Sequence[str], *, opset: int, static: bool
) -> ir.Model:
    """Export `module`, called with `feeds` in order, by the exporter of that name."""
    with quiet():
        model = EXPORTERS[exporter][0](module, feeds, outputs, opset, static)
    strip_metadata(model)
    return model

"""A PyTorch module as an ONNX graph, by transformers' own exporter. Needs torch and transformers."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch


def export_graph(
    module: torch.nn.Module,
    inputs: Mapping[str, Any],
    dynamic_shapes: Mapping[str, Any] | None,
    *,
    opset: int,
    trust_shapes: bool = False,
) -> ir.Model:
    """Exports a module by torch.export with transformers' patches and translations, without metadata.

    Args:
        module: What is called with `inputs` by name.
        inputs: Tensors to trace with, or nested dictionaries of tensors, whose graph inputs are named `outer.inner`.
        dynamic_shapes: Of the same structure, what varies of each tensor, as torch.export takes it; None: nothing.
        opset: Version of the standard operator set.
        trust_shapes: Export although torch.export cannot prove that the graph takes every size allowed.
    """
    from transformers.exporters import OnnxConfig, OnnxExporter

    config = OnnxConfig(
        opset_version=opset,
        dynamic_shapes=None if dynamic_shapes is None else dict(dynamic_shapes),
        prefer_deferred_runtime_asserts_over_guards=trust_shapes,
    )
    with quiet():
        model: ir.Model
        model, _ = OnnxExporter().export_program(module, dict(inputs), config)
    strip_metadata(model)
    return model


def strip_metadata(model: ir.Model) -> None:
    """Removes metadata and doc strings in place: stack traces are nine tenths of a freshly exported small file."""
    import onnx_ir.passes.common as common_passes

    common_passes.ClearMetadataAndDocStringPass()(model)
    for graph in model.graphs():
        values = [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
        for value in values:
            value.metadata_props.clear()
            value.doc_string = None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps the exporters' progress reports and their warnings about optional packages off the terminal."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)

"""`ort_moe.export`: from a Hugging Face folder to a decode graph and a prefill graph over one file of weights."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ort_moe.choices import PRECISIONS, Precision, check_choice
from ort_moe.errors import EnvironmentUnfitError, ModelError, OutputError
from ort_moe.exporting.checkpoint import Checkpoint
from ort_moe.exporting.requirements import require_exporter
from ort_moe.files.model_path import check_output_name
from ort_moe.files.staged_folder import StagedFolder, check_folder
from ort_moe.printing.printable import Printable, byte_size
from ort_moe.printing.wording import counted

if TYPE_CHECKING:
    import onnx_ir as ir
    import transformers
    from rich.console import RenderableType

    from ort_moe.exporting.architecture import Architecture

DECODE, PREFILL, WEIGHTS = "decode.onnx", "prefill.onnx", "weights.data"
"""The files that are made; all others in an export are copies."""

USUAL_LENGTH = 4096
"""Tokens that the cache holds, unless told otherwise or the model was made for fewer."""

_OPSET = 20
_TRACED_TOKENS = 5
"""Of prefill, at most."""


@dataclass(frozen=True)
class Export(Printable):
    """What `export` wrote.

    Attributes:
        source: The model's folder.
        output: The folder written.
        architecture: transformers' name of the architecture.
        precision: Of the weights, but for those that the architecture keeps in float32: `fp32`, `fp16` or `bf16`.
        batch: Sequences that are run side by side.
        max_length: Tokens that the cache holds of each.
        moe_layers: Layers with experts.
        cache_bytes: Of all keys and values.
        weight_bytes: Of the file of weights.
        carried: Names of the files that were copied.
        difference: Of the graphs' logits from PyTorch's, relative to their norm; None where they were not compared.
        warnings: Sentences for the user.
    """

    source: str
    output: str
    architecture: str
    precision: str
    batch: int
    max_length: int
    moe_layers: int
    cache_bytes: int
    weight_bytes: int
    carried: tuple[str, ...]
    difference: float | None = None
    warnings: tuple[str, ...] = ()

    @property
    def decode(self) -> Path:
        """The graph of one token."""
        return Path(self.output) / DECODE

    @property
    def prefill(self) -> Path:
        """The graph of any number of tokens."""
        return Path(self.output) / PREFILL

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        sequences = f"{counted(self.batch, 'sequence')} of up to {self.max_length} tokens"
        layers = counted(self.moe_layers, "layer") if self.moe_layers else "no layer"
        lines = [
            f"{self.source}: {self.architecture}, {layers} with experts, {self.precision}, {sequences}",
            f"  {DECODE}: a token of each sequence; {PREFILL}: any number of them",
            f"  {WEIGHTS}: {byte_size(self.weight_bytes)}, for both; the cache takes {byte_size(self.cache_bytes)}",
        ]
        if self.carried:
            lines.append(f"  copied: {', '.join(self.carried)}")
        if self.difference is not None:
            lines.append(f"verified: logits of a prompt and a token more, within {self.difference:.1e} of PyTorch's")
        lines += [f"warning: {warning}" for warning in self.warnings]
        lines.append(f"written: {self.output}")
        return Group(*map(Text, lines))


def export(
    model_folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    max_length: int | None = None,
    batch: int = 1,
    precision: Precision | None = None,
    verify: bool = True,
    force: bool = False,
    progress: Callable[[str], object] = lambda step: None,
) -> Export:
    """Exports a language model with experts to ONNX, in the form that `optimize` fuses whole.

    The output folder holds `decode.onnx`, of fixed shapes, `prefill.onnx`, which takes any number of tokens, the
    weights of both, and what else of the model's folder says how to use it: configurations and tokenizer.

    Both graphs take `input_ids` and `position_ids` (batch, tokens) int64, and `past_key_values.N.key` and `.value`
    (batch, heads, max_length, head size), and return `logits` (batch, tokens, vocabulary), and `present.N.key` and
    `.value`, which may share the buffers of the former. A token is written to the slot of its position and sees the
    slots up to its own; a cache of zeros is empty.

    Args:
        model_folder: A Hugging Face model folder.
        output: The folder to write; it must not exist.
        max_length: Tokens that the cache holds; None: as many as the model was made for, at most 4096.
        batch: Sequences side by side.
        precision: Of the weights; None: as stored.
        verify: Whether to run both graphs on the CPU and compare them with PyTorch, in float32.
        force: Replace an export that is there, with all that lies in its folder.
        progress: Called with what is about to be done, in words.

    Raises:
        EnvironmentUnfitError: PyTorch or transformers is missing.
        ModelError: The folder holds no model, not all of its weights, or one that cannot be exported.
        OutputError: The output cannot be written there, or exists.
        VerificationError: The graphs do not compute what PyTorch does; nothing was put in place.
        ValueError: The batch, the length or the precision is out of range.
    """
    if batch < 1:
        raise ValueError(f"the batch is {batch}: 1 or more is expected")
    if max_length is not None and max_length < 2:
        raise ValueError(f"the maximal length is {max_length}: 2 or more is expected")
    if precision is not None:
        check_choice("precision", precision, PRECISIONS)
    check_output_name(output)
    final = Path(os.path.abspath(output))
    check_folder(final, Path(model_folder), _is_export, force=force)
    checkpoint = Checkpoint.of(model_folder)
    progress("loading PyTorch and transformers")
    require_exporter()

    from ort_moe.exporting.architecture import Architecture, load_model
    from ort_moe.exporting.check import check_graphs

    architecture = Architecture.of(checkpoint)
    length = _length(checkpoint, architecture, max_length)
    progress("reading the weights")
    model = load_model(checkpoint, architecture, precision)
    exported_as = _precision_of(model)
    graphs = {}
    for name, tokens in ((DECODE, 1), (PREFILL, _traced_tokens(batch, length))):
        progress(f"tracing {name}")
        graphs[name] = _graph(checkpoint, model, architecture, batch, length, tokens)
    with StagedFolder(final, force=force) as staged:
        progress("writing")
        try:
            _write(graphs, checkpoint, staged.path)
        except OSError as error:
            raise OutputError(f"cannot write {final}: {error.strerror or error}") from error
        weight_bytes = (staged.path / WEIGHTS).stat().st_size
        difference, warnings = None, []
        if verify:
            progress("comparing with PyTorch")
            try:
                difference = check_graphs(staged.path / PREFILL, staged.path / DECODE, model)
            except EnvironmentUnfitError as error:
                warnings.append(f"not verified: {error}")
            except ModelError as error:
                raise ModelError(str(error).replace(str(staged.path), str(final))) from error
        else:
            warnings.append("not verified: switched off")
        staged.commit()
    if not architecture.moe_layers:
        warnings.append("the model has no experts: there is nothing in it that `ort-moe optimize` makes faster")
    cache = [value for value in graphs[DECODE].graph.inputs if str(value.name).startswith("past_key_values.")]
    return Export(
        source=os.fspath(model_folder),
        output=os.fspath(output),
        architecture=checkpoint.model_type,
        precision=exported_as,
        batch=batch,
        max_length=length,
        moe_layers=architecture.moe_layers,
        cache_bytes=sum(_nbytes(value) for value in cache),
        weight_bytes=weight_bytes,
        carried=tuple(path.name for path in checkpoint.carried),
        difference=difference,
        warnings=tuple(warnings),
    )


def _length(checkpoint: Checkpoint, architecture: Architecture, asked: int | None) -> int:
    longest = architecture.longest
    if asked is None:
        return USUAL_LENGTH if longest is None else min(longest, USUAL_LENGTH)
    if longest is not None and asked > longest:
        raise ModelError(
            f"{checkpoint.folder}: the model was made for {longest} tokens, a cache of {asked} was asked for"
        )
    return asked


def _graph(
    checkpoint: Checkpoint,
    model: transformers.PreTrainedModel,
    architecture: Architecture,
    batch: int,
    length: int,
    tokens: int,
) -> ir.Model:
    """Exports the model for one token, or for any number where it is traced with more."""
    import torch

    from ort_moe.exporting.architecture import first_line
    from ort_moe.exporting.cached_step import CachedStep
    from ort_moe.exporting.graph import export_graph

    layers = {str(i): shapes for i, shapes in enumerate(architecture.layers) if shapes is not None}
    try:
        inputs: dict[str, Any] = {
            "input_ids": torch.zeros(batch, tokens, dtype=torch.long),
            "position_ids": torch.arange(tokens).repeat(batch, 1),
            "past_key_values": {
                i: {
                    part: torch.zeros(batch, heads, length, size, dtype=model.dtype)
                    for part, (heads, size) in zip(("key", "value"), shapes, strict=True)
                }
                for i, shapes in layers.items()
            },
        }
    except (RuntimeError, TypeError, MemoryError) as error:  # torch's, of sizes that do not fit 64 bits or the memory
        raise ModelError(
            f"{checkpoint.folder}: a cache of {length} tokens for a batch of {batch} does not fit into memory"
        ) from error
    varying: dict[str, Any] | None = None
    if tokens > 1:
        sequence = {1: torch.export.Dim("sequence", min=1, max=length)}
        fixed = {i: {"key": None, "value": None} for i in layers}
        varying = {"input_ids": sequence, "position_ids": sequence, "past_key_values": fixed}
    step = CachedStep(model, [shapes is not None for shapes in architecture.layers]).eval()
    try:
        exported = export_graph(step, inputs, varying, opset=_OPSET, trust_shapes=True)
    except Exception as error:  # torch.export and its translators raise classes of their own
        reason = first_line(error)
        raise ModelError(
            f"{checkpoint.folder}: the architecture '{checkpoint.model_type}' cannot be exported: {reason}"
        ) from error
    _name_sequence(exported)
    return exported


def _traced_tokens(batch: int, length: int) -> int:
    """With which prefill is traced: not 1, which torch.export takes for fixed, nor, if there is another, the batch."""
    candidates = range(min(_TRACED_TOKENS, length), 1, -1)
    return next((tokens for tokens in candidates if tokens != batch), candidates[0])


def _name_sequence(model: ir.Model) -> None:
    """Calls the number of tokens `sequence` where torch.export has numbered it."""
    import onnx_ir as ir

    (numbered,) = [value.shape[1] for value in model.graph.inputs if value.name == "input_ids" and value.shape]
    if not isinstance(numbered, ir.SymbolicDim):
        return
    word = re.compile(rf"\b{numbered.value}\b")
    for value in [*model.graph.inputs, *(output for node in model.graph.all_nodes() for output in node.outputs)]:
        if value.shape is None:
            continue
        for i, dim in enumerate(value.shape):
            if isinstance(dim, ir.SymbolicDim) and dim.value is not None:
                value.shape[i] = word.sub("sequence", dim.value)


def _write(graphs: dict[str, ir.Model], checkpoint: Checkpoint, folder: Path) -> None:
    import onnx_ir as ir

    from ort_moe.exporting.shared_weights import move_weights

    move_weights(graphs.values(), folder / WEIGHTS)
    for name, model in graphs.items():
        ir.save(model, folder / name, format="protobuf")
    for path in checkpoint.carried:
        shutil.copyfile(path, folder / path.name)


def _precision_of(model: transformers.PreTrainedModel) -> str:
    from ort_moe.exporting.architecture import DTYPES

    names = {dtype: name for name, dtype in DTYPES.items()}
    return names.get(model.dtype, str(model.dtype).removeprefix("torch."))


def _nbytes(value: ir.Value) -> int:
    from math import prod

    assert value.shape is not None
    assert value.dtype is not None
    return int(prod(value.shape.numpy()) * value.dtype.itemsize)


def _is_export(folder: Path) -> bool:
    return all((folder / name).is_file() for name in (DECODE, PREFILL, WEIGHTS))

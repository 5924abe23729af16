"""Weights of a model that no file of the input holds: where they go when it is written, and how they get there.

They are made when they are written (transposed, joined), or lie in a file of their own (packed to another format).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

_SMALL = 256
"""Bytes up to which a tensor is never put into external data."""
_MOST_INLINE = 1 << 30
"""Bytes of weights up to which a model without external data stays one file; Protocol Buffers end at twice as many."""


def is_fresh(tensor: ir.TensorProtocol | None, folder: Path) -> bool:
    """Whether a tensor is in no file of the input, which lies in `folder`."""
    import onnx_ir as ir

    if isinstance(tensor, ir.ExternalTensor):
        return Path(tensor.base_dir).absolute() != folder
    return isinstance(tensor, ir.LazyTensor)


def in_need_of_a_file(model: ir.Model, folder: Path, *, has_files: bool) -> list[ir.Value]:
    """The fresh weights that go to a file of their own; none where all can be inside the model.

    Args:
        model: Any.
        folder: Of the input.
        has_files: Whether the input has external data.
    """
    import onnx_ir as ir

    fresh, inline = [], 0
    for value in _initializers(model):
        tensor = value.const_value
        if tensor is None:
            continue
        if is_fresh(tensor, folder) and tensor.nbytes > _SMALL:
            fresh.append(value)
        if not isinstance(tensor, ir.ExternalTensor) or is_fresh(tensor, folder):
            inline += tensor.nbytes
    return fresh if has_files or inline > _MOST_INLINE else []


@contextlib.contextmanager
def placed(model: ir.Model, folder: Path, apart: Sequence[ir.Value], path: Path) -> Iterator[None]:
    """Lets the model hold its fresh weights, so that it can be written; for the time being.

    Args:
        model: Whose they are.
        folder: Of the input.
        apart: Those that go to a file, one after the other.
        path: Of that file.
    """
    import onnx_ir as ir

    from ort_moe.files.weights_file import PAGE

    before = {value: value.const_value for value in _initializers(model)}
    tensors = {id(value.const_value): value.const_value for value in apart if value.const_value is not None}
    written: dict[int, ir.TensorProtocol] = {}
    if tensors:
        external = ir.external_data.convert_tensors_to_external(
            [*tensors.values()], path.parent, path.name, alignment=PAGE, align_threshold=PAGE
        )
        written.update(zip(tensors, external, strict=True))
    try:
        for value, tensor in before.items():
            if id(tensor) in written:
                value.const_value = written[id(tensor)]
            elif isinstance(tensor, ir.ExternalTensor) and is_fresh(tensor, folder):
                value.const_value = ir.Tensor(tensor.numpy().copy(), dtype=tensor.dtype, name=tensor.name)
        yield
    finally:
        for value, tensor in before.items():
            value.const_value = tensor


def rename_locations(path: Path, names: Mapping[str, str]) -> None:
    """Lets a model on disk, whose weights are not read, refer to data files by other names."""
    import onnx

    proto = onnx.load(path, format="protobuf", load_external_data=False)
    for entry in (entry for tensor in tensors_of(proto.graph) for entry in tensor.external_data):
        if entry.key == "location":
            entry.value = names.get(entry.value, entry.value)
    onnx.save(proto, path, format="protobuf")


def _initializers(model: ir.Model) -> Iterator[ir.Value]:
    """Those of the graph and of the bodies in it."""
    for graph in model.graphs():
        yield from graph.initializers.values()


def tensors_of(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """The initializers of a graph on disk, and of the bodies in it."""
    yield from graph.initializer
    for attribute in (attribute for node in graph.node for attribute in node.attribute):
        for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            yield from tensors_of(body)

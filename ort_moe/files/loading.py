"""Reads a model without its weights: what lies in external data stays on disk, memory-mapped.

What is wrong with a file is told in one sentence.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ort_moe.errors import EnvironmentUnfitError, ModelError
from ort_moe.files.fresh_weights import tensors_of
from ort_moe.files.readable import check_readable
from ort_moe.ops import DOMAIN, RUNTIME_VERSION, VERSION
from ort_moe.printing.wording import counted

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

_IR_VERSION_TAG = b"\x08"
"""First byte of nearly every ONNX file: field 1, the IR version."""


def load_model(path: str | os.PathLike[str]) -> ir.Model:
    """Reads a model; its external data is checked to be there, but not read.

    Raises:
        ModelError: The file cannot be read, is no ONNX model or cut short, lacks external data, has an IR version or
            opset that the installed ONNX Runtime cannot load, or imports another version of our operators.
    """
    import google.protobuf.message
    import onnx
    import onnx_ir as ir

    # Absolute, so that relative locations of external data are resolved (and confined) whatever the working folder.
    path = Path(os.path.abspath(path))
    try:
        head = _head(path)
        proto = onnx.load(path, format="protobuf", load_external_data=False)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    except (google.protobuf.message.DecodeError, ValueError) as error:
        if head.startswith(_IR_VERSION_TAG):
            raise ModelError(
                f"{path} is cut short or damaged: it begins like an ONNX model but cannot be parsed"
            ) from error
        raise ModelError(f"{path} is not an ONNX model: it cannot be parsed") from error
    if not proto.HasField("graph") or not proto.ir_version:
        raise ModelError(f"{path} is not an ONNX model: it holds no graph")
    if _holds_sparse_tensors(proto.graph):
        raise ModelError(f"{path} holds sparse tensors, which ort-moe cannot read: make them dense first")
    _check_versions(path, proto)
    _check_places(path, proto)
    try:
        model = ir.from_proto(proto)
    except Exception as error:  # onnx_ir raises many kinds for a proto that parses but makes no sense
        cause: BaseException = error
        while cause.__cause__ is not None:  # the outer ones print whole nodes
            cause = cause.__cause__
        raise ModelError(f"{path} is not a valid ONNX model: {cause}") from error
    for tensor in external_tensors(model):
        tensor.base_dir = path.parent
    _check_external_data(path, model)
    return model


def external_tensors(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Every tensor of the model, of its subgraphs and of its functions that lies in external data."""
    import onnx_ir as ir

    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value.const_value
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for each in graphs:
        for node in each.all_nodes():
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                    yield attribute.value


def data_files(model: ir.Model) -> dict[str, Path]:
    """The model's external data files: path by location, which is relative to the model's folder."""
    return {os.fspath(t.location): Path(t.path) for t in external_tensors(model)}


def check_data_readable(path: str | os.PathLike[str], model: ir.Model) -> None:
    """Looks whether the weights of a model can be read and its output can share their files.

    Raises:
        ModelError: A file cannot be read, or is a link out of the model's folder, which neither onnx_ir nor ONNX
            Runtime reads everywhere.
    """
    path = Path(os.path.abspath(path))
    folder = os.path.realpath(path.parent)
    for location, file in data_files(model).items():
        if not Path(os.path.realpath(file)).is_relative_to(folder):
            raise ModelError(
                f"{path}: external data '{location}' is a link to another folder, through which weights are not read: "
                "copy the model and its data to one folder with `cp -L`"
            )
        check_readable(file)


def begins_like_a_model(path: Path) -> bool:
    """Whether a file begins as nearly every ONNX model does, or is empty, as what is made for one beforehand.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return file.read(1) in (b"", _IR_VERSION_TAG)


def _head(path: Path) -> bytes:
    """The first bytes of the file.

    Raises:
        ModelError: It is empty, a device or a pipe, or a pointer left by a large-file store; or no file can have the
            name.
    """
    try:
        mode = path.stat().st_mode
    except ValueError as error:  # it holds what no file system takes
        raise ModelError(f"cannot read {os.fspath(path)!r}: no file can be called so") from error
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise ModelError(f"cannot read {path}: it is no regular file")
    with path.open("rb") as file:
        head = file.read(64)
    if not head:
        raise ModelError(f"{path} is not an ONNX model: the file is empty")
    if head.startswith(b"version https://git-lfs"):
        raise ModelError(f"{path} is not an ONNX model but a Git LFS pointer: fetch it with `git lfs pull`")
    return head


def _holds_sparse_tensors(graph: onnx.GraphProto) -> bool:
    """Whether the graph or a subgraph holds what onnx_ir drops (sparse initializers) or refuses (sparse constants)."""
    if graph.sparse_initializer:
        return True
    attributes = [attribute for node in graph.node for attribute in node.attribute]
    return any(a.HasField("sparse_tensor") or a.sparse_tensors for a in attributes) or any(
        _holds_sparse_tensors(each) for a in attributes for each in ([a.g] if a.HasField("g") else a.graphs)
    )


def _check_versions(path: Path, proto: object) -> None:
    """Asks the installed ONNX Runtime, by way of an empty graph, whether it loads this IR version and these opsets."""
    import onnx

    assert isinstance(proto, onnx.ModelProto)
    imports = {opset.domain: opset.version for opset in proto.opset_import}
    ours = imports.get(DOMAIN, VERSION)
    if ours not in (VERSION, RUNTIME_VERSION):
        raise ModelError(
            f"{path} imports version {ours} of opset '{DOMAIN}', this ort-moe knows version {VERSION}: "
            "install the ort-moe that the model was made with, or optimise the original again"
        )
    probe = onnx.ModelProto(ir_version=proto.ir_version)
    probe.graph.name = "probe"
    probe.graph.input.add().CopyFrom(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1]))
    probe.graph.output.add().CopyFrom(onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1]))
    probe.graph.node.add().CopyFrom(onnx.helper.make_node("Identity", ["x"], ["y"]))
    standard = imports.get("", imports.get("ai.onnx", onnx.defs.onnx_opset_version()))
    probe.opset_import.add(domain="", version=standard)
    made_with = f"{path} has IR version {proto.ir_version} and opset {standard}"

    from ort_moe.installation.environment import require_onnxruntime, runtime_message

    try:
        onnxruntime = require_onnxruntime()
    except EnvironmentUnfitError:
        # No (fitting) runtime to ask: what the installed onnx package does not know, we cannot rewrite either.
        if proto.ir_version > onnx.IR_VERSION or standard > onnx.defs.onnx_opset_version():
            raise ModelError(
                f"{made_with}, newer than the installed onnx {onnx.__version__} knows: upgrade onnx"
            ) from None
        return
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        onnxruntime.InferenceSession(probe.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ORT raises a class of its own for each status code
        raise ModelError(
            f"{made_with}, which ONNX Runtime {onnxruntime.__version__} cannot load: {runtime_message(error)}"
        ) from error


def _check_places(path: Path, proto: onnx.ModelProto) -> None:
    """Looks whether offsets and lengths of external data are numbers of bytes, which onnx_ir takes for granted."""
    for tensor in tensors_of(proto.graph):
        for entry in tensor.external_data:
            if entry.key in ("offset", "length") and not (entry.value.isascii() and entry.value.isdecimal()):
                raise ModelError(
                    f"{path}: the {entry.key} of tensor '{tensor.name}' in external data is '{entry.value}', "
                    "expected is a number of bytes"
                )


def _check_external_data(path: Path, model: ir.Model) -> None:
    missing: dict[str, int] = {}
    for tensor in external_tensors(model):
        location = os.fspath(tensor.location)
        if os.path.isabs(location) or ".." in Path(location).parts:
            raise ModelError(
                f"{path}: external data '{location}' lies outside the model's folder, which no runtime accepts"
            )
        data = Path(tensor.path)
        if not data.is_file():
            missing[location] = missing.get(location, 0) + 1
            continue
        if tensor.length not in (None, tensor.nbytes):
            raise ModelError(
                f"{path}: tensor '{tensor.name}' has {tensor.nbytes} bytes, but {tensor.length} in external data "
                f"'{location}'"
            )
        end = (tensor.offset or 0) + tensor.nbytes
        size = data.stat().st_size
        if end > size:
            raise ModelError(
                f"{path}: external data '{location}' is cut short: tensor '{tensor.name}' ends at byte {end}, "
                f"the file has {size}"
            )
    if missing:
        location, tensors = next(iter(missing.items()))
        others = f" (and {counted(len(missing) - 1, 'more file')})" if len(missing) > 1 else ""
        raise ModelError(
            f"{path}: external data '{location}' is missing, with {counted(tensors, 'tensor')} in it{others}: "
            "it must lie beside the model"
        )

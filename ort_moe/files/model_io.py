"""Reads a model without its weights, and writes one beside its target before it is moved into place.

Weights in external data stay on disk, memory-mapped; what is wrong with a file is told in one sentence.
"""

from __future__ import annotations

import filecmp
import os
import shutil
from collections.abc import Container, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ort_moe.errors import EnvironmentUnfitError, ModelError, OutputError
from ort_moe.files.fresh_weights import in_need_of_a_file, is_fresh, placed, rename_locations, tensors_of
from ort_moe.files.staging import HOW_TO_REPLACE, check_file_place, file_beside, folder_beside, give_usual_mode
from ort_moe.ops import DOMAIN, RUNTIME_VERSION, VERSION
from ort_moe.printing.wording import counted

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

KEEP = "keep"
"""External data stays in its files: referenced from the same folder, copied to another.

Weights that are made anew, such as transposed ones, go to a file of their own, named after the output, where the model
has external data or would not fit into one file.
"""

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


def check_links(path: str | os.PathLike[str], model: ir.Model) -> None:
    """Looks whether the weights of a model can be read and its output can share their files.

    Raises:
        ModelError: A file is a link out of the model's folder, which neither onnx_ir nor ONNX Runtime reads everywhere.
    """
    path = Path(os.path.abspath(path))
    folder = os.path.realpath(path.parent)
    for location, file in data_files(model).items():
        if not Path(os.path.realpath(file)).is_relative_to(folder):
            raise ModelError(
                f"{path}: external data '{location}' is a link to another folder, through which weights are not read: "
                "copy the model and its data to one folder with `cp -L`"
            )


class StagedModel:
    """A complete model beside its target, moved into place by `commit` and deleted where that does not come.

    `path` can be loaded and run from the moment the object is made. Use it as a context manager: leaving it without
    a commit, by an error or an interrupt, leaves nothing behind.

    Args:
        model: What to write.
        target: Where it shall go; the folder must exist.
        source: The file that it was read from.
        external_data: `KEEP`, or the name of one file beside the target that takes all weights.
        force: Whether what is there is replaced: a model, the source even, and files of external data.

    Raises:
        OutputError: It cannot be written there.
    """

    def __init__(
        self,
        model: ir.Model,
        target: str | os.PathLike[str],
        *,
        source: str | os.PathLike[str],
        external_data: str = KEEP,
        force: bool = False,
    ) -> None:
        self.target = Path(os.path.abspath(target))
        self._source = Path(os.path.abspath(source))
        self._scratch: list[Path] = []
        self._moves: list[tuple[Path, Path]] = []
        self._final_names: dict[str, str] = {}  # of data files that cannot have them before they are moved
        check_target(self.target, source=self._source, external_data=external_data, force=force)
        try:
            self._write(model, external_data, force)
        except OSError as error:
            self.discard()
            raise OutputError(f"cannot write {self.target}: {error.strerror or error}") from error
        except BaseException:
            self.discard()
            raise

    def _write(self, model: ir.Model, external_data: str, force: bool) -> None:
        folder = self.target.parent
        kept = self._kept_files(model)
        if any(same_file(self.target, path) for path in kept.values()):
            raise OutputError(f"cannot write {self.target}: it holds the input's own weights; name another output")
        if external_data != KEEP:
            kept = {}
        elif self.target.name in kept:
            raise OutputError(
                f"cannot write {self.target}: the input's weights lie in a file of that name; name another output"
            )
        own = self._source.parent
        has_files = bool(kept) or bool(_data_files_of(self._source))
        fresh = in_need_of_a_file(model, own, has_files=has_files) if external_data == KEEP else []
        fresh_name = _unlike(f"{self.target.name}.data", kept)
        if fresh:
            self._check_data_target(fresh_name, None, force)
        # A folder for what shall be moved; where data is referenced, it must lie beside the model already.
        self._scratch.append(folder_beside(self.target))
        self.path = self._scratch[0] / self.target.name
        if kept and folder.samefile(self._source.parent):
            self.path = self._beside()
            if fresh:
                staged = self._beside()
                self._final_names[staged.name] = fresh_name
                self._moves.append((staged, folder / fresh_name))
                fresh_name = staged.name
        else:
            for location, path in kept.items():
                self._check_data_target(location, path, force)
                copy = self._scratch[0] / location
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copy)
                self._moves.append((copy, folder / location))
            if fresh:
                self._moves.append((self._scratch[0] / fresh_name, folder / fresh_name))
        if external_data != KEEP:
            self._check_data_target(external_data, None, force)
            _serialize(model, self.path, external_data)
            written = self.path.parent / external_data
            if written.exists():  # a model of small tensors alone has none
                self._moves.append((written, folder / external_data))
        else:
            with placed(model, own, fresh, self.path.parent / fresh_name):
                _serialize(model, self.path, None)
        self._moves.append((self.path, self.target))

    def _beside(self) -> Path:
        """A new empty file beside the target."""
        self._scratch.append(file_beside(self.target))
        return self._scratch[-1]

    def _kept_files(self, model: ir.Model) -> dict[str, Path]:
        """The input's data files that the model still reads: path by location."""
        tensors = [tensor for tensor in external_tensors(model) if not is_fresh(tensor, self._source.parent)]
        return {os.fspath(tensor.location): Path(tensor.path) for tensor in tensors}

    def _check_data_target(self, location: str, copied_from: Path | None, force: bool) -> None:
        """Refuses to overwrite a data file that may be another model's."""
        final = self.target.parent / location
        if same_file(final, self._source):
            raise OutputError(f"cannot write {final}: it is the input; choose another name")
        if not final.exists() or (copied_from is not None and filecmp.cmp(copied_from, final, shallow=True)):
            return
        if self._source.exists() and any(final.samefile(path) for path in _data_files_of(self._source)):
            raise OutputError(f"cannot write {final}: it holds the input's own weights; choose another name")
        if not force:
            raise OutputError(
                f"cannot write {final}: it exists and may belong to another model; name another file with "
                "--external-data, or use --force to replace it"
            )

    def commit(self) -> None:
        """Moves data and model into place, the model last.

        Raises:
            OutputError: A move failed.
        """
        try:
            if self._final_names:
                rename_locations(self.path, self._final_names)
            for staged, final in self._moves:
                final.parent.mkdir(parents=True, exist_ok=True)
                if staged in self._scratch or staged == self.path:
                    give_usual_mode(staged)
                staged.replace(final)
        except OSError as error:
            raise OutputError(f"cannot write {self.target}: {error.strerror or error}") from error
        finally:
            self.discard()

    def discard(self) -> None:
        """Deletes what was staged and not moved."""
        for scratch in self._scratch:
            if scratch.is_dir():
                shutil.rmtree(scratch, ignore_errors=True)
            else:
                scratch.unlink(missing_ok=True)
        self._scratch.clear()

    def __enter__(self) -> StagedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()


def check_target(
    target: str | os.PathLike[str], *, source: str | os.PathLike[str], external_data: str = KEEP, force: bool = False
) -> None:
    """Looks whether the output can be written there, before work is put into it.

    Raises:
        OutputError: It cannot; or something is there, such as the input, and `force` is not set.
    """
    target = Path(os.path.abspath(target))
    check_file_place(target)
    if not force and os.path.lexists(target):
        what = "is the input" if same_file(target, source) else "exists"
        raise OutputError(f"cannot write {target}: it {what}; {HOW_TO_REPLACE}")
    if external_data != KEEP:
        if Path(external_data).name != external_data or external_data in ("", ".", ".."):
            raise OutputError(
                f"cannot write external data to '{external_data}': a file name without a folder is expected"
            )
        if external_data == target.name:
            raise OutputError(f"cannot write external data to '{external_data}': it is the name of the output itself")


def same_file(path: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Whether both exist and are one file, by whatever names."""
    return os.path.exists(path) and os.path.exists(other) and os.path.samefile(path, other)


def _unlike(name: str, taken: Container[str]) -> str:
    """The name, or where that is taken, such as by weights that go to the same folder, one with a number."""
    stem, number, free = name.removesuffix(".data"), 2, name
    while free in taken:
        free, number = f"{stem}.{number}.data", number + 1
    return free


def _head(path: Path) -> bytes:
    """The first bytes of the file.

    Raises:
        ModelError: It is empty, a device or a pipe, or a pointer left by a large-file store.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
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


def _data_files_of(path: Path) -> list[Path]:
    """External data files that exist of the model at `path`; none where it is no model."""
    import onnx_ir as ir

    if not path.is_file():
        return []
    try:
        model = ir.load(path, format="protobuf")
    except Exception:  # whatever is wrong with it, it is then no model that owns data
        return []
    return [file for file in data_files(model).values() if file.exists()]


def _serialize(model: ir.Model, path: Path, external_data: str | None) -> None:
    import google.protobuf.message
    import onnx_ir as ir

    try:
        ir.save(model, path, format="protobuf", external_data=external_data)
    except google.protobuf.message.EncodeError as error:  # its one cause, for a graph that onnx_ir has built
        raise OutputError(
            f"cannot write {path.name}: it is larger than the 2 GB that one file can hold; use --external-data NAME"
        ) from error

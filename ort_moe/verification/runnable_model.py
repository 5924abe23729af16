"""Models as ONNX Runtime can run them here: with inner values as outputs, and in what the CPU knows."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ort_moe.errors import EnvironmentUnfitError, ModelError
from ort_moe.files.loading import load_model
from ort_moe.files.model_path import is_utf8
from ort_moe.installation.environment import load_cuda_libraries, require_onnxruntime, runtime_message
from ort_moe.running.session import CUDA, ON_CPU, Provider, provider_names, require_available, require_started
from ort_moe.verification.sample_inputs import Feeds

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

_LARGE = 256 << 20
"""Bytes of weights from which a session is opened that spares memory."""

Run = Callable[[Feeds], dict[str, Any]]
"""Runs a session: NumPy array by output name, for NumPy array by input name."""

_EXACT: dict[str, dict[str, str]] = {CUDA: {"use_tf32": "0"}}
"""Options of execution providers, without which they round float32 to fewer bits in matrix products."""


class RunnableModel:
    """A model file, opened as sessions of any set of outputs.

    A context manager: a copy of a model that the CPU does not run as it is lies in a temporary folder until it is left.

    Args:
        path: The model.
        providers: Execution providers to run on.

    Attributes:
        path: The model.
        model: It, with its weights unread; what runs, where it was widened.
        widened: Whether bfloat16 was replaced by float32, because the CPU provider cannot run it.
        respelt: Whether contrib nodes were replaced by others that compute the same, for the same reason.
    """

    def __init__(self, path: str | os.PathLike[str], providers: Sequence[Provider] = ON_CPU) -> None:
        import onnx_ir as ir

        from ort_moe.rewrites.contrib_experts.for_cpu import respell_for_cpu

        self.path = Path(os.path.abspath(path))
        self.model = load_model(self.path)
        self._providers = list(providers)
        self._file = self.path
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        on_cpu = provider_names(providers) == ON_CPU
        self.widened = on_cpu and _has_bfloat16(self.model)
        self.respelt = on_cpu and respell_for_cpu(self.model) > 0
        if self.widened or self.respelt:
            self._scratch = tempfile.TemporaryDirectory(prefix="ort-moe-")
            self._file = Path(self._scratch.name) / "runnable.onnx"
            if self.widened:
                _widen(self.model)
            ir.save(self.model, self._file, format="protobuf", external_data="runnable.data")
            self.model = load_model(self._file)

    @property
    def data_folder(self) -> Path:
        """Where the model's external data lies."""
        return self._file.parent

    @property
    def is_large(self) -> bool:
        """Whether its weights must not come into memory as copies."""
        weights = [value.const_value for value in self.model.graph.initializers.values()]
        return sum(tensor.nbytes for tensor in weights if tensor is not None) > _LARGE

    @property
    def is_sparing(self) -> bool:
        """Whether its sessions spare memory: on the CPU, where what the runtime copies lies beside what is mapped."""
        return self.is_large and provider_names(self._providers) == ON_CPU

    def session(self, outputs: Sequence[str] | None = None, *, with_library: bool) -> Run:
        """Opens a session that returns the named values, or the model's outputs.

        Args:
            outputs: Names of values of the graph (not of its subgraphs).
            with_library: Run our nodes by our kernels; else by the standard operators that come with them.

        Raises:
            ModelError: ONNX Runtime cannot load it, or later, run it.
        """
        import onnx

        proto = onnx.load(self._file, format="protobuf", load_external_data=False)
        if self.is_sparing:
            _keep_gathers_narrow(proto.graph)
        if outputs is not None:
            del proto.graph.output[:]
            # ONNX Runtime infers the types of outputs.
            proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        return open_session(
            proto,
            str(self.path),
            with_library=with_library,
            providers=self._providers,
            data_folder=self.data_folder,
            sparing=self.is_sparing,
        )

    def __enter__(self) -> RunnableModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._scratch is not None:
            self._scratch.cleanup()


def open_session(
    proto: onnx.ModelProto,
    what: str,
    *,
    with_library: bool,
    providers: Sequence[Provider] = ON_CPU,
    data_folder: Path | None = None,
    sparing: bool = False,
) -> Run:
    """Opens a session on a model in memory whose external data lies in `data_folder`.

    TF32 is off on CUDA, unless its options say otherwise. A `sparing` session holds no copy of the weights that
    is packed or widened ahead of the run, as ONNX Runtime makes of all experts when it optimises, and no memory
    outlives it.

    Raises:
        EnvironmentUnfitError: ONNX Runtime would run it elsewhere than on these execution providers.
        ModelError: ONNX Runtime cannot load `what`; or, from the function returned, run it.
    """
    onnxruntime = require_onnxruntime()
    names = provider_names(providers)
    require_available(names, onnxruntime.get_available_providers())
    if CUDA in names:
        load_cuda_libraries()
    if data_folder is not None and not is_utf8(data_folder):
        raise ModelError(f"ONNX Runtime cannot load {what}: the name of the folder of its weights is not UTF-8")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what it logs of an error, it says in the exception, too
    if data_folder is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.fspath(data_folder))
    if sparing:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.enable_mem_pattern = False
        options.add_session_config_entry("session.disable_prepacking", "1")
    if with_library:
        from ort_moe.installation.library import register

        register(options)
    try:
        session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=_exact(providers))
    except Exception as error:  # ORT raises a class of its own for each status code
        raise ModelError(f"ONNX Runtime cannot load {what}: {runtime_message(error)}") from error
    require_started(names, session.get_providers())
    outputs = [output.name for output in session.get_outputs()]

    def run(feeds: Feeds) -> dict[str, Any]:
        try:
            results = session.run(None, feeds)
        except Exception as error:
            raise ModelError(f"ONNX Runtime cannot run {what}: {runtime_message(error)}") from error
        # What is returned keeps alive all memory that the session has ever had.
        return {name: array.copy() if sparing else array for name, array in zip(outputs, results, strict=True)}

    return run


def _exact(providers: Sequence[Provider]) -> list[Provider]:
    pairs = [(provider, {}) if isinstance(provider, str) else provider for provider in providers]
    return [(name, {**_EXACT.get(name, {}), **options}) for name, options in pairs]


def _keep_gathers_narrow(graph: onnx.GraphProto) -> None:
    """Lets an Identity follow each Gather of weights.

    Between nodes that the CPU runs in float32 alone, ONNX Runtime would run the Gather in float32, too, and for that
    widen all that it gathers from.
    """
    import onnx

    stacks = {tensor.name for tensor in graph.initializer if len(tensor.dims) > 2}
    nodes = []
    for node in graph.node:
        nodes.append(node)
        if node.op_type in ("Gather", "GatherND") and not node.domain and node.input[0] in stacks:
            kept = node.output[0]
            node.output[0] = f"{kept}:gathered"
            nodes.append(onnx.helper.make_node("Identity", [f"{kept}:gathered"], [kept]))
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


def library_is_there() -> bool:
    """Whether our kernels can be used; where not, our nodes run by the standard operators that come with them."""
    from ort_moe.installation.library import library_path

    try:
        library_path()
    except EnvironmentUnfitError:
        return False
    return True


def _has_bfloat16(model: ir.Model) -> bool:
    import onnx_ir as ir

    wanted = ir.DataType.BFLOAT16
    values = [*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()]
    return any(value.dtype == wanted for value in values) or any(
        "to" in node.attributes and node.attributes["to"].value == wanted for node in model.graph.all_nodes()
    )


def _widen(model: ir.Model) -> None:
    """Replaces bfloat16 by float32 everywhere, in place; values are unchanged, roundings fall away."""
    import numpy as np
    import onnx_ir as ir

    narrow, wide = ir.DataType.BFLOAT16, ir.DataType.FLOAT

    def widened(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        if tensor.dtype != narrow:
            return tensor
        return ir.LazyTensor(
            lambda: ir.Tensor(tensor.numpy().astype(np.float32), name=tensor.name),
            dtype=wide,
            shape=ir.Shape(tensor.shape.numpy()),
            name=tensor.name,
        )

    graphs: list[ir.Graph | ir.Function] = [*model.graphs()]
    for function in model.functions.values():
        graphs += [function, *function.subgraphs()]
    for graph in graphs:
        values = [*graph.inputs, *graph.outputs]
        if isinstance(graph, ir.Graph):
            values += graph.initializers.values()
        for node in graph.all_nodes():
            values += node.outputs
            for attribute in node.attributes.values():
                if attribute.is_ref():
                    continue
                if attribute.type == ir.AttributeType.TENSOR:
                    node.attributes[attribute.name] = ir.AttrTensor(attribute.name, widened(attribute.as_tensor()))
                elif attribute.name in ("to", "dtype", "stash_type") and attribute.value == narrow:
                    node.attributes[attribute.name] = ir.AttrInt64(attribute.name, int(wide))
        for value in values:
            if value.dtype == narrow:
                value.dtype = wide
            if value.const_value is not None:
                value.const_value = widened(value.const_value)

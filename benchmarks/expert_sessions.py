"""Sessions of ONNX Runtime over the models of expert_models, bound to tensors where they lie and run as CUDA graphs.

Ours and MoE take the experts as inputs, so that any number of sessions shares one copy. QMoE takes them as initializers
through the host, and each of its nodes then keeps a repacked copy of its own: `Shape.contrib_session_bytes`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import onnxruntime
import torch

from benchmarks.expert_models import Model, cycle_model, stack_model
from benchmarks.expert_stack import Experts, Stack
from benchmarks.timing import TORCH_TYPES
from ort_moe.installation.library import register


class Cycle:
    """A decode step of `layers` layers one after another, each with a router's product of its own."""

    def __init__(self, experts: Experts, tokens: int, layers: int) -> None:
        shape, device = experts.shape, experts.device
        self.held, self.tokens, self.layers = experts, tokens, layers
        dtype = TORCH_TYPES[shape.dtype]
        self.gates = torch.empty(layers, shape.hidden, shape.experts, dtype=dtype, device=device)
        self.gates.normal_(0.0, 2.0 * shape.hidden**-0.5)
        self.x = torch.empty(tokens, shape.hidden, dtype=dtype, device=device)
        self.y = torch.empty_like(self.x)
        self.choose()

    def choose(self, seed: int = 0) -> None:
        """Draws other rows: they go elsewhere in every layer."""
        self.x.copy_(torch.randn(self.x.shape, generator=torch.Generator().manual_seed(seed)))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Inputs and outputs of a session of the cycle, by the names of expert_models."""
        gates = {f"gate{n}": self.gates[n] for n in range(self.layers)}
        return {**self.held.weights, **gates, "x": self.x, "y": self.y}


def stack_runner(stack: Stack, *, contrib: bool, graph: bool = True) -> Callable[[], None]:
    """Runs a stack as our ops, or as the contrib op; without a graph, kernel by kernel."""
    model = stack_model(stack.shape, stack.tokens, stack.layers, contrib=contrib)
    return runner(model, stack.tensors(), stack.held, graph=graph)


def cycle_runner(cycle: Cycle, *, contrib: bool) -> Callable[[], None]:
    """Runs a cycle as our ops, or as the contrib op."""
    model = cycle_model(cycle.held.shape, cycle.tokens, cycle.layers, contrib=contrib)
    return runner(model, cycle.tensors(), cycle.held)


class AnyTokens:
    """A session of a stack as the contrib op, for any number of tokens; each runner has a CUDA graph of its own.

    One session, because QMoE repacks all experts for every one.
    """

    def __init__(self, experts: Experts, layers: int) -> None:
        self.experts, self.layers = experts, layers
        self._model = stack_model(experts.shape, "T", layers, contrib=True)
        self._session = _session(self._model, experts)
        self._graphs = itertools.count(1)

    def runner(self, stack: Stack) -> Callable[[], None]:
        """Runs the session on a stack's tensors."""
        binding = _bound(self._session, self._model, stack.tensors(), self.experts.device)
        options = onnxruntime.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(next(self._graphs)))
        return lambda: self._session.run_with_iobinding(binding, options)


def runner(
    model: Model, tensors: Mapping[str, torch.Tensor], experts: Experts, *, graph: bool = True
) -> Callable[[], None]:
    """Runs a session of the model on tensors; constants are the experts' as QMoE packs them.

    Raises:
        MemoryError: The device has too little memory left for the copies that QMoE makes.
    """
    session = _session(model, experts, graph=graph)
    binding = _bound(session, model, tensors, experts.device)
    return lambda: session.run_with_iobinding(binding)


def _bound(session: Any, model: Model, tensors: Mapping[str, torch.Tensor], device: str) -> Any:
    """A binding of the model's inputs and outputs to tensors where they lie."""
    binding = session.io_binding()
    for bind, described in ((binding.bind_input, model.inputs), (binding.bind_output, model.outputs)):
        for name, (kind, _) in described.items():
            bind(name, device, 0, kind, tuple(tensors[name].shape), tensors[name].data_ptr())
    return binding


def _session(model: Model, experts: Experts, *, graph: bool = True) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    register(options)
    if model.constants:
        _check_memory(experts, sum(node.op_type == "QMoE" for node in model.proto.graph.node))
        model.add_constants(options, experts.for_qmoe)
    provider: Any = "CPUExecutionProvider"
    if experts.device == "cuda":
        provider = ("CUDAExecutionProvider", {"enable_cuda_graph": str(int(graph))})
    return onnxruntime.InferenceSession(model.proto.SerializeToString(), options, providers=[provider])


def _check_memory(experts: Experts, nodes: int) -> None:
    if experts.device != "cuda":
        return
    torch.cuda.empty_cache()
    shape = experts.shape
    needed = nodes * shape.contrib_session_bytes + shape.experts * shape.expert_bytes
    free, _ = torch.cuda.mem_get_info()
    if needed > free:
        raise MemoryError(
            f"{nodes} QMoE nodes of {shape.name} need {needed / 2**30:.0f} GiB of device memory, but "
            f"{free / 2**30:.0f} GiB are free: take fewer layers"
        )


def relative_difference(got: torch.Tensor, expected: torch.Tensor, origin: torch.Tensor | None = None) -> float:
    """Norm of the difference beside that of `expected`, or of its distance from an origin."""
    base = expected.double() if origin is None else expected.double() - origin.double()
    return float((got.double() - expected.double()).norm() / base.norm())

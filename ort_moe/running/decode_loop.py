"""`ort_moe.DecodeLoop`: a decode graph run step after step on fixed buffers, on CUDA as a graph that is replayed.

What ONNX Runtime leaves to its callers: the first run with a CUDA graph warms up and captures, and so moves state that
is updated in place more than once; a replay reads the device buffers that were bound at capture and nothing else; a
graph belongs to the session and to the thread that captured it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ort_moe.errors import DecodeError
from ort_moe.graphs.graph_capture import capture_blockers, refusal
from ort_moe.graphs.shared_state import copied_state, pairs_by_name
from ort_moe.installation.environment import require_onnxruntime, runtime_message
from ort_moe.printing.wording import some_of
from ort_moe.running.bound_run import BoundRun
from ort_moe.running.fixed_buffer import Device, FixedBuffer, TensorType, fixed_shape
from ort_moe.running.session import CPU, CUDA, captures_graph
from ort_moe.running.session_model import model_of

if TYPE_CHECKING:
    import numpy.typing as npt
    import onnx_ir as ir
    import onnxruntime

_GRAPH_IDS: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
"""The graphs that loops have taken, by session; they are the session's as long as it lives."""

_NO_GRAPH = -1
"""The graph id with which ONNX Runtime runs without capturing."""

_HOW_TO_FIX_SIZES = (
    "export it with a fixed size, or fix a named one by SessionOptions.add_free_dimension_override_by_name before "
    "creating the session"
)

_HOW_TO_ENABLE = (
    'create it with providers=[("CUDAExecutionProvider", {"enable_cuda_graph": "1"})], or pass graph=False to run '
    "without one"
)


class DecodeLoop:
    """Runs a session step after step on buffers that are bound once.

    On CUDA the first step captures a CUDA graph, which the following ones replay. On the CPU each step is a plain run;
    the results are the same.

    State is what an output hands to an input of the next step, such as a key-value cache of fixed length. It stays on
    the device: it is neither an argument nor a result of a step. It begins as zeros. Input and output share one buffer
    where nothing can read the old state after the new one is written; else they have one each, and a copy follows
    every step.

    One thread at a time may use a loop. While it lives, the session's other runs are the user's concern: on CUDA, give
    them a `gpu_graph_id` of their own, or -1.

    Attributes:
        state: Output by input, of the state.
        copied_state: Of those that do not share a buffer, why not, by input.
        captures: Whether steps are captured and replayed.

    Args:
        session: A session on CUDA, created with `enable_cuda_graph`, or on the CPU; all shapes are fixed.
        state: Output by input. None: each input `past...` with the output `present...` of the same name, such as
            `past_key_values.0.key` and `present.0.key`.
        on_device: Outputs that steps return as OrtValues, on the device and without a copy; True: all of them. The
            next step overwrites them.
        graph: Whether to capture a CUDA graph on CUDA.
        graph_id: The session's graph that this loop captures, from 1 on. Loops of one session need one each.

    Raises:
        DecodeError: The session has a shape that is not fixed, runs on another provider or on CUDA without
            `enable_cuda_graph`, or has a loop of this `graph_id`; its model cannot be captured (the nodes are named);
            `state` or `on_device` do not fit it.
        EnvironmentUnfitError: ONNX Runtime is missing or too old.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        *,
        state: Mapping[str, str] | None = None,
        on_device: bool | Collection[str] = False,
        graph: bool = True,
        graph_id: int = 1,
    ) -> None:
        ort = require_onnxruntime()
        device, options = _device(session)
        self.captures = graph and device.kind == "cuda"
        if graph_id < 1:
            raise DecodeError(f"graph_id must be at least 1 (0 is that of runs outside of loops), but is {graph_id}")

        inputs, outputs = session.get_inputs(), session.get_outputs()
        names = [value.name for value in inputs], [value.name for value in outputs]
        self.state: dict[str, str] = dict(pairs_by_name(*names) if state is None else state)
        model = model_of(session) if self.captures or self.state else None
        if self.captures:
            _check_capture(session, options, model, graph_id)
        self._inputs = _buffers(inputs, "input", device)
        self._check_state(outputs)
        self.copied_state = copied_state(model, self.state)
        carried = self.state.values()
        own = _buffers([value for value in outputs if value.name not in carried], "output", device)
        self._on_device = _chosen(on_device, own)
        self._fed = [name for name in names[0] if name not in self.state]

        options_of_runs = ort.RunOptions()
        options_of_runs.add_run_config_entry("gpu_graph_id", str(graph_id if self.captures else _NO_GRAPH))
        self._bound = BoundRun(
            session,
            self._inputs,
            own,
            state=self.state,
            copied=self.copied_state,
            device=device,
            options=options_of_runs,
        )
        self._returned = own
        # ONNX Runtime keeps what it captures by thread, and captures again in another one.
        self._here = threading.local()
        if self.captures:
            _GRAPH_IDS.setdefault(session, set()).add(graph_id)

    def step(self, /, **inputs: npt.ArrayLike | onnxruntime.OrtValue) -> dict[str, Any]:
        """Runs one step.

        Args:
            inputs: All inputs of the session but the state, each of its very type and shape; arrays, what NumPy makes
                arrays of, or OrtValues on any device.

        Returns:
            All outputs but the state: arrays of their own, or the OrtValues of those that stay on the device.

        Raises:
            DecodeError: An input is missing, unknown or of another type or shape, and nothing has run; or ONNX Runtime
                cannot run the step, its sentence follows.
        """
        for name in inputs:
            if name in self.state:
                raise DecodeError(f"'{name}' is state, which a step carries on by itself: set it with write_state")
            if name not in self._inputs:
                raise DecodeError(f"there is no input '{name}': a step takes {_listed(self._fed)}")
        for name in self._fed:
            if name not in inputs:
                hint = ""
                if name.startswith("past"):
                    hint = "; if it is state, name its output in DecodeLoop(..., state={...})"
                raise DecodeError(f"input '{name}' is missing: a step takes {_listed(self._fed)}{hint}")
        self._write(inputs)
        if self.captures and not getattr(self._here, "captured", False):
            self._capture()
        self._run()
        self._bound.carry_state()
        return {
            name: buffer.value if name in self._on_device else buffer.read() for name, buffer in self._returned.items()
        }

    def read_state(self, *names: str) -> dict[str, npt.NDArray[Any]]:
        """Copies of the state as the next step finds it, by input.

        Args:
            names: Inputs; none: all of the state.

        Raises:
            DecodeError: There is no such state.
        """
        return {name: self._state_buffer(name).read() for name in names or self.state}

    def write_state(self, values: Mapping[str, npt.ArrayLike | onnxruntime.OrtValue]) -> None:
        """Replaces state, by input; what is not named stays as it is.

        Args:
            values: Arrays or OrtValues, such as what a prefill has left on the device.

        Raises:
            DecodeError: There is no such state, or a value has another type or shape.
        """
        for name in values:
            self._state_buffer(name)
        self._write(values)

    def reset(self) -> None:
        """Makes all of the state zeros, as it was before the first step."""
        for name in self.state:
            self._inputs[name].clear()

    def _capture(self) -> None:
        """Lets ONNX Runtime warm up and capture; state is afterwards what it was before."""
        kept = [self._inputs[name] for name in self.state if name not in self.copied_state]
        before = [buffer.read() for buffer in kept]
        try:
            self._run()
        finally:
            for buffer, values in zip(kept, before, strict=True):
                buffer.write(buffer.fitting(values))
        self._here.captured = True

    def _run(self) -> None:
        try:
            self._bound.run()
        except Exception as error:
            raise DecodeError(f"ONNX Runtime cannot run the step: {runtime_message(error)}") from error

    def _write(self, values: Mapping[str, Any]) -> None:
        """All of them, or none where one does not fit."""
        fitting = {}
        for name, value in values.items():
            try:
                fitting[name] = self._inputs[name].fitting(value)
            except ValueError as error:
                raise DecodeError(f"'{name}' {error}") from None
        for name, value in fitting.items():
            self._inputs[name].write(value)

    def _state_buffer(self, name: str) -> FixedBuffer:
        if name not in self.state:
            raise DecodeError(f"there is no state '{name}', only {_listed(list(self.state))}")
        return self._inputs[name]

    def _check_state(self, outputs: Sequence[Any]) -> None:
        """Whether each pair is there, once, and of one shape and type."""
        types = {value.name: (list(value.shape), value.type) for value in outputs}
        seen: set[str] = set()
        for past, present in self.state.items():
            if past not in self._inputs:
                raise DecodeError(f"state '{past}' is no input: the session has {_listed(list(self._inputs))}")
            if present not in types:
                raise DecodeError(
                    f"state '{past}' comes from '{present}', which is no output: there are {_listed(types)}"
                )
            if present in seen:
                raise DecodeError(f"two inputs of the state come from the output '{present}'")
            seen.add(present)
            buffer = self._inputs[past]
            if types[present] != (list(buffer.shape), buffer.type.name):
                shape, element = types[present]
                raise DecodeError(
                    f"state '{past}' is a {buffer.type.name} of shape {list(buffer.shape)}, but '{present}' a "
                    f"{element} of shape {shape}: state keeps its size, as a key-value cache of fixed length does"
                )


def _device(session: onnxruntime.InferenceSession) -> tuple[Device, Mapping[str, str]]:
    """Where a session's buffers belong, and the options of the provider that decides it."""
    provider = session.get_providers()[0]
    options: Mapping[str, str] = session.get_provider_options().get(provider, {})
    if provider == CPU:
        return Device("cpu"), options
    if provider == CUDA:
        return Device("cuda", int(options.get("device_id", 0))), options
    raise DecodeError(f"a DecodeLoop runs on {CUDA} or {CPU}, but the session on {provider}")


def _buffers(values: Sequence[Any], kind: str, device: Device) -> dict[str, FixedBuffer]:
    """A buffer of each input or output; all are looked at before the first is made."""
    described = []
    for value in values:
        what = f"{kind} '{value.name}'"
        try:
            element = TensorType(value.type)
        except ValueError as error:
            raise DecodeError(f"{what} {error}") from None
        try:
            shape = fixed_shape(value.shape)
        except ValueError as error:
            raise DecodeError(f"{what} {error}: {_HOW_TO_FIX_SIZES}") from None
        described.append((value.name, shape, element))
    return {name: FixedBuffer(name, shape, element, device) for name, shape, element in described}


def _check_capture(
    session: onnxruntime.InferenceSession, options: Mapping[str, str], model: ir.Model | None, graph_id: int
) -> None:
    """Whether a session on CUDA can capture a graph of this number."""
    if model is not None and (why := refusal("the model", capture_blockers(model.graph))):
        raise DecodeError(why)
    if not captures_graph(options):
        raise DecodeError(f"the session captures no CUDA graph: {_HOW_TO_ENABLE}")
    if graph_id in _GRAPH_IDS.get(session, ()):
        raise DecodeError(
            f"the session already has a loop with graph_id {graph_id}, whose graph would be replayed: give each loop a "
            "graph_id or a session of its own"
        )


def _chosen(on_device: bool | Collection[str], returned: Collection[str]) -> set[str]:
    """The outputs that stay on the device."""
    if isinstance(on_device, bool):
        return set(returned) if on_device else set()
    for name in on_device:
        if name not in returned:
            raise DecodeError(f"on_device names '{name}', but a step returns {_listed(returned)}")
    return set(on_device)


def _listed(names: Collection[str]) -> str:
    return some_of([f"'{name}'" for name in names], 6) or "none"

"""Measures one model in this process: its session, its runs at each number of tokens, and their memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ort_moe.benchmarking.machine import most_host_bytes, used_gpu_bytes
from ort_moe.errors import ModelError
from ort_moe.graphs.shared_state import cache_lengths, copied_state, fixed_state
from ort_moe.installation.environment import runtime_message
from ort_moe.running.bound_run import BoundRun
from ort_moe.running.fixed_buffer import Device, FixedBuffer, TensorType
from ort_moe.running.session import CPU, CUDA, Provider, session

if TYPE_CHECKING:
    import onnx_ir as ir
    import onnxruntime

    from ort_moe.verification.sample_inputs import Feeds, Shape

DRAWS = 8
"""Random inputs that follow each other, so that a token's experts are not those of the run before."""

WARM_UP = DRAWS
"""Runs before the timed ones: buffers are taken, kernels loaded, and the weights that are chosen are in memory."""

LEAST, PATIENCE = 3, 20.0
"""Runs that there are at least, of the timed ones and of those before, and seconds after which there are no more."""

_CHUNK = 16 << 20  # of a file, read at a time

_NOT_CAPTURED = "-1"
"""As the number of a graph: run the nodes one by one."""

_PROBE = '<ir_version: 10, opset_import: ["": 18]> probe (float[1] x) => (float[1] y) { y = Neg(x) }'


@dataclass(frozen=True)
class Order:
    """What shall be measured.

    Attributes:
        model: Path of the model that runs.
        signature: Path of the model whose inputs are drawn: the same for all, so that they are fed the same.
        provider: `CUDAExecutionProvider` or `CPUExecutionProvider`.
        tokens: Numbers of tokens, each once; empty: the model's inputs have fixed lengths.
        past: Tokens that went before.
        steps: Runs that are timed.
        seed: Of the random inputs.
    """

    model: str
    signature: str
    provider: str
    tokens: tuple[int, ...]
    past: int
    steps: int
    seed: int


@dataclass(frozen=True)
class Point:
    """Runs at one number of tokens: medians in ms, and what ONNX Runtime said where there are none."""

    tokens: int | None
    steps: int = 0
    step_ms: float | None = None
    fastest_ms: float | None = None
    graph_ms: float | None = None
    refusal: str = ""
    graph_refusal: str = ""


@dataclass(frozen=True)
class Measurement:
    """What was measured; bytes on the device are None on the CPU."""

    load_seconds: float
    host_bytes_before: int
    host_bytes: int
    device_bytes: int | None
    points: tuple[Point, ...]


def measure(order: Order) -> Measurement:
    """Creates a session and runs it.

    First all runs without a CUDA graph, then those with one, for a capture that fails may leave the device unusable.

    Raises:
        ModelError: The model cannot be read, or ONNX Runtime does not take it.
        EnvironmentUnfitError: The provider does not start.
    """
    from ort_moe.files.loading import load_model
    from ort_moe.verification.sample_inputs import Shape

    on_cuda = order.provider == CUDA
    _start(order.provider)
    signature, model = load_model(order.signature), load_model(order.model)
    _read_files(order.model, model)
    state = fixed_state(model)
    copied = copied_state(model, state)
    del model
    before, device_before = most_host_bytes(), used_gpu_bytes() if on_cuda else None
    created, load_seconds, refusal = _load(order.model, on_cuda=on_cuda)

    def prepare(tokens: int | None) -> _FedRun:
        drawn = _draws(signature, Shape(1, tokens or 1, order.past), order.seed)
        graph = _NOT_CAPTURED if on_cuda and not refusal else None
        return _FedRun(created, drawn, Device("cuda" if on_cuda else "cpu"), graph, state=state, copied=copied)

    points = []
    device_bytes = [_beyond(device_before)]
    for tokens in order.tokens or (None,):
        point = _plain(partial(prepare, tokens), order.steps, tokens)
        points.append(replace(point, graph_refusal=refusal))
    device_bytes.append(_beyond(device_before))
    if on_cuda and not refusal:
        for n, point in enumerate(points):
            if point.step_ms is not None:
                points[n] = _captured(partial(prepare, point.tokens), order.steps, point, graph=n + 1)
        device_bytes.append(_beyond(device_before))
    most = max((nbytes for nbytes in device_bytes if nbytes is not None), default=None)
    return Measurement(load_seconds, before, most_host_bytes(), most, tuple(points))


def _beyond(device_before: int | None) -> int | None:
    now = used_gpu_bytes() if device_before is not None else None
    return None if now is None or device_before is None else max(0, now - device_before)


def _start(provider: str) -> None:
    """Runs something: what the first session of a process takes to start the provider is no load time of a model."""
    import numpy as np
    import onnx

    probe = session(onnx.parser.parse_model(_PROBE).SerializeToString(), _providers(provider == CUDA))
    probe.run(None, {"x": np.zeros(1, np.float32)})


def _read_files(path: str, model: ir.Model) -> None:
    """Reads a model and its weights, so that all models are loaded from the system's cache, not one from the disk."""
    from ort_moe.files.loading import data_files

    buffer = bytearray(_CHUNK)
    for each in (Path(path), *data_files(model).values()):
        with each.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _providers(on_cuda: bool, *, capturing: bool = False) -> list[Provider]:
    return [(CUDA, {"enable_cuda_graph": "1" if capturing else "0"}), CPU] if on_cuda else [CPU]


def _load(model: str, *, on_cuda: bool) -> tuple[onnxruntime.InferenceSession, float, str]:
    """A session, the seconds its creation took, and why it captures no CUDA graph; empty where it does, or on the CPU.

    Raises:
        ModelError: ONNX Runtime does not take the model either way.
    """
    refusal = ""
    if on_cuda:
        try:
            return *_timed_session(model, _providers(on_cuda, capturing=True)), ""
        except ModelError as error:
            refusal = str(error)
    return *_timed_session(model, _providers(on_cuda)), refusal


def _timed_session(model: str, providers: Sequence[Provider]) -> tuple[onnxruntime.InferenceSession, float]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # what it logs of an error, it says in the exception, too
    began = time.perf_counter()
    created = session(model, providers, options=options)
    return created, time.perf_counter() - began


def _draws(signature: ir.Model, shape: Shape, seed: int) -> list[Feeds]:
    """Inputs of runs that follow each other; a cache, which each run leaves to the next, is in the first alone."""
    import numpy as np

    from ort_moe.verification.sample_inputs import draw

    drawn: list[Feeds] = []
    caches = cache_lengths(signature)
    for n in range(DRAWS):
        feeds = draw(signature, shape, np.random.default_rng([seed, n, shape.tokens]))
        drawn.append({name: array for name, array in feeds.items() if not drawn or name not in caches})
    return drawn


def _plain(prepare: Callable[[], _FedRun], steps: int, tokens: int | None) -> Point:
    try:
        run = prepare()
        times = _times(run, run.feed, steps)
    except Exception as error:  # ORT raises a class of its own for each status code
        return Point(tokens, refusal=runtime_message(error))
    return Point(tokens, len(times), statistics.median(times), min(times))


def _captured(prepare: Callable[[], _FedRun], steps: int, point: Point, *, graph: int) -> Point:
    try:
        run = prepare()
        run.capture_as(str(graph))
        return replace(point, graph_ms=statistics.median(_times(run, run.feed, steps)))
    except Exception as error:
        return replace(point, graph_refusal=runtime_message(error))


def _times(run: Callable[[], None], feed: Callable[[int], None], steps: int) -> list[float]:
    """Milliseconds of each timed run."""
    warm_up: list[float] = []
    timed: list[float] = []
    ran = 0
    for times, most in ((warm_up, WARM_UP), (timed, steps)):
        end = time.perf_counter() + PATIENCE
        while len(times) < most and (len(times) < LEAST or time.perf_counter() < end):
            feed(ran)
            began = time.perf_counter()
            run()
            times.append((time.perf_counter() - began) * 1e3)
            ran += 1
    return timed


class _FedRun:
    """A session on fixed buffers, run step after step as a decode loop runs it: a cache stays where it is.

    Called, it runs once, waits for it, and carries on what of the state the model cannot update in place.

    Args:
        created: The session.
        drawn: Inputs of one shape, as `_draws` returns them.
        device: Where the buffers lie.
        graph: Number of the CUDA graph; None: the session captures none.
        state: Output by input, of what is carried from run to run.
        copied: Inputs of the state that share no buffer with their outputs.
    """

    def __init__(
        self,
        created: onnxruntime.InferenceSession,
        drawn: Sequence[Feeds],
        device: Device,
        graph: str | None,
        *,
        state: Mapping[str, str],
        copied: Collection[str],
    ) -> None:
        types = {value.name: TensorType(value.type) for value in created.get_inputs()}
        self._inputs = {name: FixedBuffer(name, array.shape, types[name], device) for name, array in drawn[0].items()}
        for name, array in drawn[0].items():
            self._inputs[name].write(self._inputs[name].fitting(array))
        self._feeds = [{name: self._inputs[name].fitting(feeds[name]) for name in drawn[-1]} for feeds in drawn]
        options = _run_options(graph)
        self._bound = BoundRun(created, self._inputs, {}, state=state, copied=copied, device=device, options=options)

    def feed(self, n: int) -> None:
        """Puts the inputs of draw n, from 0 again behind the last, into the buffers."""
        for name, values in self._feeds[n % len(self._feeds)].items():
            self._inputs[name].write(values)

    def capture_as(self, graph: str) -> None:
        """Keeps the memory of the outputs that a run returns, and captures the next run."""
        self._bound.run()
        self._bound.keep_outputs()
        self._bound.options = _run_options(graph)

    def inputs(self) -> Feeds:
        """Copies of what the next run reads."""
        return {name: buffer.read() for name, buffer in self._inputs.items()}

    def outputs(self) -> list[Any]:
        """What the last run computed, as NumPy arrays."""
        return self._bound.results()

    def __call__(self) -> None:
        self._bound.run()
        self._bound.carry_state()


def _run_options(graph: str | None) -> Any:
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.log_severity_level = 4
    if graph is not None:
        options.add_run_config_entry("gpu_graph_id", graph)
    return options

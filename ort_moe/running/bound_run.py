"""A session that is bound once to fixed buffers, and run on them again and again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ort_moe.running.fixed_buffer import Device, FixedBuffer

if TYPE_CHECKING:
    import onnxruntime


class BoundRun:
    """Runs of a session on buffers, each of which is waited for.

    State is what an output hands to an input of the next run: both are bound to one buffer, or where they may not share
    it, have one each, between which `carry_state` copies.

    Attributes:
        inputs: Buffers of all inputs.
        outputs: Buffers of outputs, those of the state among them.
        options: Of every run from now on.

    Args:
        session: The session.
        inputs: Buffers of all inputs.
        outputs: Buffers of outputs that are no state; ONNX Runtime takes memory of the device for the others.
        state: Output by input.
        copied: Inputs of the state that share no buffer with their outputs.
        device: Where the buffers lie.
        options: Of every run.
    """

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        inputs: Mapping[str, FixedBuffer],
        outputs: Mapping[str, FixedBuffer],
        *,
        state: Mapping[str, str],
        copied: Collection[str],
        device: Device,
        options: onnxruntime.RunOptions,
    ) -> None:
        self._session, self.options, self.inputs = session, options, dict(inputs)
        own = {state[name]: FixedBuffer(state[name], inputs[name].shape, inputs[name].type, device) for name in copied}
        carried = {output: own.get(output, inputs[name]) for name, output in state.items()}
        self.outputs = {**outputs, **carried}
        self._copies = [(inputs[name], own[state[name]]) for name in copied]
        self._binding = session.io_binding()
        for name, buffer in self.inputs.items():
            buffer.bind(self._binding.bind_input, name)
        for output in session.get_outputs():
            if output.name in self.outputs:
                self.outputs[output.name].bind(self._binding.bind_output, output.name)
            else:
                self._binding.bind_output(output.name, device.kind, device.number)

    def run(self) -> None:
        """Runs once, on what is in the buffers; state that is copied stays what it was."""
        self._binding.synchronize_inputs()
        self._session.run_with_iobinding(self._binding, self.options)
        self._binding.synchronize_outputs()

    def carry_state(self) -> None:
        """Copies what the last run made of the state to where the next one reads it, where that is not one place."""
        for past, present in self._copies:
            past.copy_from(present)

    def keep_outputs(self) -> None:
        """Has the runs that follow write into the memory that the last one's outputs lie in, as a graph needs it."""
        for output, value in zip(self._session.get_outputs(), self._binding.get_outputs(), strict=True):
            if output.name not in self.outputs:
                self._binding.bind_ortvalue_output(output.name, value)

    def results(self) -> list[Any]:
        """What the last run computed, as NumPy arrays in the order of the outputs."""
        return list(self._binding.copy_outputs_to_cpu())

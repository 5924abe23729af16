"""Calls of FusedExperts by the CUDA launcher, on device memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from ort_moe import kernels
from ort_moe.ops import ROUTING_MAPS
from ort_moe.ops.experts_config import ExpertsConfig
from ort_moe.reference.fused_experts import ExpertLayer
from tests.device_arrays import DeviceArray, poisoned
from tests.experts_cases import ExpertsCase
from tests.router_cases import DTYPES

Array = npt.NDArray[Any]

POISON = 0xA5
"""Every byte of a result before it is written."""

GUARD = 1024
"""Bytes behind the scratch that nobody may write."""


def device_bytes(array: Array) -> Any:
    """The array's bytes in device memory, as an OrtValue; at least 256 of them, so that an empty one has an address."""
    import onnxruntime

    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return onnxruntime.OrtValue.ortvalue_from_numpy(np.pad(data, (0, max(0, 256 - data.size))), "cuda", 0)


class Launcher:
    """A case's inputs in device memory and the launcher over them."""

    def __init__(self, case: ExpertsCase, *, shift: int = 0) -> None:
        """`shift`: bytes by which x is moved off its alignment."""
        self.case = case
        feeds = case.feeds
        self.values = {name: device_bytes(array) for name, array in feeds.items()}
        x = np.ascontiguousarray(feeds["x"]).reshape(-1).view(np.uint8)
        self.values["x"] = device_bytes(np.concatenate([np.zeros(shift, np.uint8), x]))
        self.shift = shift
        self.config = ExpertsConfig.from_attributes(case.all_attributes)
        self.y = device_bytes(np.full(feeds["x"].nbytes, POISON, np.uint8))
        self.sizes: dict[str, Any] = {
            "tokens": math.prod(case.leading),
            "hidden": case.hidden,
            "inner": case.inner,
            "experts": case.experts,
            "k": case.k,
            "dtype": case.onnx_type,
        }
        size = kernels.fused_experts_scratch_bytes(self.config, **self.sizes, with_maps=case.has_maps)
        self.scratch = device_bytes(np.full(size + GUARD, 0xFF, np.uint8))  # NaN, where it is read before it is written

    def __call__(self) -> Array:
        """Launches; y, (..., H)."""
        layers = {
            layer: kernels.ExpertLayer(**{part: self.address(f"{layer}_{part}") for part in ExpertLayer._fields})  # type: ignore[arg-type]
            for layer in ("fc1", "fc2")
        }
        maps = None
        if self.case.has_maps:
            maps = kernels.RoutingMaps(*(self.values[tensor.name].data_ptr() for tensor in ROUTING_MAPS))
        kernels.fused_experts(
            self.config,
            **self.sizes,
            **layers,
            x=self.values["x"].data_ptr() + self.shift,
            weights=self.values["weights"].data_ptr(),
            indices=self.values["indices"].data_ptr(),
            residual=self.address("residual"),
            maps=maps,
            y=self.y.data_ptr(),
            scratch=self.scratch.data_ptr(),
        )
        dtype, shape = DTYPES[self.case.onnx_type], self.case.feeds["x"].shape
        count = math.prod(shape) * dtype.itemsize
        return self.y.numpy()[:count].view(dtype).reshape(shape)

    def address(self, name: str) -> int | None:
        return self.values[name].data_ptr() if name in self.values else None


def launch(case: ExpertsCase) -> Array:
    """One launch of a case; y, (..., H)."""
    return Launcher(case)()


def launch_apart(case: ExpertsCase) -> Array:
    """The same by two ops: FusedExperts of one row for each choice, then FinalizeRouting; y, (..., H)."""
    arrays = {name: DeviceArray(values) for name, values in case.finalized(launch(case.expanded())).items()}
    y = poisoned(case.feeds["x"].shape, DTYPES[case.onnx_type])
    kernels.finalize_routing(
        tokens=math.prod(case.leading),
        hidden=case.hidden,
        k=case.k,
        dtype=case.onnx_type,
        y=y.address,
        **{name: array.address for name, array in arrays.items()},
    )
    return y.read()

"""Several graphs over one file of weights, in which each tensor lies once however many of them hold it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ort_moe.files.weights_file import WeightsFile

_INLINE = 1024
"""Bytes of a tensor up to which it stays in the graph's own file."""


def move_weights(models: Iterable[ir.Model], path: Path) -> None:
    """Writes the weights of models to a file and has the models refer to it; one tensor at a time is in memory.

    Args:
        models: Changed in place; to be saved beside the file.
        path: The file.

    Raises:
        OSError: It cannot be written.
    """
    places: dict[tuple[ir.DataType, tuple[int, ...], bytes], ir.ExternalTensor] = {}
    with WeightsFile(path) as file:
        for model in models:
            for graph in model.graphs():
                for value in graph.initializers.values():
                    tensor = value.const_value
                    if tensor is None or tensor.nbytes <= _INLINE:
                        continue
                    array = np.ascontiguousarray(tensor.numpy())
                    digest = hashlib.blake2b(array.view(np.uint8).data).digest()
                    key = (tensor.dtype, array.shape, digest)
                    if key not in places:
                        places[key] = file.set_aside(array.dtype, array.shape, value.name or "")
                        file.write(places[key], 0, array)
                    place = places[key]
                    value.const_value = ir.ExternalTensor(
                        place.location,
                        place.offset,
                        place.length,
                        place.dtype,
                        shape=place.shape,
                        name=value.name or "",
                        base_dir=place.base_dir,
                    )

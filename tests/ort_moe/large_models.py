"""A model of several layers of experts whose weights are large and lie in external data.

Every second layer's weights lie the way FusedExperts takes them; those of the others have to be written anew.

x (T, H) -> [router -> experts, as `batched_mm` leaves exporters -> residual] for each layer -> y (T, H)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

_LAYER = """
    {p}_logits = MatMul ({x}, {p}_gate)
    {p}_scores = Softmax <axis = -1> ({p}_logits)
    {p}_best, {p}_ids = TopK ({p}_scores, k)
    {p}_total = ReduceSum <keepdims = 1> ({p}_best, minus1)
    {p}_weights = Div ({p}_best, {p}_total)
    {p}_x3 = Unsqueeze ({x}, one)
    {p}_copies = Tile ({p}_x3, tile_k)
    {p}_rows = Reshape ({p}_copies, rows_of_x)
    {p}_list = Reshape ({p}_ids, minus1)
    {p}_stored1 = Gather <axis = 0> ({p}_fc1, {p}_list)
    {p}_matrices1 = {turn} ({p}_stored1)
    {p}_column1 = Unsqueeze ({p}_rows, minus1)
    {p}_product1 = MatMul ({p}_matrices1, {p}_column1)
    {p}_made1 = Squeeze ({p}_product1, minus1)
    {p}_g, {p}_u = Split <axis = -1, num_outputs = 2> ({p}_made1)
    {p}_share = Sigmoid ({p}_g)
    {p}_opened = Mul ({p}_g, {p}_share)
    {p}_active = Mul ({p}_opened, {p}_u)
    {p}_stored2 = Gather <axis = 0> ({p}_fc2, {p}_list)
    {p}_matrices2 = {turn} ({p}_stored2)
    {p}_column2 = Unsqueeze ({p}_active, minus1)
    {p}_product2 = MatMul ({p}_matrices2, {p}_column2)
    {p}_made2 = Squeeze ({p}_product2, minus1)
    {p}_flat = Reshape ({p}_weights, minus1)
    {p}_share_column = Unsqueeze ({p}_flat, minus1)
    {p}_weighted = Mul ({p}_made2, {p}_share_column)
    {p}_by_token = Reshape ({p}_weighted, by_token_shape)
    {p}_sum = ReduceSum <keepdims = 0> ({p}_by_token, one)
    {out} = Add ({x}, {p}_sum)
"""


@dataclass(frozen=True)
class LargeModel:
    """Its sizes.

    Attributes:
        layers: Layers.
        experts: E.
        k: K.
        hidden: H.
        inner: I.
    """

    layers: int = 4
    experts: int = 24
    k: int = 2
    hidden: int = 512
    inner: int = 1024

    @property
    def weight_bytes(self) -> int:
        """Bytes of the experts' weights, in float16."""
        return self.layers * self.experts * 3 * self.hidden * self.inner * 2

    def write(self, path: Path) -> Path:
        """Writes the model, and its experts' weights to a file `weights.bin` beside it."""
        layers, x = [], "x"
        for layer in range(self.layers):
            out = "y" if layer == self.layers - 1 else f"x{layer + 1}"
            turn = "Transpose <perm = [0, 2, 1]>" if layer % 2 else "Identity"
            layers.append(_LAYER.format(p=f"l{layer}", x=x, out=out, turn=turn))
            x = out
        proto = onnx.parser.parse_model(
            '<ir_version: 10, opset_import: ["" : 20]>'
            f"large (float16[T, {self.hidden}] x) => (float16[T, {self.hidden}] y) {{ {''.join(layers)} }}"
        )
        for number, node in enumerate(proto.graph.node):
            node.name = f"{node.op_type.lower()}_{number}"
        proto.graph.initializer.extend(numpy_helper.from_array(*pair) for pair in self._small())
        with path.with_name("weights.bin").open("wb") as file:
            for layer in range(self.layers):
                for name, sizes in (("fc1", (2 * self.inner, self.hidden)), ("fc2", (self.hidden, self.inner))):
                    rows, depth = sizes[::-1] if layer % 2 else sizes
                    shape = (self.experts, rows, depth)
                    proto.graph.initializer.append(self._write_stack(file, f"l{layer}_{name}", shape, sizes[1]))
        onnx.save(proto, path)
        return path

    def _small(self) -> list[tuple[Any, str]]:
        rng = np.random.default_rng(3)
        gates = [
            ((rng.standard_normal((self.hidden, self.experts)) / self.hidden**0.5).astype(np.float16), f"l{layer}_gate")
            for layer in range(self.layers)
        ]
        integers = {
            "minus1": [-1],
            "one": [1],
            "k": [self.k],
            "tile_k": [1, self.k, 1],
            "rows_of_x": [-1, self.hidden],
            "by_token_shape": [-1, self.k, self.hidden],
        }
        return [*gates, *((np.array(numbers, np.int64), name) for name, numbers in integers.items())]

    def _write_stack(self, file: Any, name: str, shape: tuple[int, int, int], depth: int) -> onnx.TensorProto:
        start = file.tell()
        rng = np.random.default_rng(len(name) + start)
        matrix = (rng.standard_normal(shape[1:], dtype=np.float32) / np.sqrt(depth)).astype(np.float16)
        for expert in range(shape[0]):  # drawing each anew would take most of the test's time
            file.write(np.roll(matrix, expert).tobytes())
        tensor = onnx.TensorProto(name=name, dims=shape, data_type=onnx.TensorProto.FLOAT16)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        places = {"location": "weights.bin", "offset": str(start), "length": str(file.tell() - start)}
        for key, value in places.items():
            tensor.external_data.add(key=key, value=value)
        return tensor

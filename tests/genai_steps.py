"""What onnxruntime-genai computes behind tokens that it is fed, of two models: how far apart, and where that counts.

Two models that round differently may choose different experts where a router's choice is nearly a tie. The layers
behind it then compute something else, of which nothing can be asked; `Steps.comparable` tells where both have the same
to compute.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_EXPOSED = "router_logits.{}"
"""Outputs that the routers' logits are copied to, by the number of the router."""


@dataclass(frozen=True)
class Steps:
    """What a model computes behind a prompt of `n` tokens and the `steps` that follow.

    Attributes:
        logits: (steps, vocabulary), float32: what each of the tokens that follow is chosen by.
        routers: (n - 1 + steps, layers, experts), float32: the routers' logits, of all tokens but the last.
    """

    logits: NDArray[np.floating[Any]]
    routers: NDArray[np.floating[Any]]

    def chosen(self, k: int) -> NDArray[np.intp]:
        """(positions, layers, k): the experts with the largest logits, in ascending order."""
        return np.sort(np.argsort(-self.routers, axis=-1, kind="stable")[..., :k], axis=-1)

    def comparable(self, other: Steps, k: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Where the two had the same to compute: (steps,) of the logits and (positions, layers) of the routers.

        A router has where all layers before it chose the same experts for this token and for those before it, which
        attention brings in; the logits have where the last layer did so for this token, too.
        """
        same = (self.chosen(k) == other.chosen(k)).all(axis=-1)
        until = np.logical_and.accumulate(same, axis=0)
        routers = np.logical_and.accumulate(np.hstack([np.ones_like(until[:, :1]), until[:, :-1]]), axis=1)
        return (routers[:, -1] & same[:, -1])[-len(self.logits) :], routers


def expose_routers(folder: Path, output: Path) -> Path:
    """Copies a model folder to `output`, with the logits of its routers as outputs of the model, in float32."""
    import onnx

    shutil.copytree(folder, output)
    path = output / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    made = {name for node in model.graph.node for name in node.output}
    layers = (f"/model/layers.{layer}/moe/router/Reshape/output_0" for layer in range(8))
    for n, name in enumerate(filter(made.__contains__, layers)):  # those keep their names when optimised
        model.graph.node.append(onnx.helper.make_node("Cast", [name], [_EXPOSED.format(n)], to=onnx.TensorProto.FLOAT))
        value = onnx.helper.make_tensor_value_info(_EXPOSED.format(n), onnx.TensorProto.FLOAT, None)
        model.graph.output.append(value)
    onnx.save(model, path)
    return output


def feed(folder: Path, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], layers: int) -> list[Steps]:
    """What a folder of `expose_routers` computes behind each prompt, fed the text that follows one token at a time.

    In a process of its own, as `tests.genai_models.generate` does.

    Raises:
        RuntimeError: It does not load or run; with what it says.
    """
    request = {"prompts": prompts, "texts": texts, "routers": [_EXPOSED.format(n) for n in range(layers)]}
    target = folder.with_name(f"{folder.name}-steps.npz")
    command = [sys.executable, __file__, str(folder.absolute()), json.dumps(request), str(target.absolute())]
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr)
    with np.load(target) as arrays:
        return [Steps(arrays[f"logits{i}"], arrays[f"routers{i}"]) for i in range(len(prompts))]


def _feed(folder: str, request: dict[str, Any], target: str) -> None:
    import onnxruntime_genai as genai

    model = genai.Model(folder)
    arrays = {}
    for i, (prompt, text) in enumerate(zip(request["prompts"], request["texts"], strict=True)):
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(max_length=len(prompt) + len(text), do_sample=False)
        generator = genai.Generator(model, parameters)
        logits, routers = [], []
        for tokens in [prompt, *([token] for token in text[:-1])]:
            generator.append_tokens([tokens])
            logits.append(np.array(generator.get_logits()).astype(np.float32).reshape(-1))
            rows = [np.array(generator.get_output(name)) for name in request["routers"]]
            routers.append(np.stack([row.reshape(len(tokens), -1) for row in rows], axis=1))
        arrays[f"logits{i}"], arrays[f"routers{i}"] = np.stack(logits), np.concatenate(routers)
    np.savez(target, **arrays)


if __name__ == "__main__":
    _feed(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])

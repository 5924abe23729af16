"""FusedExperts on CUDA where two things meet: formats, types, activations, options and numbers of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.experts_cases import VARIANTS, ExpertsCase
from tests.experts_launcher import POISON, Launcher, device_bytes, launch_apart
from tests.op_models import assert_same_bits, element_type, op_model, op_session
from tests.pairwise import pairwise
from tests.router_cases import DTYPES

pytestmark = pytest.mark.gpu

TOKENS = (1, 2, 4, 6, 8, 12, 13, 16, 17, 64, 65, 129)
"""On both sides of where kernels change, 40 to 80 choices of a format, and multiples of tiles."""

FACTORS: dict[str, Any] = {
    "tokens": TOKENS,
    "variant": tuple(VARIANTS),
    "activation": ("silu", "gelu", "gelu_tanh", "relu", "relu2", "identity"),
    "sizes": ((256, 128, 128), (320, 192, 64), (288, 224, 32), (160, 96, 16)),  # H, I, block_size
    "onnx_type": tuple(DTYPES),
    "gate": ("none", "concat", "interleaved"),
    "k": (1, 8, 10),
    "choices": ("random", "one_expert", "outside"),
    "shaped": (False, True),  # alpha, beta and limit are not neutral
    "has_bias": (False, True),
    "has_residual": (False, True),
    "weight_on": ("output", "input"),
    "has_maps": (False, True),
}


def experts_case(tokens: int, variant: str, sizes: tuple[int, int, int], **factors: Any) -> ExpertsCase:
    """The call of one combination."""
    activation, gate, shaped = (factors.pop(name) for name in ("activation", "gate", "shaped"))
    attributes: dict[str, Any] = {"activation": activation, "gated": int(gate != "none")}
    attributes["weight_on"] = factors.pop("weight_on")
    if gate != "none":
        attributes["gate_layout"] = gate
    if shaped and activation == "silu":
        attributes["alpha"] = 1.702
    if shaped and gate != "none":
        attributes |= {"beta": 0.5, "limit": 0.75}
    hidden, inner, block_size = sizes
    fields = {**VARIANTS[variant], "block_size": block_size, "attributes": attributes, **factors}
    experts = 48 if tokens * factors["k"] <= 80 else 16  # few tokens of each, or many
    return ExpertsCase((tokens,), experts, hidden=hidden, inner=inner, seed=tokens, **fields)


CASES = [experts_case(**factors) for factors in pairwise(FACTORS)]


def name_of(case: ExpertsCase) -> str:
    return f"{case.onnx_type}-{case.weight_format}-{case.leading[0]}x{case.k}-{case.attributes['activation']}"


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_pairs(case: ExpertsCase) -> None:
    """Against float64, from run to run, and FC2 with finalize in it against both apart."""
    launcher = Launcher(case)
    y = launcher().copy()
    case.check_each(y)
    for _ in range(3):
        assert_same_bits(launcher(), y)
    case.check_each(launch_apart(case))


@pytest.mark.parametrize("case", [case for case in CASES if case.seed % 4 != 0], ids=name_of)
def test_graph_replays_give_the_launchers_bits(case: ExpertsCase) -> None:
    """Fixed buffers and new choices at every replay."""
    session = op_session(
        op_model("FusedExperts", case.feeds, case.all_attributes),
        [("CUDAExecutionProvider", {"enable_cuda_graph": "1"})],  # type: ignore[list-item]
    )
    launcher = Launcher(case)
    binding = session.io_binding()
    for name, array in case.feeds.items():
        address = launcher.values[name].data_ptr()
        binding.bind_input(name, "cuda", 0, element_type(array.dtype), array.shape, address)
    x = case.feeds["x"]
    y = device_bytes(np.full(x.nbytes, POISON, np.uint8))
    binding.bind_output("y", "cuda", 0, element_type(x.dtype), x.shape, y.data_ptr())
    values = np.copy(x)
    for seed in range(3):
        values[:] = np.random.default_rng(seed).permuted(x, axis=1)
        data = values.reshape(-1).view(np.uint8)
        launcher.values["x"].update_inplace(np.pad(data, (0, max(0, 256 - data.size))))
        session.run_with_iobinding(binding)
        assert_same_bits(y.numpy()[: x.nbytes].view(x.dtype).reshape(x.shape), launcher())

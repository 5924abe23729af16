"""`ort_moe.torch` under torch.compile, torch.export and torch.onnx.export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import ort_moe
import ort_moe.torch as moe
from ort_moe.ops.schemas import register_schemas

pytestmark = pytest.mark.export

HIDDEN, EXPERTS, K = 12, 16, 3
OPTIONS: dict[str, Any] = {"score": "sigmoid", "normalize": True, "normalize_eps": 1e-20, "scale": 2.5}


class Block(torch.nn.Module):
    """Every op, with each format of a map."""

    def __init__(self) -> None:
        super().__init__()
        self.router = moe.Router(HIDDEN, EXPERTS, K, has_selection_bias=True, with_indices=True, **OPTIONS)
        self.scale = torch.nn.Parameter(torch.linspace(0.5, 1.5, EXPERTS))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        routed = self.router(x)
        assert routed.indices is not None
        logits = torch.nn.functional.linear(x, self.router.weight)
        scores = moe.router_scores(logits, K)
        bits = moe.router_probs(logits, K, expert_scale=self.scale, map_format="bit")
        loss = moe.aux_loss(scores.scores, scores.routing_map.sum(0), k=K, coeff=0.01)
        given = moe.aux_loss(bits.probs, routed.routing_map.sum(0), k=K, coeff=0.01, total=torch.tensor(7))
        return (*routed, *scores, bits.probs, bits.routing_map, loss, given)


def block() -> Block:
    torch.manual_seed(0)
    return Block()


def tokens(count: int) -> torch.Tensor:
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(count))


LOGITS = torch.randn(9, EXPERTS, generator=torch.Generator().manual_seed(0))
COUNTS = torch.arange(EXPERTS)
PROBS = ("sigmoid", 0, "score", 4, 2, 2, float("-inf"), 1, 1e-20, 0.0, 2.5, 0.0)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        ("router_probs", (LOGITS, torch.zeros(EXPERTS), torch.ones(EXPERTS), K, *PROBS, "byte")),
        ("router_probs", (LOGITS, None, None, K, *PROBS, "bit")),
        ("router_probs_indices", (LOGITS, None, torch.ones(EXPERTS), K, *PROBS, "byte")),
        ("router_scores", (LOGITS, K, "softmax", 0, 0.0, 0.0, "byte")),
        ("aux_loss", (LOGITS.sigmoid(), COUNTS, None, K, 0.01, 0)),
        ("aux_loss", (LOGITS.sigmoid().bfloat16(), COUNTS.int(), torch.tensor(9), K, 0.01, 0)),
    ],
)
def test_the_ops_keep_their_contract(op: str, arguments: tuple[Any, ...]) -> None:
    """Schema, fake tensors and autograd agree with what runs, as PyTorch checks it."""
    learned = [
        a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() and i != 1 else a
        for i, a in enumerate(arguments)
    ]
    results = torch.library.opcheck(getattr(torch.ops.ort_moe, op).default, tuple(learned))
    assert set(results.values()) == {"SUCCESS"}


def test_a_compiled_model_gives_the_same_bits_forward_and_backward() -> None:
    eager, compiled = block(), block()
    run = torch.compile(compiled, backend="aot_eager", fullgraph=True, dynamic=True)
    for count in (5, 9, 1):
        for model, call in ((eager, eager), (compiled, run)):
            outputs = call(tokens(count))
            model.zero_grad()
            sum(output.square().sum() for output in outputs if output.is_floating_point()).backward()
        for one, other in zip(eager(tokens(count)), run(tokens(count)), strict=True):
            assert torch.equal(one, other)
        for one, other in zip(eager.parameters(), compiled.parameters(), strict=True):
            assert one.grad is not None
            assert torch.equal(one.grad, other.grad)


def test_an_exported_program_gives_the_same_bits() -> None:
    model = block()
    program = torch.export.export(model, (tokens(5),), dynamic_shapes=({0: torch.export.Dim("tokens")},))
    for count in (5, 33):
        for one, other in zip(model(tokens(count)), program.module()(tokens(count)), strict=True):
            assert torch.equal(one, other)


def onnx_model(path: Path) -> Path:
    program = torch.onnx.export(
        block().eval(),
        (tokens(5),),
        dynamo=True,
        custom_translation_table=moe.onnx_translations(),
        dynamic_shapes=({0: torch.export.Dim("tokens")},),
        verbose=False,
    )
    assert program is not None
    program.save(path)
    return path


def test_an_onnx_model_has_our_nodes_and_gives_the_same_bits(tmp_path: Path) -> None:
    path = onnx_model(tmp_path / "model.onnx")
    proto = onnx.load(path)
    ours = [node.op_type for node in proto.graph.node if node.domain == "ort_moe"]
    assert sorted(ours) == ["AuxLoss", "AuxLoss", "RouterProbs", "RouterProbs", "RouterScores"]
    register_schemas()
    onnx.checker.check_model(proto, full_check=True)
    session = ort_moe.session(path)
    model = block()
    for count in (5, 33, 1):
        outputs = session.run(None, {session.get_inputs()[0].name: tokens(count).numpy()})
        expected = [tensor.detach().numpy() for tensor in model(tokens(count))]
        for got, values in zip(outputs, expected, strict=True):
            assert got.dtype == values.dtype
            np.testing.assert_allclose(got, values, rtol=1e-6, atol=1e-7)  # the product before may round otherwise

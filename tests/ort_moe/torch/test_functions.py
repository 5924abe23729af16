"""The functions of `ort_moe.torch`: the emulations' bits, and gradients against float64 autograd of plain PyTorch."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import ort_moe.torch as moe
from ort_moe.ops import AttributeValue
from ort_moe.reference.aux_loss import aux_loss
from ort_moe.reference.router_probs import bitmap, router_probs
from ort_moe.reference.router_scores import router_scores
from tests.op_models import assert_same_bits
from tests.ort_moe.torch.plain_router import plain_loss, plain_router, plain_scores
from tests.training_cases import SCORINGS

pytestmark = pytest.mark.export

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TYPES = [torch.float32, torch.float16, torch.bfloat16]
TOKENS, EXPERTS, K = 33, 60, 6
GROUPS: dict[str, Any] = {"num_groups": 4, "topk_groups": 2, "group_score_top": 2}


def array(tensor: torch.Tensor) -> Any:
    """A tensor as NumPy has it, bfloat16 by ml_dtypes."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def options_of(scoring: str) -> dict[str, AttributeValue]:
    return {name: value for name, value in SCORINGS[scoring].items() if name != "bias_on"}


def separate_logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits whose order float32 and float64 agree on."""
    generator = torch.Generator().manual_seed(0)
    values = torch.linspace(-2.0, 2.5, EXPERTS)
    return torch.stack([values[torch.randperm(EXPERTS, generator=generator)] for _ in range(TOKENS)]).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scoring", SCORINGS)
def test_router_probs_has_the_emulations_bits(scoring: str, dtype: torch.dtype, device: str) -> None:
    logits = torch.randn(2, 17, EXPERTS, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias, scale = torch.linspace(-0.5, 0.5, EXPERTS), torch.linspace(0.5, 2.0, EXPERTS)
    options = options_of(scoring) | GROUPS
    vectors = {"selection_bias": bias.to(device), "expert_scale": scale.to(device)}
    got = moe.router_probs(logits.to(device), K, **vectors, **options, with_indices=True)
    expected = router_probs(array(logits), bias.numpy(), scale.numpy(), k=K, **options)
    assert got.indices is not None
    for tensor, values in zip(got, expected, strict=True):
        assert_same_bits(array(tensor), values)
    bits = moe.router_probs(logits.to(device), K, **vectors, **options, map_format="bit")
    assert bits.indices is None
    assert_same_bits(array(bits.routing_map), bitmap(expected.routing_map))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("map_format", ["byte", "bit"])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_gradients_of_router_probs(scoring: str, grouped: bool, map_format: str, device: str) -> None:
    options: dict[str, Any] = options_of(scoring) | (GROUPS if grouped else {})
    if options["score"] == "none":
        options["normalize_min"] = -1e9
    generator = torch.Generator().manual_seed(2)
    grad = torch.randn(TOKENS, EXPERTS, generator=generator)
    bias = torch.linspace(-0.5, 0.5, EXPERTS) if grouped else None
    scale = torch.rand(EXPERTS, generator=generator) + 0.5

    wide = separate_logits(torch.float64).requires_grad_()
    wide_scale = scale.double().requires_grad_()
    expected, chosen = plain_router(wide, K, selection_bias=bias, expert_scale=wide_scale, **options)
    expected.backward(grad.double())

    logits = separate_logits().to(device).requires_grad_()
    ours_scale = scale.to(device).requires_grad_()
    ours_bias = None if bias is None else bias.to(device)
    got = moe.router_probs(
        logits, K, selection_bias=ours_bias, expert_scale=ours_scale, **options, map_format=map_format
    )
    got.probs.backward(grad.to(device))
    if map_format == "byte":
        torch.testing.assert_close(got.routing_map.cpu(), chosen)
    torch.testing.assert_close(got.probs.cpu().double(), expected, rtol=1e-5, atol=1e-6)
    for ours, theirs in ((logits, wide), (ours_scale, wide_scale)):
        assert ours.grad is not None
        assert theirs.grad is not None
        torch.testing.assert_close(ours.grad.cpu().double(), theirs.grad, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_router_scores_and_their_gradients(score: str, normalize: bool, device: str) -> None:
    options: dict[str, Any] = {"score": score, "normalize": normalize, "normalize_eps": 1e-20}
    logits = separate_logits().to(device).requires_grad_()
    wide = separate_logits(torch.float64).requires_grad_()
    grad = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(3))
    got = moe.router_scores(logits, K, **options)
    got.scores.backward(grad.to(device))
    plain_scores(wide, **options).backward(grad.double())
    expected = router_scores(array(logits), k=K, **(options | {"normalize": int(normalize)}))
    assert_same_bits(array(got.scores), expected.scores)
    assert_same_bits(array(got.routing_map), expected.routing_map)
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad.cpu().double(), wide.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("counts", [torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize("total", [None, 900, torch.tensor(900), torch.tensor([900.0])])
def test_aux_loss_and_its_gradient(
    total: int | torch.Tensor | None, counts: torch.dtype, dtype: torch.dtype, device: str
) -> None:
    probs = torch.rand(2, 350, EXPERTS, generator=torch.Generator().manual_seed(4)).to(dtype)
    tokens = torch.arange(EXPERTS, dtype=counts)
    ours = probs.to(device).clone().requires_grad_()
    on_device = total.to(device) if isinstance(total, torch.Tensor) else total
    loss = moe.aux_loss(ours, tokens.to(device), k=K, coeff=0.01, total=on_device)
    (3.0 * loss).backward()
    given = total.numpy() if isinstance(total, torch.Tensor) else None
    attributes: dict[str, Any] = {"k": K, "coeff": 0.01, "total_tokens": total if isinstance(total, int) else 0}
    assert_same_bits(array(loss), np.array(aux_loss(array(probs), tokens.numpy(), given, **attributes)))
    wide = probs.double().requires_grad_()
    plain = plain_loss(wide.flatten(0, 1), tokens, K, 0.01, 700 if total is None else 900)
    (3.0 * plain).backward()
    torch.testing.assert_close(loss.cpu().double(), plain, rtol=1e-6, atol=0.0)
    assert ours.grad is not None
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}[dtype]
    torch.testing.assert_close(ours.grad.cpu().double(), wide.grad, rtol=tolerance, atol=6e-8)


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_copied_that_lies_well(device: str) -> None:
    """A slice that starts off any alignment, strided logits, and no rows at all."""
    flat = torch.randn(1 + 5 * EXPERTS, device=device)
    shifted = flat[1:].view(5, EXPERTS)
    strided = torch.randn(EXPERTS, 5, device=device).T
    for logits in (shifted, strided, flat[:0].view(0, EXPERTS)):
        logits = logits.detach().requires_grad_()
        probs = moe.router_probs(logits, K).probs
        scores = moe.router_scores(logits, K).scores
        loss = moe.aux_loss(scores, torch.ones(EXPERTS, dtype=torch.int64, device=device), k=K, coeff=1.0)
        (probs.sum() + scores.sum() + loss).backward()
        assert_same_bits(array(probs), router_probs(array(logits), k=K, score="softmax").probs)
        assert logits.grad is not None
        assert logits.grad.shape == logits.shape


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_from_run_to_run(device: str) -> None:
    logits = torch.randn(1500, 128, device=device)

    def run() -> list[Any]:
        x = logits.clone().requires_grad_()
        out = moe.router_probs(x, 8, score="sigmoid", normalize=True)
        scores = moe.router_scores(x, 8)
        loss = moe.aux_loss(scores.scores, scores.routing_map.sum(0), k=8, coeff=0.1)
        (out.probs.square().sum() + loss).backward()
        return [array(t) for t in (out.probs, scores.scores, loss, x.grad) if t is not None]

    first = run()
    for _ in range(19):
        for got, expected in zip(run(), first, strict=True):
            assert_same_bits(got, expected)


LOGITS = torch.zeros(3, 8)
COUNTS = torch.zeros(8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: moe.router_probs(LOGITS.double(), 2), "'logits' must be float32, float16 or bfloat16, but is float64"),
        (lambda: moe.router_probs(LOGITS, 9), "attribute 'k' must be at most the number of experts, 8, but is 9"),
        (lambda: moe.router_probs(LOGITS, 2, score="sparse_mixer"), "RouterProbs: attribute 'score' must be 'softmax'"),
        (lambda: moe.router_probs(LOGITS, 2, selection_bias=torch.zeros(7)), r"must have shape \[8\], but has \[7\]"),
        (lambda: moe.router_probs(LOGITS, 2, expert_scale=torch.zeros(8).half()), "must be float32, but is float16"),
        (lambda: moe.router_probs(LOGITS, 2, map_format="nibble"), "map_format must be one of byte, bit"),
        (lambda: moe.router_scores(LOGITS, 2, score="none"), "RouterScores: attribute 'score' must be 'softmax', "),
        (lambda: moe.router_scores(torch.tensor(1.0), 1), "'logits' must have rank 1 or more, but is a scalar"),
        (lambda: moe.aux_loss(LOGITS, COUNTS.double(), k=2, coeff=0.1), "'tokens_per_expert' must be int32 or int64"),
        (lambda: moe.aux_loss(LOGITS, COUNTS[:7], k=2, coeff=0.1), r"must have shape \[8\], but has \[7\]"),
        (
            lambda: moe.aux_loss(LOGITS, COUNTS, k=2, coeff=0.1, total=-1),
            "'total_tokens' must be at least 0, but is -1",
        ),
        (lambda: moe.aux_loss(LOGITS, COUNTS, k=2, coeff=float("nan")), "'coeff' must be a number, but is nan"),
    ],
)
def test_wrong_calls_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()

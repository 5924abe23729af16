"""`ort_moe.torch` on CUDA: on the current stream, and captured into a graph."""

from __future__ import annotations

import pytest
import torch

import ort_moe.torch as moe

pytestmark = [pytest.mark.export, pytest.mark.gpu]

EXPERTS, K = 128, 8


def step(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Every op forward and backward."""
    routed = moe.router_probs(logits, K, score="sigmoid", normalize=True, with_indices=True)
    scores = moe.router_scores(logits, K)
    loss = moe.aux_loss(scores.scores, routed.routing_map.sum(0), k=K, coeff=0.01)
    (gradient,) = torch.autograd.grad(routed.probs.square().sum() + loss, logits)
    assert routed.indices is not None
    return (*(tensor.detach() for tensor in (routed.probs, routed.routing_map, routed.indices, loss)), gradient)


def logits_of(seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(300, EXPERTS, device="cuda", generator=generator).requires_grad_()


def test_work_follows_that_of_the_current_stream() -> None:
    expected = step(logits_of(1))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        late = torch.zeros(300, EXPERTS, device="cuda")
        torch.cuda._sleep(20_000_000)  # the logits come late
        late.copy_(logits_of(1).detach())
        got = step(late.requires_grad_())
    torch.cuda.synchronize()
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


def test_a_captured_graph_computes_from_what_is_there_at_its_replay() -> None:
    logits = logits_of(2)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(logits)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step(logits)
    for seed in (3, 4):
        with torch.no_grad():
            logits.copy_(logits_of(seed))
        graph.replay()
        for one, other in zip(outputs, step(logits_of(seed)), strict=True):
            assert torch.equal(one, other)

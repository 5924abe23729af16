"""The sections of docs/performance.md on routers, and on what brings rows to experts and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from docs.performance_tables import beside_peer, recorded, timed_cells

_ROUTER_HEADER = """\
## FusedRouter

E/K and the logits' type; "ours" is the launcher in a CUDA graph, "moving" a kernel that reads and writes as many bytes
and selects nothing, "ours in ORT" and "unfused ORT" are sessions with CUDA graphs that hold many independent routers,
as one node each and as standard nodes. "Peer" is the fastest of vLLM, SGLang's CUDA kernel, SGLang's Triton kernel with
PDL and PyTorch. The last column is what the kernel reads and writes, as a share of the bandwidth of a large copy in the
same run.
"""

_ROUTER_BOUNDS = """\
What bounds 8192 tokens is instructions, then the latency of one wave of warps: 128/8 moves its bytes in 2.4 us, and
takes 0.45 us less where logits are brought into the L2 ahead of the wait for the kernel before, which a model's, just
written there, need not. Lists of keys that every lane merges whole took 4.2 us; merged where they lie, of a lane's four
best, 3.4. Sigmoids are estimated but for the few that may be chosen: 8.1 us beside 10.9 for 8 of 256 in groups. Other
designs, in us at 8192 tokens: two rows to a warp, each half of which finishes one, 6.6 beside 7.5 for 8 of 256 sigmoids
and 9.2 beside 10.7 for 8 of 384, but 9.9 beside 8.1 in groups, for there is one wave, and it waits for the few rows
that have many candidates; 512/10 of fp32 logits by their floats in place of keys, with the next row's loads ahead, 9.3
beside 10.2, but 25 where rows are sorted or all equal; at 1024 tokens two rows to a warp take 1.5 to 2 times as long.
"""

_MAPS_HEADER = """\
## FusedRouter with routing maps

`python -m benchmarks.router --maps`; the peer is the fastest router and, behind it, the fastest builder of maps, whose
maps pad each expert's rows to a multiple of 64.
Up to 1024 choices the maps come from the router's own launch, more take launches of their own
([switches](environment.md)).
"""

_MAPS_BOUNDS = """\
What the maps add to a router of one token and 512/10 is the barrier at which the warps that build them wait for the
choices (20 of the 30 cycles between two of a warp's instructions, by ncu), a sum over a warp, and the stores. Other
designs, in us at 1 token, beside 2.25: masks of tokens by expert, and a scan of their bits, which is how more tokens
have it, 2.46; that, rehearsed ahead so that its instructions are there by then, 2.51; the set of experts written by
five warps in turn in place of a warp for each of its words, 2.69 (and, of 4 tokens, 3.47 beside 2.51).
"""

_SHARED_GATE_HEADER = """\
## SharedGateRouter

`python -m benchmarks.shared_gate`; E/K/H, the number S of shared experts, and the type. "torch": the same columns by
PyTorch's kernels (top-k and softmax into a strided view, a product in half precision, sigmoid into a strided view).
"Apart": FusedRouter, a product and sigmoid, each with a tensor of its own, and "sliced": SharedGateRouter and three
kernels that bring its columns into such tensors.
"With the gate": the product that makes the logits, by PyTorch, and one SharedGateRouter, beside "merged": one product
for the logits and the shared gates, its columns copied apart, FusedRouter, and sigmoid into a strided view. "Moving":
a kernel that reads and writes as many bytes. "Published" are times of another implementation on an MI355X, which was
not run here.

`ort-moe optimize --rules +shared-gate` writes this op where a sigmoid gates the shared expert, as in Qwen2-MoE and
Qwen3-Next; its columns are sliced apart there, for FusedExperts takes the chosen experts alone. "Sliced" beside "apart"
is about what that gains: up to 2.7 us a layer with up to 256 tokens, little with one to four, nothing with thousands,
and less where a cast to half precision follows. So the rewriter leaves it unless it is asked for.
"""

_FINALIZE_HEADER = """\
## FinalizeRouting

`python -m benchmarks.finalize`; H/K and the rows' type. "Settled": behind a kernel that ran on the same routing data,
which may then be read ahead. The peer is the best of vLLM and SGLang as recorded once on an H200; it was not run again.
"""

_GATHER_FINALIZE_HEADER = """\
## GatherFinalize

`python -m benchmarks.gather_finalize`; E/K/H and the rows' type. "Pair": a gather of the rows into permuted order by
PyTorch, given their places, and FinalizeRouting. "Moving": a kernel that reads and writes as many bytes. The peer is
the faster of vLLM's finalize and PyTorch's embedding_bag, which are given each choice's row, and of the 10 to 16 us
that are published for a kernel such as ours with up to 64 tokens on a B200.
"""

_PERMUTE_HEADER = """\
## PermuteTokens

`python -m benchmarks.permute`; E/K/H and the rows' type, rows and maps together. The peer is vLLM as recorded once on
an H200; it was not run again. Nearly all bytes are writes, of which this GPU takes 3.3 TB/s in a plain fill.
"""

_TRAINING_HEADER = """\
## RouterProbs, RouterScores and AuxLoss

`python -m benchmarks.training_router`; E/K, the type of logits, probs and gradients, and the score; maps have a byte an
expert. "Moving" is a kernel that reads and writes the same arrays and computes nothing of use, timed beside ours. The
gradient of RouterProbs reads of logits and gradients only what the map marks, unless the softmax is over all experts;
what moves the same reads all. The peer is the faster of TransformerEngine and PyTorch's ops. The last rows are logits
that are ascending, all equal, multiples of a half, and NaN in every other row, and routers of few experts.
"""


def sections() -> Sequence[str]:
    """Their parts, in Markdown."""
    router = ("router", "tokens", "ours", "moving", "ours in ORT", "unfused ORT", "peer", "", "% of copy")
    router_times = ("ours_us", "moving_us", "ours_ort_us", "unfused_ort_us", "peer_us")
    finalize = ("rows", "tokens", "ours", "settled", "peer", "", "% of copy")
    permute = ("rows", "tokens", "ours", "peer", "", "% of copy")
    gather = ("rows", "tokens", "ours", "pair", "moving", "peer", "", "% of copy")
    shared_gate = (
        "router",
        "tokens",
        "ours",
        "torch",
        "apart",
        "sliced",
        "with the gate",
        "merged",
        "moving",
        "published",
        "% of copy",
    )
    shared_gate_times = (
        "ours_us",
        "torch_us",
        "apart_us",
        "sliced_us",
        "with_gate_us",
        "merged_us",
        "moving_us",
        "peer_us",
    )
    training = ("call", "tokens", "ours", "moving", "peer", "", "% of copy")
    return [
        _ROUTER_HEADER,
        recorded("router", router, partial(beside_peer, router_times)),
        _ROUTER_BOUNDS,
        _MAPS_HEADER,
        recorded("router_maps", router, partial(beside_peer, router_times)),
        _MAPS_BOUNDS,
        _SHARED_GATE_HEADER,
        recorded("shared_gate", shared_gate, partial(timed_cells, shared_gate_times)),
        _FINALIZE_HEADER,
        recorded("finalize", finalize, partial(beside_peer, ("ours_us", "settled_us", "peer_us"))),
        _GATHER_FINALIZE_HEADER,
        recorded("gather_finalize", gather, partial(beside_peer, ("ours_us", "pair_us", "moving_us", "peer_us"))),
        _PERMUTE_HEADER,
        recorded("permute", permute, partial(beside_peer, ("ours_us", "peer_us"))),
        _TRAINING_HEADER,
        recorded("training_router", training, partial(beside_peer, ("ours_us", "moving_us", "peer_us"))),
    ]

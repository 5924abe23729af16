"""What the benchmark of the training ops times: the calls, and what the peer was recorded to take for them.

Recorded is TransformerEngine's fused router, once on an H200 in graphs from a cold cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ort_moe.ops import AttributeValue

PEER = "TransformerEngine"
TOKENS = 8192
SMALL_TOKENS = (1, 16, 512)

SCORINGS: dict[str, dict[str, AttributeValue]] = {
    "softmax of the chosen": {"score": "softmax", "score_after_topk": 1},
    "softmax of all": {"score": "softmax"},
    "sigmoid + bias": {"score": "sigmoid", "normalize": 1, "normalize_eps": 1e-20, "scale": 2.5},
    "softmax": {"score": "softmax"},
    "sigmoid": {"score": "sigmoid", "normalize": 1, "normalize_eps": 1e-20},
    "": {},
}
"""By the name in the table: RouterProbs' first three, RouterScores' next two, and none for AuxLoss."""

BYTES = {"float": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Work:
    """One row of the table.

    Attributes:
        op: `probs`, `scores` or `loss`, and the same with ` grad`.
        experts: E.
        k: K.
        dtype: Type of logits, probs and gradients by its ONNX name.
        scoring: A key of SCORINGS.
        peer_us: The peer's time, or None.
        tokens: T.
        texture: The kind of logits: `random`, `sorted`, `equal`, `ties` or `nan`.
    """

    op: str
    experts: int
    k: int
    dtype: str = "float"
    scoring: str = "softmax of the chosen"
    peer_us: float | None = None
    tokens: int = TOKENS
    texture: str = "random"

    @property
    def name(self) -> str:
        """Of its row."""
        parts = (self.op, f"{self.experts}/{self.k}", self.dtype, self.scoring, self.texture)
        return " ".join(part for part in parts if part not in ("", "random"))

    @property
    def attributes(self) -> dict[str, AttributeValue]:
        return {"k": self.k, **SCORINGS[self.scoring]}

    @property
    def is_compiled(self) -> bool:
        """Whether PyTorch's ops are compiled for it where that is asked for: of each call one, or two by width."""
        return self.dtype == "float" and self.k in (22, 36)

    @property
    def reads(self) -> int:
        """How many arrays (T, E) of the type are given."""
        return {"probs": 1, "probs grad": 2, "scores": 1, "scores grad": 2, "loss": 1, "loss grad": 0}[self.op]

    @property
    def writes(self) -> int:
        """How many arrays (T, E) of the type come out."""
        return 0 if self.op == "loss" else 1

    @property
    def map_bytes(self) -> int:
        return self.tokens * self.experts if self.op in ("probs", "probs grad", "scores") else 0

    @property
    def given_bytes(self) -> int:
        """Of all that is given and comes out."""
        return self.tokens * self.experts * BYTES[self.dtype] * (self.reads + self.writes) + self.map_bytes

    @property
    def moved_bytes(self) -> int:
        """What our kernel reads and writes: of a marked expert's logit and gradient one sector each."""
        sector = 32
        if self.op != "probs grad" or self.scoring == "softmax of all":
            return self.given_bytes
        marked = min(2 * self.k * sector, 2 * self.experts * BYTES[self.dtype])
        return self.tokens * (self.experts * BYTES[self.dtype] + marked) + self.map_bytes


def works() -> Iterator[Work]:
    """All rows."""
    forward = {  # of a softmax of the chosen: float, bfloat16
        (256, 4): (None, None),
        (256, 8): (24.4, 22.5),
        (512, 4): (28.3, 23.9),
        (512, 8): (41.5, 35.7),
        (512, 10): (82.8, 81.1),
        (512, 22): (87.2, 86.6),
        (512, 36): (90.2, 89.3),
        (2304, 4): (106.0, 90.9),
        (2304, 8): (141.0, 125.0),
        (2304, 22): (405.0, 313.0),
        (2304, 36): (416.0, 322.0),
    }
    for (experts, k), peers in forward.items():
        for dtype, peer in zip(BYTES, peers, strict=True):
            yield Work("probs", experts, k, dtype, peer_us=peer)
    for experts, k, peer in ((512, 22, 82.0), (2304, 36, 438.0)):
        yield Work("probs", experts, k, scoring="softmax of all", peer_us=peer)
    for experts, k, peer in ((512, 4, 28.9), (512, 22, 83.0), (2304, 36, 483.0)):
        yield Work("probs", experts, k, scoring="sigmoid + bias", peer_us=peer)
    for experts, k, softmax, sigmoid in ((512, 4, 20.1, 21.8), (512, 22, 20.0, 23.4), (2304, 36, 78.2, 100.0)):
        yield Work("probs grad", experts, k, peer_us=softmax)
        yield Work("probs grad", experts, k, scoring="sigmoid + bias", peer_us=sigmoid)
    yield Work("probs grad", 512, 22, "bfloat16", peer_us=17.4)
    scores = {  # forward, backward
        (512, 22, "softmax"): (79.6, 16.5),
        (512, 22, "sigmoid"): (77.5, 17.9),
        (2304, 36, "softmax"): (438.0, 66.0),
        (2304, 36, "sigmoid"): (436.0, 76.0),
    }
    for (experts, k, scoring), (forward_us, backward_us) in scores.items():
        yield Work("scores", experts, k, scoring=scoring, peer_us=forward_us)
        yield Work("scores grad", experts, k, scoring=scoring, peer_us=backward_us)
    for experts, k, forward_us, backward_us in ((512, 22, 17.4, 12.7), (2304, 36, 43.5, 75.6)):
        yield Work("loss", experts, k, scoring="", peer_us=forward_us)
        yield Work("loss grad", experts, k, scoring="", peer_us=backward_us)
    for experts, k in ((512, 10), (2304, 36)):
        for texture in ("sorted", "equal", "ties", "nan"):
            yield Work("probs", experts, k, texture=texture)
    for experts, k in ((8, 2), (32, 4), (60, 4), (64, 4)):
        for tokens in SMALL_TOKENS:
            yield Work("probs", experts, k, tokens=tokens)

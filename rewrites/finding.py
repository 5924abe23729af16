"""One thing to tell the user of a router."""

from __future__ import annotations

from dataclasses import dataclass

from ort_moe.reasons import Reason


@dataclass(frozen=True)
class Finding:
    """One thing that stands in the way of a whole router.

    Attributes:
        reason: The stable code.
        node: The node it is about, empty where there is none.
        detail: One clause: what was expected and what is there.
        consumers: The other consumers of the value in question.
        remedy: What the user can do about it here.
    """

    reason: Reason
    node: str
    detail: str
    consumers: tuple[str, ...] = ()
    remedy: str = ""

    def __post_init__(self) -> None:
        if not self.remedy:
            object.__setattr__(self, "remedy", self.reason.remedy)

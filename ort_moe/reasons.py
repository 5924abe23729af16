"""Why a site was not, or only partly, fused: stable codes with a sentence and a way out.

`explain`, the report and the docs share this list. A code never changes its meaning; new ones are added at the end.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """A stable code.

    Attributes:
        code: `OM` and three digits.
        slug: The code in words, as in `topk-not-a-router`.
        sentence: What it means.
        remedy: What the user can do about it.
    """

    code: str
    slug: str
    sentence: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.code} {self.slug}"


_ALL = (
    Reason(
        "OM001",
        "topk-not-a-router",
        "The indices of this TopK do not select experts.",
        "Nothing to do: sampling, classification and look-ups keep their TopK.",
    ),
)

REASONS: dict[str, Reason] = {reason.slug: reason for reason in _ALL}
"""Every reason by its slug."""

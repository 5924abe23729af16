"""The outcome of a verification."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ort_moe.printing.printable import Printable, table
from ort_moe.verification.sample_inputs import Shape
from ort_moe.verification.site import SiteCheck, Status
from ort_moe.verification.tolerance import told

if TYPE_CHECKING:
    from rich.console import RenderableType

SCHEMA = 3
"""Version of the JSON document; any change of its form raises it."""


Measure = Literal["largest", "norm"]


@dataclass(frozen=True)
class ShapeCheck:
    """The outcome end to end at one shape.

    Attributes:
        shape: The shape.
        status: `skipped` where the original does not run or gives no finite number, or every draw had a near tie.
        difference: Largest difference of an output, relative to that output's largest magnitude, or by norm.
        redraws: Inputs drawn again because of a near tie.
        detail: Why it failed or was skipped.
    """

    shape: Shape
    status: Status
    difference: float = 0.0
    redraws: int = 0
    detail: str = ""

    @property
    def why(self) -> str:
        """The first clause of the detail."""
        return re.split("[:;]", self.detail)[0]


@dataclass(frozen=True)
class Verification(Printable):
    """The outcome.

    Attributes:
        reference: The original.
        optimized: What is held against it.
        sites: One check for each fused node, in graph order.
        shapes: One check for each shape; empty where a site failed already.
        tolerance: What was allowed end to end, relative.
        notes: How it was run: where, by what, and then what was not run as it is in the models.
        measure: What differences end to end are: `largest`, relative to the largest magnitude; `norm`, of the
            difference, relative to the smaller one of the two outputs', where experts' weights were packed.
    """

    reference: str
    optimized: str
    sites: tuple[SiteCheck, ...]
    shapes: tuple[ShapeCheck, ...]
    tolerance: float
    notes: tuple[str, ...] = ()
    measure: Measure = "largest"

    @property
    def failure(self) -> str | None:
        """Why it failed, in one sentence; None where it passed."""
        for site in self.sites:
            if site.status == "failed":
                return f"the first {site.what} that differs is {site.node}: {site.detail}"
        for shape in self.shapes:
            if shape.status == "failed":
                return f"at {shape.shape}, {shape.detail}"
        if not any(shape.status == "passed" for shape in self.shapes):
            return f"no shape could be compared end to end: {self.shapes[-1].detail}"
        return None

    @property
    def passed(self) -> bool:
        """Whether the optimised model is proved to compute what the original does."""
        return self.failure is None

    def to_dict(self) -> dict[str, Any]:
        """The document that `ort_moe/json_schemas/verify.json` describes; a difference that is not finite is null."""
        return {
            "schema": SCHEMA,
            "passed": self.passed,
            "failure": self.failure,
            "reference": self.reference,
            "optimized": self.optimized,
            "tolerance": self.tolerance,
            "measure": self.measure,
            "notes": list(self.notes),
            "sites": [
                {
                    "node": s.node,
                    "status": s.status,
                    "rows": s.rows,
                    "near_ties": s.near_ties,
                    "difference": _finite(s.difference),
                    "change": _finite(s.change) if s.change is not None else None,
                    "detail": s.detail,
                }
                for s in self.sites
            ],
            "shapes": [
                {
                    "batch": s.shape.batch,
                    "tokens": s.shape.tokens,
                    "past": s.shape.past,
                    "status": s.status,
                    "difference": _finite(s.difference),
                    "redraws": s.redraws,
                    "detail": s.detail,
                }
                for s in self.shapes
            ],
        }

    @property
    def summary(self) -> str:
        """The outcome in one sentence."""
        if self.failure is not None:
            return f"verification FAILED: {self.failure}"
        shapes = [check for check in self.shapes if check.status == "passed"]
        others = [f"{check.shape} ({check.why})" for check in self.shapes if check.status == "skipped"]
        difference = max(check.difference for check in shapes)
        nodes = " and ".join(self._checked(what) for what in dict.fromkeys(site.what for site in self.sites))
        routed = f"{nodes} on the original's own values, " if self.sites else ""
        return (
            f"verified: {routed}outputs at {', '.join(str(check.shape) for check in shapes)} "
            f"within {difference:.1e} of {self._of} (allowed {told(self.tolerance)})"
            f"{'; not compared: ' if others else ''}{', '.join(others)}"
            f"{''.join(f'; {note}' for note in self.notes[2:])}"
        )

    @property
    def _packed(self) -> bool:
        return self.measure == "norm"

    @property
    def _of(self) -> str:
        return "the norm" if self._packed else "the largest magnitude"

    def _checked(self, what: str) -> str:
        """How many of the nodes of a kind were held against the original."""
        sites = [site for site in self.sites if site.what == what]
        passed = sum(site.status == "passed" for site in sites)
        many = {"router": "routers", "contrib block": "contrib blocks"}.get(what, what.replace("layer", "layers"))
        if passed == len(sites):
            return f"each {what}"
        why = "; ".join(dict.fromkeys(site.detail for site in sites if site.status != "passed"))
        return f"{passed} of {len(sites)} {many} ({why})"

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = [Text(f"verified against {self.reference}: {'; '.join(self.notes)}")]
        if self.sites:
            parts.append(self._sites_table())
        if self.shapes:
            parts.append(self._shapes_table())
            allowed = f"allowed end to end: {told(self.tolerance)}"
            if self._packed:
                allowed = (
                    f"end to end, to {self._of}; {allowed}; weights were packed: experts are held against what those "
                )
                allowed += "stand for, and 'change' is what that makes of the original's rows, by norm"
            parts.append(Text(f"differences are relative to the largest magnitude; {allowed}"))
        failure = self.failure
        parts.append(
            Text("PASSED", style="bold green") if failure is None else Text(f"FAILED: {failure}", style="bold red")
        )
        return Group(*parts)

    def _sites_table(self) -> RenderableType:
        from rich.text import Text

        numbers = ("rows", "near ties", "difference", *(["change"] if self._packed else []))
        listing = table("node", "", *numbers, "", numbers=numbers, prose=("",))
        for site in self.sites:
            cells = [str(site.rows), str(site.near_ties), "" if site.status == "skipped" else f"{site.difference:.1e}"]
            if self._packed:
                cells.append("" if site.change is None else f"{site.change:.1e}")
            listing.add_row(Text(site.node), site.status, *cells, Text(site.detail))
        return listing

    def _shapes_table(self) -> RenderableType:
        from rich.text import Text

        numbers = ("difference", "drawn again")
        listing = table("end to end", "", *numbers, "", numbers=numbers, prose=("",))
        for shape in self.shapes:
            difference = "" if shape.status == "skipped" else f"{shape.difference:.1e}"
            listing.add_row(str(shape.shape), shape.status, difference, str(shape.redraws), Text(shape.detail))
        return listing


def _finite(number: float) -> float | None:
    return number if number != float("inf") else None

"""The report of an optimisation: what changed, how long it took, and whether the answer is proved the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ort_moe.explanation import STATUS_WORDS, Explanation, describe_router
from ort_moe.printable import Printable, table

if TYPE_CHECKING:
    import onnx_ir as ir
    from rich.console import RenderableType

    from ort_moe.rewrites import Finding, PassRecord, Site
    from ort_moe.verification import Verification

SCHEMA = 1
"""Version of the JSON document; it grows by keys, and any other change raises it."""


@dataclass(frozen=True)
class Report(Printable):
    """What `optimize` did.

    Attributes:
        source: The input.
        output: The output; None where nothing was written.
        target: `cuda` or `cpu`.
        matched: Whether anything was fused that was not before.
        sites: Every site found, with what became of it.
        passes: The passes in order, with their seconds.
        operators_before: Number of nodes by operator, as `Softmax` or `com.microsoft::MoE`.
        operators_after: The same of the output; function bodies are not counted.
        already_fused: Nodes of our operators that the input held already.
        findings: What stood in the way on the model as a whole.
        verification: The proof; None where there was none.
        warnings: Sentences for the user.
    """

    source: str
    output: str | None
    target: str
    matched: bool
    sites: tuple[Site, ...]
    passes: tuple[PassRecord, ...]
    operators_before: Mapping[str, int]
    operators_after: Mapping[str, int]
    already_fused: int = 0
    findings: tuple[Finding, ...] = ()
    verification: Verification | None = None
    warnings: tuple[str, ...] = ()

    @property
    def explanation(self) -> Explanation:
        """Why each site was or was not fused."""
        return Explanation(self.sites, self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values.

        Keys: `schema` (1), `source`, `output` (null: nothing written), `target`, `matched`, `already_fused`,
        `operators` ({operator: {before, after}}), `passes` ([{name, applied, seconds}]), `sites` and `findings` (see
        `Explanation.to_dict`),
        `verification` (see `Verification.to_dict`; null: not verified), `warnings` ([sentence]).
        """
        return {
            "schema": SCHEMA,
            "source": self.source,
            "output": self.output,
            "target": self.target,
            "matched": self.matched,
            "already_fused": self.already_fused,
            "operators": {
                name: {"before": self.operators_before.get(name, 0), "after": self.operators_after.get(name, 0)}
                for name in sorted({*self.operators_before, *self.operators_after})
            },
            "passes": [{"name": p.name, "applied": p.applied, "seconds": p.seconds} for p in self.passes],
            **self.explanation.to_dict(),
            "verification": self.verification.to_dict() if self.verification is not None else None,
            "warnings": list(self.warnings),
        }

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        parts: list[RenderableType] = [Text(self._headline(), style="bold")]
        if self.sites:
            parts.append(self._sites_table())
        if self.matched:
            parts += [self._operators_table(), self._passes_table()]
        if self.verification is not None:
            parts.append(self.verification)
        parts += [Text(f"{finding.reason}: {finding.detail}", style="yellow") for finding in self.findings]
        parts += [Text(f"warning: {warning}", style="yellow") for warning in self.warnings]
        parts.append(Text(f"written: {self.output}" if self.output is not None else "nothing written"))
        return Group(*parts)

    def _headline(self) -> str:
        if self.matched:
            whole, partly = (sum(site.status == status for site in self.sites) for status in ("whole", "partly"))
            before = f", {self.already_fused} of them before" if self.already_fused else ""
            return f"{self.source}: {_count(whole, 'router')} fused whole, {partly} partly{before}"
        if self.already_fused:
            return f"{self.source}: already optimised ({_count(self.already_fused, 'fused node')}), nothing changed"
        return f"{self.source}: nothing matched, nothing changed"

    def _sites_table(self) -> RenderableType:
        listing = table("site", "node", "", "experts", "router", "why not more", numbers=("site", "experts"))
        for number, site in enumerate(self.sites):
            listing.add_row(
                str(number),
                site.node,
                STATUS_WORDS[site.status],
                "" if site.experts is None else str(site.experts),
                "" if site.attributes is None else describe_router(site.attributes),
                "; ".join(dict.fromkeys(str(finding.reason) for finding in site.findings)),
            )
        return listing

    def _operators_table(self) -> RenderableType:
        listing = table("operator", "before", "after", numbers=("before", "after"))
        for name in sorted({*self.operators_before, *self.operators_after}):
            before, after = self.operators_before.get(name, 0), self.operators_after.get(name, 0)
            if before != after:
                listing.add_row(name, str(before), str(after))
        listing.add_section()
        listing.add_row("all nodes", str(sum(self.operators_before.values())), str(sum(self.operators_after.values())))
        return listing

    def _passes_table(self) -> RenderableType:
        listing = table("pass", "applied", "ms", numbers=("applied", "ms"))
        for record in self.passes:
            if record.applied:
                listing.add_row(record.name, str(record.applied), f"{record.seconds * 1e3:.1f}")
        listing.add_section()
        listing.add_row("all, idle ones too", "", f"{sum(record.seconds for record in self.passes) * 1e3:.1f}")
        return listing


def count_operators(model: ir.Model) -> Counter[str]:
    """Number of nodes by operator, in the graph and its subgraphs."""
    import onnx_ir as ir

    return Counter(
        f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

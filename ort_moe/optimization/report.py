"""The report of an optimisation: what changed, how long it took, and what verification found."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ort_moe.choices import USUAL_TARGET
from ort_moe.graphs.node_kinds import CONTRIB, CONTRIB_MOE
from ort_moe.inspection.explain import (
    STATUS_STYLES,
    STATUS_WORDS,
    Explanation,
    experts_to_dict,
    finding_parts,
    finding_to_dict,
    site_to_dict,
)
from ort_moe.printing import experts_wording
from ort_moe.printing.conversion_wording import conversion_lines, conversion_to_dict, conversions_table
from ort_moe.printing.printable import Printable, paragraph, table
from ort_moe.printing.router_wording import phrase
from ort_moe.printing.wording import counted, some_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ort_moe.rewrites import ExpertsSite, Finding, PassRecord, Site
    from ort_moe.rewrites.conversion import Conversion
    from ort_moe.verification import Verification

SCHEMA = 5
"""Version of the JSON document; any change of its form raises it."""


@dataclass(frozen=True)
class Report(Printable):
    """What `optimize` did; printed in short, and `in_full` with each site, operator, pass and check.

    Attributes:
        source: The input.
        output: The output; None where nothing was written.
        target: `cuda`, `cpu` or `contrib`.
        matched: Whether anything was fused that was not before.
        sites: Every site found, with what became of it.
        passes: The passes in order, with their seconds.
        operators_before: Number of nodes by operator, as `Softmax` or `com.microsoft::MoE`.
        operators_after: The same of the output; function bodies are not counted.
        already_fused: FusedRouter nodes that the input held already.
        findings: What stood in the way on the model as a whole.
        verification: What it found; None where there was none.
        warnings: Sentences for the user.
        experts: The experts behind every choice, with what became of them.
        conversions: What became of the weights of each layer of experts, if they were to be packed.
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
    experts: tuple[ExpertsSite, ...] = ()
    conversions: tuple[Conversion, ...] = ()

    @property
    def explanation(self) -> Explanation:
        """Why each site was or was not fused."""
        return Explanation(self.sites, self.findings, experts=self.experts)

    def to_dict(self) -> dict[str, Any]:
        """The document that `ort_moe/json_schemas/report.json` describes."""
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
            "sites": [site_to_dict(site) for site in self.sites],
            "experts": [experts_to_dict(each) for each in self.experts],
            "conversions": [conversion_to_dict(each) for each in self.conversions],
            "findings": [finding_to_dict(finding) for finding in self.findings],
            "verification": self.verification.to_dict() if self.verification is not None else None,
            "warnings": list(self.warnings),
        }

    @property
    def in_full(self) -> FullReport:
        """The report with every site explained, and every operator, pass and check."""
        return FullReport(self)

    def __rich__(self) -> RenderableType:
        from rich.console import Group

        return Group(*self.parts(), *closing(self.warnings, self.output))

    def parts(self) -> list[RenderableType]:
        """All but warnings, and where the result went."""
        from rich.text import Text

        parts: list[RenderableType] = [self.headline(), *self._site_groups()]
        if self.matched:
            parts.append(Text(self._operators_line()))
        parts += conversion_lines(self.conversions)
        if self.verification is not None:
            parts.append(Text(self.verification.summary))
        for finding in self.findings:
            parts += finding_parts(finding)
        return parts

    def headline(self) -> RenderableType:
        """The outcome in a line."""
        from rich.text import Text

        return Text(self._headline(), style="bold")

    def _headline(self) -> str:
        if self.matched:
            whole, partly = (sum(site.status == status for site in self.sites) for status in ("whole", "partly"))
            how = " partly" if not whole else f", {whole} whole and {partly} partly" if partly else " whole"
            if not whole + partly:
                return f"{self.source}: experts of {counted(self._fused_experts(), 'router')} fused, no router"
            before = f", {self.already_fused} of them before" if self.already_fused else ""
            return f"{self.source}: {counted(whole + partly, 'router')} fused{how}{before}, {self._experts_clause()}"
        if self.already_fused:
            return f"{self.source}: already optimised ({counted(self.already_fused, 'fused router')}), nothing changed"
        blocks = sum(self.operators_before.get(f"{CONTRIB}::{op_type}", 0) for op_type in CONTRIB_MOE)
        if self.target == "contrib" and blocks:
            return f"{self.source}: in ONNX Runtime's own nodes already ({counted(blocks, 'block')}), nothing changed"
        return f"{self.source}: nothing matched, nothing changed"

    def _experts_clause(self) -> str:
        """Of how many routers the experts are fused."""
        fused, known = self._fused_experts(), len(self.experts)
        if not fused:
            return "without experts"
        return "with experts" if fused == known else f"{fused} of {known} with experts"

    def _fused_experts(self) -> int:
        return sum(each.status == "whole" for each in self.experts)

    def _site_groups(self) -> list[RenderableType]:
        """A line for all sites with the same fate."""
        groups: dict[tuple[str, str], list[str]] = {}
        for site in self.sites:
            codes = ", ".join(dict.fromkeys(str(finding.reason) for finding in site.findings))
            told: list[str] = [counted(site.experts, "expert")] if site.experts is not None else []
            told += [phrase(site.attributes, site.inputs)] if site.attributes is not None else []
            told += [codes] if codes else []
            groups.setdefault((site.status, "; ".join(told)), []).append(site.node)
        for each in self.experts:
            codes = ", ".join(dict.fromkeys(str(finding.reason) for finding in each.findings))
            told = [experts_wording.phrase(each.attributes)] if each.attributes is not None else []
            told += [codes] if codes else []
            groups.setdefault((each.status, "; ".join(["experts", *told])), []).append(each.node)
        parts = []
        for (status, fate), nodes in groups.items():
            line = f"{STATUS_WORDS[status]}: {fate} ({some_of(nodes, 1)})"
            parts.append(paragraph(line, indent=2, style=STATUS_STYLES[status]))
        findings = [finding for site in self.sites for finding in site.findings]
        findings += [finding for each in self.experts for finding in each.findings]
        if any(finding.reason.slug != "topk-not-a-router" for finding in findings):
            options = f" --target {self.target}" if self.target != USUAL_TARGET else ""
            command = f"`ort-moe explain {shlex.quote(self.source)}{options}`"
            if any(finding.reason.slug == "rule-left-out" for finding in findings):
                command = "the same command with `--explain`"  # which alone knows what rules were left out
            parts.append(paragraph(f"{command} tells why, and what to do about it", indent=2))
        return parts

    def _operators_line(self) -> str:
        before, after = self.operators_before, self.operators_after
        change = {name: after.get(name, 0) - before.get(name, 0) for name in sorted({*before, *after})}
        changed = [f"{name} {by:+}" for name, by in sorted(change.items(), key=lambda row: -row[1]) if by]
        which = f" ({', '.join(changed)})" if changed else ""  # none where weights alone were packed
        return f"nodes: {sum(before.values())} before, {sum(after.values())} after{which}"


@dataclass(frozen=True)
class FullReport(Printable):
    """A report with all that it holds."""

    report: Report

    def __rich__(self) -> RenderableType:
        from rich.console import Group

        return Group(*self.parts(), *closing(self.report.warnings, self.report.output))

    def parts(self) -> list[RenderableType]:
        """All but warnings, and where the result went."""
        report = self.report
        parts: list[RenderableType] = [report.headline(), report.explanation]
        if report.matched:
            parts += [self._operators_table(), self._passes_table()]
        if report.conversions:
            parts += [*conversion_lines(report.conversions), conversions_table(report.conversions)]
        if report.verification is not None:
            parts.append(report.verification)
        return parts

    def _operators_table(self) -> RenderableType:
        listing = table("operator", "before", "after", numbers=("before", "after"))
        for name in sorted({*self.report.operators_before, *self.report.operators_after}):
            before, after = self.report.operators_before.get(name, 0), self.report.operators_after.get(name, 0)
            if before != after:
                listing.add_row(name, str(before), str(after))
        listing.add_section()
        listing.add_row(
            "all nodes", str(sum(self.report.operators_before.values())), str(sum(self.report.operators_after.values()))
        )
        return listing

    def _passes_table(self) -> RenderableType:
        listing = table("pass", "applied", "ms", numbers=("applied", "ms"))
        for record in self.report.passes:
            if record.applied:
                listing.add_row(record.name, str(record.applied), f"{record.seconds * 1e3:.1f}")
        listing.add_section()
        listing.add_row("all, idle ones too", "", f"{sum(record.seconds for record in self.report.passes) * 1e3:.1f}")
        return listing


def closing(warnings: Sequence[str], output: str | None) -> list[RenderableType]:
    """Warnings, and where the result went."""
    from rich.text import Text

    lines: list[RenderableType] = [Text(f"warning: {warning}", style="yellow") for warning in warnings]
    return [*lines, Text(f"written: {output}" if output is not None else "nothing written")]

"""Why each site of a model was or was not fused, in codes and words."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ort_moe.choices import USUAL_TARGET, Target
from ort_moe.printing.experts_wording import phrase
from ort_moe.printing.printable import Printable, paragraph
from ort_moe.printing.router_wording import sentence
from ort_moe.printing.wording import counted, some_of

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ort_moe.rewrites import ExpertsSite, Finding, Site

SCHEMA = 2
"""Version of the JSON document; any change of its form raises it."""

STATUS_WORDS = {"whole": "fused whole", "partly": "fused partly", "left": "left as it is"}
STATUS_STYLES = {"whole": "green", "partly": "yellow", "left": "dim"}


@dataclass(frozen=True)
class Explanation(Printable):
    """What became of each site.

    Attributes:
        sites: In graph order; a layer's number is its place here, from 0.
        findings: What concerns the model as a whole.
        first: Number of the first site here.
        experts: The experts behind the choices.
    """

    sites: tuple[Site, ...]
    findings: tuple[Finding, ...] = ()
    first: int = 0
    experts: tuple[ExpertsSite, ...] = ()

    def layer(self, number: int) -> Explanation:
        """The explanation of one site.

        Raises:
            IndexError: There is none of that number.
        """
        if not 0 <= number < len(self.sites):
            there_are = f"there are {len(self.sites)}, numbered from 0" if self.sites else "there is none"
            raise IndexError(f"there is no site {number}: {there_are}")
        site = self.sites[number]
        experts = tuple(each for each in self.experts if _belong_together(site, each))
        return Explanation((site,), self.findings, number, experts)

    def to_dict(self) -> dict[str, Any]:
        """The document that `ort_moe/json_schemas/explain.json` describes."""
        return {
            "schema": SCHEMA,
            "sites": [site_to_dict(site) for site in self.sites],
            "experts": [experts_to_dict(each) for each in self.experts],
            "findings": [finding_to_dict(finding) for finding in self.findings],
        }

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        graphs = {site.graph for site in self.sites}
        parts: list[RenderableType] = []
        for number, site in enumerate(self.sites, self.first):
            parts += _site_parts(number, site, show_graph=len(graphs) > 1)
            for each in self.experts:
                if _belong_together(site, each):
                    parts += _experts_parts(each)
        apart = [each for each in self.experts if not any(_belong_together(site, each) for site in self.sites)]
        for each in apart:
            choice = "makes the choice itself" if each.router == each.node else "of no known choice"
            parts += [Text.assemble((each.node, "bold"), f" {choice}"), *_experts_parts(each)]
        if not self.sites and not self.experts:
            parts.append(Text("no router in standard nodes, and no other TopK: there is nothing to fuse"))
        for finding in self.findings:
            parts += [Text("the model", style="bold"), *finding_parts(finding)]
        return Group(*parts)


def explain(
    source: str | os.PathLike[str],
    *,
    target: Target = USUAL_TARGET,
    rules: Collection[str] | None = None,
    skip: Collection[str] = (),
) -> Explanation:
    """Rewrites a model in memory and tells what became of each site; nothing is written.

    Args:
        source: An ONNX model, or a folder with one.
        target: Where the model shall run; or `contrib`, for ONNX Runtime's own nodes in place of ours.
        rules: The only rules to apply, by name; None: all.
        skip: Rules not to apply.

    Raises:
        ModelError: The model cannot be read.
        ValueError: A rule name or the target is unknown.
    """
    from ort_moe.files.loading import load_model
    from ort_moe.files.model_path import model_file
    from ort_moe.rewrites import rewrite

    result = rewrite(load_model(model_file(source)), rules=rules, skip=skip, target=target)
    return Explanation(result.sites, result.findings, experts=result.experts)


def site_to_dict(site: Site) -> dict[str, Any]:
    """A site as JSON-ready values: what is not known is null, infinities are strings."""
    return {
        "node": site.node,
        "graph": site.graph,
        "status": site.status,
        "experts": site.experts,
        "k": site.k,
        "attributes": _finite(site.attributes) if site.attributes is not None else None,
        "inputs": list(site.inputs),
        "absorbed": list(site.absorbed),
        "findings": [finding_to_dict(finding) for finding in site.findings],
        "surroundings": list(site.surroundings),
    }


def experts_to_dict(experts: ExpertsSite) -> dict[str, Any]:
    """The experts of a layer as JSON-ready values: what is not known is null."""
    return {
        "node": experts.node,
        "graph": experts.graph,
        "status": experts.status,
        "block": experts.block,
        "router": experts.router,
        "form": experts.form,
        "experts": experts.experts,
        "k": experts.k,
        "hidden": experts.hidden,
        "inner": experts.inner,
        "attributes": experts.attributes,
        "residual": experts.residual,
        "findings": [finding_to_dict(finding) for finding in experts.findings],
        "surroundings": list(experts.surroundings),
    }


def finding_to_dict(finding: Finding) -> dict[str, Any]:
    """A finding as JSON-ready values."""
    return {
        "code": finding.reason.code,
        "slug": finding.reason.slug,
        "node": finding.node,
        "detail": finding.detail,
        "consumers": list(finding.consumers),
        "remedy": finding.remedy,
    }


def finding_parts(finding: Finding) -> list[RenderableType]:
    """A finding for the user: what it is, where, who else is concerned, and what to do."""
    where = f"{finding.node}: " if finding.node and finding.node not in finding.detail else ""
    lines = [where + finding.detail]
    if any(name not in finding.detail for name in finding.consumers):
        lines.append(f"also read by: {some_of(finding.consumers, 6)}")
    lines.append(f"what to do: {finding.remedy}")
    return [
        paragraph(f"{finding.reason}: {finding.reason.sentence}", indent=2, style="yellow"),
        *(paragraph(line, indent=4) for line in lines),
    ]


def _finite(attributes: dict[str, Any]) -> dict[str, Any]:
    """Infinities as strings: JSON has none."""
    return {
        n: str(v) if isinstance(v, float) and v in (float("inf"), float("-inf")) else v for n, v in attributes.items()
    }


def _site_parts(number: int, site: Site, *, show_graph: bool) -> list[RenderableType]:
    from rich.text import Text

    title = Text.assemble(
        (f"site {number}: {site.node}", "bold"),
        f" in {site.graph}" if show_graph else "",
        ": ",
        (STATUS_WORDS[site.status], STATUS_STYLES[site.status]),
    )
    parts: list[RenderableType] = [title]
    if site.attributes is not None:
        parts.append(paragraph(f"fused: {sentence(site.attributes, site.inputs, site.experts)}", indent=2))
        parts.append(paragraph(f"by the rules: {', '.join(site.absorbed) or 'of an earlier run'}", indent=2))
    elif site.experts is not None:
        parts.append(paragraph(f"a choice of {site.k or '?'} of {counted(site.experts, 'expert')}", indent=2))
    for finding in site.findings:
        parts += finding_parts(finding)
    return parts


def _belong_together(site: Site, experts: ExpertsSite) -> bool:
    return (site.graph, site.node) == (experts.graph, experts.router)


def _experts_parts(experts: ExpertsSite) -> list[RenderableType]:
    from rich.text import Text

    word = STATUS_WORDS[experts.status]
    parts: list[RenderableType] = [Text.assemble("  its experts: ", (word, STATUS_STYLES[experts.status]))]
    if experts.attributes is not None:
        by = experts.form or "of an earlier run"
        parts.append(paragraph(f"fused: {phrase(experts.attributes)}, {experts.inner} inner elements ({by})", indent=4))
        if experts.residual != "none":
            parts.append(paragraph(f"added to: {_RESIDUALS[experts.residual]}", indent=4))
    for finding in experts.findings:
        parts += finding_parts(finding)
    return parts


_RESIDUALS = {
    "shared": "what shared experts return",
    "gated": "what shared experts return, behind a sigmoid gate of their own",
    "other": "another value, as a residual connection adds it",
}

"""Why each site of a model was or was not fused, in codes and words."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ort_moe.printable import Printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ort_moe.rewrites import Finding, Site

STATUS_WORDS = {"whole": "fused whole", "partly": "fused partly", "left": "left as it is"}


@dataclass(frozen=True)
class Explanation(Printable):
    """What became of each site.

    Attributes:
        sites: In graph order; a layer's number is its place here, from 0.
        findings: What concerns the model as a whole.
    """

    sites: tuple[Site, ...]
    findings: tuple[Finding, ...] = ()

    def layer(self, number: int) -> Explanation:
        """The explanation of one site.

        Raises:
            IndexError: There is none of that number.
        """
        if not 0 <= number < len(self.sites):
            there_are = f"there are {len(self.sites)}, numbered from 0" if self.sites else "there is none"
            raise IndexError(f"there is no site {number}: {there_are}")
        return Explanation(self.sites[number : number + 1], self.findings)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: `sites`, each as `site_to_dict` gives it, and `findings`, as those of a site."""
        return {
            "sites": [site_to_dict(site) for site in self.sites],
            "findings": [_finding_to_dict(finding) for finding in self.findings],
        }

    def __rich__(self) -> RenderableType:
        from rich.text import Text

        graphs = {site.graph for site in self.sites}
        parts = [_site_text(number, site, show_graph=len(graphs) > 1) for number, site in enumerate(self.sites)]
        if not parts:
            parts.append(
                Text("No TopK: there is no site to fuse. Routers that choose by Max or ArgMax are not recognised yet.")
            )
        parts += [Text("the model" + _finding_text(finding)) for finding in self.findings]
        return Text("\n").join(parts)


def explain(
    source: str | os.PathLike[str], *, rules: Collection[str] | None = None, skip: Collection[str] = ()
) -> Explanation:
    """Rewrites a model in memory and tells what became of each site; nothing is written.

    Raises:
        ModelError: The model cannot be read.
        ValueError: A rule name is unknown.
    """
    from ort_moe.model_io import load_model
    from ort_moe.rewrites import rewrite

    result = rewrite(load_model(source), rules=rules, skip=skip)
    return Explanation(result.sites, result.findings)


def site_to_dict(site: Site) -> dict[str, Any]:
    """JSON-ready values.

    Keys: `node`, `graph`, `status` (whole, partly, left), `experts`, `k`, `attributes`, `absorbed`, `findings` ([{code,
    slug, node, detail, consumers}]). What is not known is null; infinities are strings.
    """
    return {
        "node": site.node,
        "graph": site.graph,
        "status": site.status,
        "experts": site.experts,
        "k": site.k,
        "attributes": _finite(site.attributes) if site.attributes is not None else None,
        "absorbed": list(site.absorbed),
        "findings": [_finding_to_dict(finding) for finding in site.findings],
    }


def describe_router(attributes: dict[str, Any]) -> str:
    """A router's arithmetic in a phrase, from the attributes of its FusedRouter."""
    score, k = attributes["score"], attributes["k"]
    grouped = attributes.get("topk_groups", 1) < attributes.get("num_groups", 1)
    choice = f"top {k}"
    if grouped:
        choice += f" in the best {attributes['topk_groups']} of {attributes['num_groups']} groups"
    steps = [choice] if score == "none" else [score, choice]
    if attributes.get("score_after_topk"):
        steps.reverse()
    if attributes.get("softcap"):
        steps.insert(0, f"softcap {attributes['softcap']:g}")
    if attributes.get("normalize"):
        steps.append("normalised")
    if attributes.get("scale", 1.0) != 1.0:
        steps.append(f"times {attributes['scale']:g}")
    return ", ".join(steps)


def _finding_to_dict(finding: Finding) -> dict[str, Any]:
    return {
        "code": finding.reason.code,
        "slug": finding.reason.slug,
        "node": finding.node,
        "detail": finding.detail,
        "consumers": list(finding.consumers),
    }


def _finite(attributes: dict[str, Any]) -> dict[str, Any]:
    """Infinities as strings: JSON has none."""
    return {
        n: str(v) if isinstance(v, float) and v in (float("inf"), float("-inf")) else v for n, v in attributes.items()
    }


def _site_text(number: int, site: Site, *, show_graph: bool) -> Any:
    from rich.text import Text

    style = {"whole": "green", "partly": "yellow", "left": "dim"}[site.status]
    text = Text(f"site {number}: {site.node}" + (f" in {site.graph}" if show_graph else ""), style="bold")
    text.append(f"\n  {STATUS_WORDS[site.status]}", style=style)
    if site.experts is not None:
        text.append(f"; {site.experts} experts", style="not bold")
    if site.attributes is not None:
        text.append(f"; {describe_router(site.attributes)}", style="not bold")
    if site.absorbed:
        text.append(f"\n  absorbed: {', '.join(site.absorbed)}", style="not bold")
    for finding in site.findings:
        text.append(_finding_text(finding), style="not bold")
    return text


def _finding_text(finding: Finding) -> str:
    where = f"at {finding.node}: " if finding.node else ""
    lines = [f"{finding.reason}: {finding.reason.sentence}", f"  {where}{finding.detail}"]
    if finding.consumers:
        lines.append(f"  also used by: {_shortened(finding.consumers)}")
    lines.append(f"  way out: {finding.reason.remedy}")
    return "".join(f"\n  {line}" for line in lines)


def _shortened(names: Sequence[str], most: int = 6) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"

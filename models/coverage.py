"""What the rewrites make of the fixtures: `python -m models.coverage` renews docs/coverage.md. Needs no torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import models.fixtures
from docs.markdown_table import markdown_table
from models.architectures import ARCHITECTURES, architecture
from models.fixtures import Fixture
from models.plan import EXPORTERS, PRECISIONS, VARIANTS

if TYPE_CHECKING:
    from ort_moe.rewrites import ExpertsSite, Site

PAGE = Path(__file__).parents[1] / "docs" / "coverage.md"

_HEADER = """\
# Coverage

<!-- Generated from models/fixtures/ by `make docs`; edit models/architectures.py or the rewrites instead. -->

Which routers become one `FusedRouter`, and the experts behind them one `FusedExperts`, by architecture, exporter and
precision, as found on the [sample models](models.md). **whole**: nothing of either is left beside the two nodes. Else
the router and the experts are told apart, with a slash between: *partly*: some of it is left, and the model means the
same; *refused*: it is as it was. The codes are explained in [codes.md](codes.md).

The exporters: *dynamo* is `torch.onnx.export(dynamo=True)`, *legacy* the same with `dynamo=False`, *transformers* is
`transformers.exporters.OnnxExporter`, all with the experts implementation `batched_mm`; *grouped* is the last one with
`grouped_mm`. An empty cell is an export that is not kept here. But for the few at the end of this page that cannot be
made, every architecture has fp32 from three exporters, and a router of every family all exporters and all precisions.

"""

_CONTRIB = """\

## For `--target contrib`

Which blocks become [ONNX Runtime's own node](contrib_nodes.md), as found on one export of each architecture in fp32;
the others stay as they were exported.

"""

_NOT_EXPORTED = """\
## What cannot be exported

- `grouped_mm`, the default of transformers, by torch's own exporters: they have no translation of it.
- `eager`: dynamo cannot trace it, and the legacy exporter bakes the experts that the example's tokens chose into the
  graph, which then fails or is wrong on others.
- aria_text by transformers' exporter: it cannot prove that the block's reshapes take every length.
- ernie4_5_moe in half precision by transformers' exporter: its router leaves autocast with two types.
- llama4_text with `grouped_mm`: it runs all experts whatever is asked for.
- bfloat16 below opset 24 holds, in some exports, a TopK that the standard does not have there. Fused, it is gone.
"""


@dataclass(frozen=True)
class Part:
    """What became of the routers, or of the experts, of one model.

    Attributes:
        status: `whole`, `partly` or `refused`; of several, the worst.
        reasons: codes and names of what stood in the way, each once, in order.
    """

    status: str
    reasons: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        if self.status == "whole":
            return "**whole**"
        links = ", ".join(f"[{slug}](codes.md#{code.lower()}-{slug})" for code, slug in self.reasons)
        return f"*{self.status}* ({links or 'none found'})"


@dataclass(frozen=True)
class Outcome:
    """What became of the MoE blocks of one model.

    Attributes:
        routers: their routers.
        experts: their experts.
    """

    routers: Part
    experts: Part

    def __str__(self) -> str:
        return (
            str(self.routers) if self.routers == self.experts == Part("whole") else f"{self.routers} / {self.experts}"
        )


WHOLE = Outcome(Part("whole"), Part("whole"))


def outcome(fixture: Fixture) -> Outcome:
    """Rewrite the fixture and say what came of it."""
    import onnx_ir as ir

    from ort_moe.rewrites import rewrite

    result = rewrite(ir.load(fixture.path))
    return Outcome(_part(fixture, result.sites), _part(fixture, result.experts))


def _part(fixture: Fixture, sites: "Sequence[Site | ExpertsSite]") -> Part:
    fused = [site.status for site in sites if site.status != "left"]
    if fused == ["whole"] * fixture.layers:
        return Part("whole")
    findings = [finding for site in sites if site.status != "whole" for finding in site.findings]
    reasons = dict.fromkeys((finding.reason.code, finding.reason.slug) for finding in findings)
    return Part("partly" if len(fused) == fixture.layers else "refused", tuple(reasons))


def contrib_outcome(fixture: Fixture) -> str:
    """Rewrite the fixture for `contrib` and say what became of its block: the node's type, or why there is none."""
    import onnx_ir as ir

    from ort_moe.graphs.node_kinds import is_contrib_moe
    from ort_moe.rewrites import rewrite

    model = ir.load(fixture.path)
    result = rewrite(model, target="contrib")
    written = [node.op_type for node in model.graph.all_nodes() if is_contrib_moe(node)]
    if written:
        return f"`{written[0]}`"
    findings = [finding for site in (*result.experts, *result.sites) for finding in site.findings]
    return findings[0].detail if findings else "none found"


def page(
    outcome_of: Callable[[Fixture], Outcome] = outcome, contrib_of: Callable[[Fixture], str] = contrib_outcome
) -> str:
    """Return the page, in Markdown."""
    outcomes = {fixture.name: outcome_of(fixture) for fixture in models.fixtures.all()}
    routers = sum(found.routers == WHOLE.routers for found in outcomes.values())
    experts = sum(found.experts == WHOLE.experts for found in outcomes.values())
    percent = [f"{100 * whole / len(outcomes):.1f} %" for whole in (routers, experts)]
    share = (
        f"Of {len(outcomes)} exports, the routers of {routers} are whole, {percent[0]}, and the experts of {experts}, "
    )
    share += f"{percent[1]}.\n\n"
    parts = [_HEADER, share, "## Blocks\n\n", _matrix("block", outcomes), "\n## Language models\n\n"]
    parts += [_matrix("causal_lm", outcomes), "\n## Variants\n\n", _variants(outcomes)]
    parts += ["\n## Routers\n\n", _routers(), _CONTRIB, _contrib(contrib_of), "\n", _NOT_EXPORTED]
    return "".join(parts)


def _matrix(kind: str, outcomes: dict[str, Outcome]) -> str:
    """Architectures by exporters and precisions."""
    columns = [(exporter, precision) for exporter in EXPORTERS for precision in PRECISIONS]
    found = {
        (fixture.architecture, fixture.exporter, fixture.precision): str(outcomes[fixture.name])
        for fixture in models.fixtures.all()
        if fixture.kind == kind and not fixture.variant
    }
    head = [f"{exporter.removeprefix('transformers_')} {precision}" for exporter, precision in columns]

    def rows() -> Iterator[tuple[str, ...]]:
        for row in ARCHITECTURES:
            if kind in row.kinds:
                yield row.name, *(found.get((row.name, *column), "") for column in columns)

    return markdown_table(("architecture", *head), rows())


def _variants(outcomes: dict[str, Outcome]) -> str:
    """What differs from the plain exports in more than exporter and precision."""
    kinds = {"block": "block", "causal_lm": "language model"}
    rows = (
        (
            fixture.architecture,
            kinds[fixture.kind],
            fixture.exporter.removeprefix("transformers_"),
            fixture.precision,
            _describe(fixture.variant),
            str(outcomes[fixture.name]),
        )
        for fixture in models.fixtures.all()
        if fixture.variant
    )
    return markdown_table(("architecture", "", "exporter", "precision", "variant", ""), rows)


def _describe(name: str) -> str:
    variant = VARIANTS[name]
    if variant.opset:
        return f"opset {variant.opset}"
    return "static shapes" if variant.static else "router logits are outputs"


def _routers() -> str:
    names = dict.fromkeys(fixture.architecture for fixture in models.fixtures.all())
    rows = ((name, architecture(name)) for name in names)
    return markdown_table(
        ("architecture", "family", "E", "K", "router"),
        ((name, row.family, str(row.experts), str(row.k), row.router) for name, row in rows),
    )


def _contrib(contrib_of: Callable[[Fixture], str]) -> str:
    """The first fp32 block of each architecture."""
    first: dict[str, Fixture] = {}
    for fixture in models.fixtures.all():
        if (fixture.kind, fixture.precision, fixture.variant) == ("block", "fp32", ""):
            first.setdefault(fixture.architecture, fixture)
    rows = ((name, contrib_of(fixture)) for name, fixture in first.items())
    return markdown_table(("architecture", "becomes, or why not"), rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

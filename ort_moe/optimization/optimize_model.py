"""Reads one model, fuses its MoE blocks, proves the answer the same, and only then puts it there."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from ort_moe.choices import TARGETS, USUAL_TARGET, WEIGHTS, Target, check_choice
from ort_moe.errors import EnvironmentUnfitError, ModelError, OutputError, VerificationError
from ort_moe.graphs.node_kinds import is_contrib_moe, is_experts, is_router, is_shared_gate_router
from ort_moe.ops import FUSED_ROUTER, SHARED_GATE_ROUTER

if TYPE_CHECKING:
    import onnx_ir as ir

    from ort_moe.optimization.report import Report
    from ort_moe.packing.pieces import Packing
    from ort_moe.rewrites import Finding
    from ort_moe.rewrites.conversion import Conversion
    from ort_moe.verification import Verification

_ROUTERS = (FUSED_ROUTER.name, SHARED_GATE_ROUTER.name)


@dataclass(frozen=True)
class Settings:
    """What shall be done to a model: the arguments of `ort_moe.optimize` of these names.

    Attributes:
        target: Where the model shall run, or `contrib`.
        rules: The only rules to apply, or with plus signs, those besides the usual ones; None: these.
        skip: Rules not to apply.
        verify: Whether both models are run and compared.
        external_data: `keep`, or the name of one file for all weights.
        weights: `keep`, or what the experts' weights are packed to.
        block_size: Of packed weights.
        zero_points: Whether their blocks have zero points.
    """

    target: Target = USUAL_TARGET
    rules: Collection[str] | None = None
    skip: Collection[str] = ()
    verify: bool = True
    external_data: str = "keep"
    weights: str = "keep"
    block_size: int | None = None
    zero_points: bool = False

    def packing(self) -> Packing | None:
        """How the weights shall be packed; None: not at all.

        Raises:
            ValueError: There is no such target or format, or not with these blocks or zero points.
        """
        from ort_moe.packing.pieces import Packing

        check_choice("target", self.target, TARGETS)
        check_choice("the format of weights", self.weights, WEIGHTS)
        if self.weights == "keep":
            if self.block_size is not None or self.zero_points:
                raise ValueError("block sizes and zero points are for weights that are packed, but they are kept")
            return None
        packing = Packing.of(self.weights, self.block_size, zero_points=self.zero_points)
        if self.target == "contrib":
            raise ValueError("weights are packed for FusedExperts, and contrib nodes keep those that they have")
        return packing


def optimize_model(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None,
    settings: Settings,
    *,
    require_match: bool = False,
    force: bool = False,
) -> Report:
    """Fuses the routers of one model, and the experts behind them; see `ort_moe.optimize`.

    Args:
        source: An ONNX model.
        output: Where the result goes; None: a dry run, which writes and verifies nothing.
        settings: What shall be done.
        require_match: Write nothing where nothing matched.
        force: Replace what is there, the input even.

    Raises:
        ModelError: The input cannot be read or run.
        OutputError: The output cannot be written there.
        VerificationError: The results differ; nothing was put in place.
        ValueError: A setting is unknown.
    """
    from ort_moe.files.loading import check_data_readable, load_model
    from ort_moe.files.model_path import check_output_name
    from ort_moe.files.staged_model import StagedModel, check_target
    from ort_moe.graphs.operators import count_operators
    from ort_moe.optimization.report import Report
    from ort_moe.rewrites import rewrite
    from ort_moe.rewrites.conversion import told_as_packed

    packing, target, external_data = settings.packing(), settings.target, settings.external_data
    model = load_model(source)
    check_data_readable(source, model)
    if output is not None:
        check_output_name(output)
        check_output_name(Path(output).parent / external_data)
        check_target(output, source=source, external_data=external_data, force=force)
    before = count_operators(model)
    fused_before = _fused(model)
    result = rewrite(model, rules=settings.rules, skip=settings.skip, target=target)
    with _packed(model, packing, output) as conversions:
        report = Report(
            source=os.fspath(source),
            output=None,
            target=target,
            matched=_fused(model) != fused_before,
            sites=result.sites,
            passes=result.passes,
            operators_before=before,
            operators_after=count_operators(model),
            already_fused=sum(count for (op_type, _), count in fused_before.items() if op_type in _ROUTERS),
            findings=result.findings,
            experts=told_as_packed(result.experts, model, conversions),
            conversions=conversions,
        )
        if not report.matched:
            # Canonicalising alone is no improvement: the user gets the very graph that came in.
            model = load_model(source)
            report = replace(report, operators_after=before)
        if output is None or (require_match and not report.matched):
            return report
        with StagedModel(model, output, source=source, external_data=external_data, force=force) as staged:
            if settings.verify and report.matched:
                try:
                    report = replace(report, verification=_prove(source, staged.path, report.findings))
                except EnvironmentUnfitError as error:
                    report = replace(report, warnings=(*report.warnings, f"not verified: {error}"))
            elif report.matched:
                report = replace(report, warnings=(*report.warnings, "not verified: switched off"))
            staged.commit()
    return replace(report, output=os.fspath(output))


def packing_warnings(settings: Settings, reports: Sequence[Report]) -> tuple[str, ...]:
    """A sentence where weights were to be packed, and none of these models has experts of ours."""
    packing = settings.packing()
    if packing is None or any(report.conversions for report in reports):
        return ()
    return (f"no weights packed to {packing}: there is no FusedExperts",)


@contextmanager
def _packed(
    model: ir.Model, packing: Packing | None, output: str | os.PathLike[str] | None
) -> Iterator[tuple[Conversion, ...]]:
    """Packs the weights of the model in place, into a file beside the output that is deleted in the end.

    A dry run keeps nothing of what is packed: such a model cannot be written.

    Raises:
        OutputError: The file cannot be written.
    """
    if packing is None:
        yield ()
        return
    from ort_moe.files.weights_file import WeightsFile
    from ort_moe.rewrites.conversion import convert_experts

    with ExitStack() as stack:
        try:
            path = os.devnull
            if output is not None:
                target = Path(os.path.abspath(output))
                scratch = TemporaryDirectory(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
                path = os.path.join(stack.enter_context(scratch), "packed.data")
            with WeightsFile(path) as file:
                conversions = convert_experts(model, packing, file)
        except OSError as error:
            raise OutputError(f"cannot write {output}: {error.strerror or error}") from error
        yield conversions


def _fused(model: ir.Model) -> Counter[tuple[str, str]]:
    """Nodes that stand for routers and experts, by their type and what they compute."""
    return Counter(
        (node.op_type, repr([(name, node.attributes[name].value) for name in sorted(node.attributes)]))
        for node in model.graph.all_nodes()
        if is_router(node) or is_shared_gate_router(node) or is_experts(node) or is_contrib_moe(node)
    )


def _way_out(source: str | os.PathLike[str]) -> str:
    """What to do where the CPU may not run the original: not every contrib node has a kernel there."""
    from ort_moe.files.loading import load_model

    if not any(is_contrib_moe(node) for node in load_model(source).graph):
        return ""
    return "; `--no-verify` writes it all the same, and `ort-moe verify --provider cuda` compares on a GPU"


def _prove(
    source: str | os.PathLike[str], optimized: str | os.PathLike[str], findings: Sequence[Finding]
) -> Verification:
    from ort_moe.verification import verify

    # What is wrong with the original is a likelier cause than what was done to it.
    causes = "".join(f"; {finding.reason}: {finding.detail}" for finding in findings)
    try:
        verification = verify(source, optimized)
    except ModelError as error:
        raise ModelError(f"nothing was put in place: {error}{causes}{_way_out(source)}") from error
    if not verification.passed:
        raise VerificationError(
            f"verification failed, nothing was put in place: {verification.failure}{causes}", verification
        )
    return verification

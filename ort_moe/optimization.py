"""`ort_moe.optimize`: reads a model, fuses its MoE blocks, proves the answer the same, and only then puts it there."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from ort_moe.errors import EnvironmentUnfitError, ModelError, OutputError, VerificationError
from ort_moe.node_kinds import is_contrib_moe, is_experts, is_router, is_shared_gate_router
from ort_moe.ops import FUSED_ROUTER, SHARED_GATE_ROUTER

if TYPE_CHECKING:
    import onnx_ir as ir

    from ort_moe.packing.pieces import Packing
    from ort_moe.report import Report
    from ort_moe.rewrites import Finding
    from ort_moe.rewrites.conversion import Conversion
    from ort_moe.verification import Verification

_ROUTERS = (FUSED_ROUTER.name, SHARED_GATE_ROUTER.name)


def optimize(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    target: Literal["cuda", "cpu", "contrib"] = "cuda",
    rules: Collection[str] | None = None,
    skip: Collection[str] = (),
    verify: bool = True,
    require_match: bool = False,
    external_data: str = "keep",
    force: bool = False,
    weights: str = "keep",
    block_size: int | None = None,
    zero_points: bool = False,
) -> Report:
    """Fuses the routers of a model, and the experts behind them.

    The output is complete: loadable from another folder, and by an ONNX Runtime (1.27 or newer) without our library,
    which then runs the standard operators that come with each fused node. A model in which nothing matches is written
    as it was.

    Args:
        source: An ONNX model.
        output: Where the result goes; None: a dry run, which writes and verifies nothing.
        target: Where the model shall run: contrib ops that ONNX Runtime computes faster there stay. Or `contrib`:
            blocks become com.microsoft::MoE and QMoE, which run without our library, where these compute the same.
        rules: The only rules to apply, by name; None: all but those that are to be asked for, to which names with a
            plus sign in front, as in `+shared-gate`, are added.
        skip: Rules not to apply.
        verify: Whether to run both models on random inputs and compare them (on the CPU; needs memory for the weights).
        require_match: Write nothing where nothing matched.
        external_data: `keep`: weights stay in files of their names, referenced from the same folder and copied to
            another; else the name of one file beside the output that takes all weights.
        force: Allow the output to be the input.
        weights: `keep`, or what the experts' dense weights are packed to: `nvfp4`, `mxfp4`, `int4`, `int8` or `fp8`.
            Routers, shared experts and all else keep their precision. The report tells what it cost in accuracy.
        block_size: int4, int8, fp8: weights that share a scale, 16, 32, 64 or 128; None: as usual.
        zero_points: int4, int8: whether blocks have zero points.

    Returns:
        What was done; printable.

    Raises:
        ModelError: The input cannot be read, or ONNX Runtime cannot load it, or run it at any of the shapes tried.
        OutputError: The output cannot be written there.
        VerificationError: The results differ, or were NaN throughout or near ties; nothing was put in place.
        ValueError: A rule name, the target or the format of weights is unknown, or has no such blocks or zero points.
    """
    from ort_moe.model_io import StagedModel, check_links, check_target, load_model
    from ort_moe.report import Report, count_operators
    from ort_moe.rewrites import TARGETS, rewrite
    from ort_moe.rewrites.conversion import told_as_packed

    if target not in TARGETS:
        raise ValueError(f"target '{target}' is unknown; the targets are {', '.join(TARGETS)}")
    packing = _packing(weights, block_size, zero_points)
    if packing is not None and target == "contrib":
        raise ValueError("weights are packed for FusedExperts, and contrib nodes keep those that they have")
    if output is not None:
        check_target(output, source=source, external_data=external_data, force=force)
    model = load_model(source)
    check_links(source, model)
    before = count_operators(model)
    fused_before = _fused(model)
    result = rewrite(model, rules=rules, skip=skip, target=target)
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
            if verify and report.matched:
                try:
                    report = replace(report, verification=_prove(source, staged.path, report.findings))
                except EnvironmentUnfitError as error:
                    report = replace(report, warnings=(*report.warnings, f"not verified: {error}"))
            elif report.matched:
                report = replace(report, warnings=(*report.warnings, "not verified: switched off"))
            staged.commit()
    return replace(report, output=os.fspath(output))


def _packing(weights: str, block_size: int | None, zero_points: bool) -> Packing | None:
    """How the weights shall be packed; None: not at all.

    Raises:
        ValueError: There is no such format, or not with these blocks or zero points.
    """
    from ort_moe.packing.pieces import FORMATS, Packing

    if weights == "keep":
        if block_size is not None or zero_points:
            raise ValueError("block sizes and zero points are for weights that are packed, but they are kept")
        return None
    if weights not in FORMATS:
        raise ValueError(f"the format of weights '{weights}' is unknown; the formats are keep, {', '.join(FORMATS)}")
    return Packing.of(weights, block_size, zero_points=zero_points)


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
    from ort_moe.rewrites.conversion import convert_experts
    from ort_moe.weights_file import WeightsFile

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
    from ort_moe.model_io import load_model

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

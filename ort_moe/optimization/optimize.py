"""`ort_moe.optimize`: of one model, or of the models in a folder of onnxruntime-genai."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from ort_moe.choices import USUAL_TARGET, Target
from ort_moe.optimization.optimize_model import Settings, optimize_model, packing_warnings

if TYPE_CHECKING:
    from ort_moe.optimization.folder_report import FolderReport
    from ort_moe.optimization.report import Report


def optimize(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    target: Target | None = None,
    rules: Collection[str] | None = None,
    skip: Collection[str] = (),
    verify: bool = True,
    require_match: bool = False,
    external_data: str = "keep",
    force: bool = False,
    weights: str = "keep",
    block_size: int | None = None,
    zero_points: bool = False,
) -> Report | FolderReport:
    """Fuses the routers of a model, and the experts behind them.

    The output is complete: loadable from another folder, and by an ONNX Runtime (1.27 or newer) without our library,
    which then runs the standard operators that come with each fused node. A model in which nothing matches is written
    as it was.

    Of a folder of onnxruntime-genai, the models that its genai_config.json names are optimised, and the output is a
    folder that it loads as it is: with a copy of our library, which the configuration names, and all else as it was.

    Args:
        source: An ONNX model, or a folder with a genai_config.json.
        output: Where the result goes; it must not exist. None: a dry run, which writes and verifies nothing.
        target: Where the model shall run: contrib ops that ONNX Runtime computes faster there stay. Or `contrib`:
            blocks become com.microsoft::MoE and QMoE, which run without our library, where these compute the same.
            None: `cuda`; of a folder, where its configuration has it run.
        rules: The only rules to apply, by name; None: all but those that are to be asked for, to which names with a
            plus sign in front, as in `+shared-gate`, are added.
        skip: Rules not to apply.
        verify: Whether to run both models on random inputs and compare them (on the CPU; needs memory for the weights).
        require_match: Write nothing where nothing matched.
        external_data: `keep`: weights stay in files of their names, referenced from the same folder and copied to
            another; else the name of one file beside the output that takes all weights.
        force: Replace what is there: a model, the input even; of a folder, another model folder with all that lies in
            it.
        weights: `keep`, or what the experts' dense weights are packed to: `nvfp4`, `mxfp4`, `int4`, `int8` or `fp8`.
            Routers, shared experts and all else keep their precision. The report tells what it cost in accuracy.
        block_size: int4, int8, fp8: weights that share a scale, 16, 32, 64 or 128; None: as usual.
        zero_points: int4, int8: whether blocks have zero points.

    Returns:
        What was done; printable.

    Raises:
        ModelError: The input cannot be read, or ONNX Runtime cannot load it, or run it at any of the shapes tried; or a
            folder is none of onnxruntime-genai's, or of a version that is not known.
        OutputError: The output cannot be written there.
        VerificationError: The results differ, or were NaN throughout or near ties; nothing was put in place.
        EnvironmentUnfitError: There is no library to copy to a folder.
        ValueError: A rule name, the target or the format of weights is unknown, or has no such blocks or zero points.
    """
    settings = Settings(USUAL_TARGET, rules, skip, verify, external_data, weights, block_size, zero_points)
    if os.path.isdir(source):
        from ort_moe.optimization.optimize_folder import optimize_folder

        return optimize_folder(source, output, settings, target=target, require_match=require_match, force=force)
    if target is not None:
        settings = replace(settings, target=target)
    report = optimize_model(source, output, settings, require_match=require_match, force=force)
    return replace(report, warnings=(*report.warnings, *packing_warnings(settings, [report])))

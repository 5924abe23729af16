"""`ort_moe.bench`: a model as it is, in ONNX Runtime's contrib nodes, and in ours, each measured by itself."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ort_moe.benchmarking.child_process import measure_apart
from ort_moe.benchmarking.machine import free_host_bytes, gpu_name, processor_name
from ort_moe.benchmarking.measurement import Order, Point
from ort_moe.benchmarking.result import AS_GIVEN, Benchmark, Timing, Variant
from ort_moe.choices import WEIGHTS, check_choice
from ort_moe.errors import ModelError, OrtMoeError
from ort_moe.graphs.graph_capture import in_words
from ort_moe.installation.environment import require_onnxruntime
from ort_moe.optimization.optimize_model import Settings
from ort_moe.printing.printable import byte_size, plain
from ort_moe.printing.wording import counted
from ort_moe.running.session import CPU, CUDA, default_providers, provider_names, require_providers

if TYPE_CHECKING:
    import onnx_ir as ir

    from ort_moe.inspection.inspect import Inspection
    from ort_moe.optimization.report import Report

TOKENS = (1, 64)
"""A decode step and a prompt."""

STEPS = 50
"""Runs that are timed at each number of tokens."""

_ON_CPU = "there is none on the CPU"


def bench(
    source: str | os.PathLike[str],
    optimized: str | os.PathLike[str] | None = None,
    *,
    providers: Sequence[str] | None = None,
    tokens: Sequence[int] = TOKENS,
    steps: int = STEPS,
    past: int = 0,
    weights: Sequence[str] = ("keep",),
    seed: int = 0,
) -> Benchmark:
    """Measures a model as it is, as `optimize` makes it with contrib nodes, and with ours.

    Each is loaded and run in a process of its own, on the same random inputs. What cannot be made, loaded or run is
    told in the result and is no error. Models that are made lie in a temporary folder, one at a time, and are not
    verified.

    Args:
        source: An ONNX model, or a folder with one.
        optimized: What `optimize` made of it, or a folder with that; None: it is made here.
        providers: Names of execution providers, best first: CUDA's, behind which the CPU's is always there, or the
            CPU's. None: CUDA where this ONNX Runtime and our library both have it.
        tokens: Of one sequence, in each run; a model whose inputs have fixed lengths takes those.
        steps: Runs that are timed at each number of tokens; fewer, three at least, where they take over 20 seconds.
        past: Tokens that went before, of models whose inputs hold their keys and values; where a cache slides, it is
            full.
        weights: What the experts' weights become in our variants, as `optimize` names it: a variant for each.
        seed: Of the random inputs.

    Raises:
        ModelError: A model cannot be read, the two do not take the same inputs, or no inputs can be made for them, as
            where a cache of fixed length does not hold the fewest of the tokens behind the past, or no input a past.
        EnvironmentUnfitError: ONNX Runtime, our library or a provider is not there.
        ValueError: A number of tokens or steps is below one, the providers are no list of names, or the first is
            neither of these, a format of weights is unknown, or formats are given for a model that is made already.
    """
    import numpy as np

    from ort_moe.files.loading import load_model
    from ort_moe.files.model_path import model_file
    from ort_moe.verification.sample_inputs import Shape, draw, has_dynamic_tokens, holds_past, usual_shapes
    from ort_moe.verification.signatures import check_signatures

    if past < 0:
        raise ValueError(f"past tokens are 0 or more, but {past} came")
    if steps < 1 or not tokens or min(tokens) < 1:
        raise ValueError(f"steps and numbers of tokens are above 0, but {steps} and {', '.join(map(str, tokens))} came")
    for each in weights:
        check_choice("the format of weights", each, WEIGHTS)
    if optimized is not None and tuple(weights) != ("keep",):
        raise ValueError("weights are packed where the optimised model is made, but one is given")
    onnxruntime = require_onnxruntime()
    chosen = _chosen_provider(providers, onnxruntime.get_available_providers())
    source = model_file(source)
    model = load_model(source)
    if optimized is not None:
        optimized = model_file(optimized)
        check_signatures(model, load_model(optimized))
    if past and not holds_past(model):
        raise ModelError(f"{source} has no input for a past, but {counted(past, 'token')} shall have gone before")
    dynamic, past = has_dynamic_tokens(model), usual_shapes(model)[0].past or past
    # What cannot be drawn is told before anything is measured.
    draw(model, Shape(1, min(tokens), past), np.random.default_rng(seed))
    order = Order(
        os.path.abspath(source),
        os.path.abspath(source),
        chosen,
        tuple(dict.fromkeys(tokens)) if dynamic else (),
        past,
        steps,
        seed,
    )
    variants = [_measured(Variant(AS_GIVEN, os.fspath(source), "measured"), source, order)]
    variants.append(_made("contrib", source, order, Settings(target="contrib", verify=False)))
    if optimized is not None:
        variants.append(_measured(Variant("ours", os.fspath(optimized), "measured"), optimized, order))
    else:
        for each in dict.fromkeys(weights):
            name = "ours" if each == "keep" else f"ours, {each}"
            settings = Settings(target="cuda" if chosen == CUDA else "cpu", weights=each, verify=False)
            variants.append(_made(name, source, order, settings))
    device = gpu_name() if chosen == CUDA else processor_name()
    return Benchmark(os.fspath(source), chosen, device, onnxruntime.__version__, steps, past, tuple(variants))


def _chosen_provider(asked: Sequence[str] | None, available: Sequence[str]) -> str:
    """Name of the first execution provider.

    Raises:
        EnvironmentUnfitError: One, or our library, is not there.
        ValueError: It is another than CUDA's or the CPU's, or they are no list of names.
    """
    from ort_moe.installation.library import library_path

    library_path()
    chosen = default_providers(available) if asked is None else provider_names(asked)
    if asked is not None and any(not isinstance(each, str) for each in asked):
        raise ValueError(f"models are measured on providers without options, but {asked!r} came")
    if not chosen or chosen[0] not in (CUDA, CPU):
        raise ValueError(f"models are measured on {CUDA} or {CPU}, but {', '.join(chosen) or 'no provider'} came")
    require_providers(chosen, available)
    return chosen[0]


def _made(name: str, source: str | os.PathLike[str], order: Order, settings: Settings) -> Variant:
    """Optimises the model into a temporary folder, and measures what that gives."""
    from ort_moe.optimization.optimize_model import optimize_model

    variant = Variant(name, None, "impossible")
    with tempfile.TemporaryDirectory(prefix="ort-moe-") as folder:
        path = Path(folder, "model.onnx")
        try:
            report = optimize_model(source, path, settings, require_match=True)
        except OrtMoeError as error:
            return replace(variant, why=str(error).replace(folder, "the temporary folder"))
        told = plain(report.headline()).removeprefix(f"{report.source}: ")
        unpacked = [each.why_left for each in report.conversions if each.why_left]
        if not report.matched:
            return replace(variant, why="; ".join([told, *_obstacles(report)]))
        if unpacked and len(unpacked) == len(report.conversions):
            return replace(variant, why=f"no weights packed: {unpacked[0]}")
        remarks = [told, *_obstacles(report)] if any(_obstacles(report)) else []
        if unpacked:
            remarks.append(f"weights of {len(unpacked)} of {len(report.conversions)} layers not packed: {unpacked[0]}")
        return _measured(replace(variant, status="measured", remark="; ".join(remarks)), path, order)


def _obstacles(report: Report) -> Iterator[str]:
    """The first reason why a router or its experts were left, or fused in part; none where all are fused."""
    findings = [*report.findings, *(finding for site in report.sites for finding in site.findings)]
    findings += [finding for each in report.experts for finding in each.findings]
    for finding in findings:
        if finding.reason.slug != "topk-not-a-router":
            yield f"{finding.reason}: {finding.detail}"
            return


def _measured(variant: Variant, path: str | os.PathLike[str], order: Order) -> Variant:
    """The variant with what was measured of the model at `path`; `failed` where nothing was."""
    from ort_moe.files.loading import load_model
    from ort_moe.inspection.inspect import inspect
    from ort_moe.verification.sample_inputs import Shape, beyond_cache, fixed_tokens

    seen = inspect(path)
    variant = replace(variant, weight_bytes=seen.weight_bytes, expert_bytes_per_token=seen.bytes_per_token)
    model = load_model(path)
    skipped = {} if order.provider == CUDA else _too_large(model, order.tokens)
    skipped |= {n: why for n in order.tokens if (why := beyond_cache(model, Shape(1, n, order.past)))}
    of_a_run = fixed_tokens(model)
    del model
    fitting = tuple(tokens for tokens in order.tokens if tokens not in skipped)
    order = replace(order, model=os.path.abspath(path), tokens=fitting)
    timings = {tokens: Timing(tokens, why=why, why_no_graph=why) for tokens, why in skipped.items()}
    if skipped and not fitting:
        return replace(variant, status="failed", why="nothing fits into memory", timings=tuple(timings.values()))
    try:
        measured = measure_apart(order)
    except ModelError as error:
        return replace(variant, status="failed", why=str(error).replace(order.model, "it"))
    for point in measured.points:
        point = replace(point, graph_refusal=point.graph_refusal.replace(order.model, "it"))
        timings[point.tokens or 0] = _timing(point, seen, order.provider, point.tokens or of_a_run)
    variant = replace(
        variant,
        load_seconds=measured.load_seconds,
        host_bytes=measured.host_bytes,
        host_bytes_before=measured.host_bytes_before,
        device_bytes=measured.device_bytes,
        timings=tuple(timings[tokens] for tokens in sorted(timings)),
    )
    if variant.measured:
        return variant
    return replace(variant, status="failed", why=measured.points[0].refusal)


def _too_large(model: ir.Model, tokens: Sequence[int]) -> dict[int, str]:
    """Of numbers of tokens whose copies of weights would fill the memory, and so end the process, what to say."""
    from ort_moe.verification.fitting import copied_per_token

    per_token, free = copied_per_token(model), free_host_bytes()
    return {
        number: f"copies {byte_size(number * per_token)} of weights, twice over {byte_size(free)} of free memory"
        for number in tokens
        if 2 * number * per_token > free
    }


def _timing(point: Point, seen: Inspection, provider: str, tokens: int | None) -> Timing:
    """What was measured of a run of so many tokens; None: that is not known."""
    why_no_graph = "" if point.graph_ms is not None else _why_no_graph(point, seen, provider)
    times = (point.steps, point.step_ms, point.fastest_ms, point.graph_ms)
    timing = Timing(point.tokens, *times, why=point.refusal, why_no_graph=why_no_graph)
    if tokens == 1 and seen.bytes_per_token is not None and timing.best_ms:
        timing = replace(timing, expert_gbps=seen.bytes_per_token / timing.best_ms / 1e6)
    return timing


def _why_no_graph(point: Point, seen: Inspection, provider: str) -> str:
    if provider == CPU:
        return _ON_CPU
    if point.refusal:
        return "it does not run"
    return in_words(seen.blockers) or point.graph_refusal

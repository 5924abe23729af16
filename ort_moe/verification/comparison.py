"""The comparison of two models: does the optimised one compute what the original does?

First site by site: the original runs on random inputs with its routers' logits, weights and indices, and what their
experts take and return, as further outputs, and each fused node alone must make the same of the same values. Then end
to end, at several shapes, twice over for the same bits. Where two experts of some router are too close to tell apart
and the models choose differently, all that follows differs by right: such inputs are drawn again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ort_moe.errors import ModelError
from ort_moe.files.model_path import model_file
from ort_moe.graphs.node_kinds import is_contrib_moe, is_experts
from ort_moe.ops import DOMAIN
from ort_moe.running.session import ON_CPU, Provider, provider_names
from ort_moe.verification.block_check import BlockSite, check_block, contrib_tolerance, find_blocks
from ort_moe.verification.experts_check import FusedExpertsSite, check_experts, find_experts
from ort_moe.verification.fitting import copied_by_bodies, copied_per_token, fitting
from ort_moe.verification.original_experts import OriginalExperts
from ort_moe.verification.packed_block_check import check_packed_block
from ort_moe.verification.packed_reference import END_TO_END, distance, from_original, packed_since
from ort_moe.verification.result import ShapeCheck, Verification
from ort_moe.verification.router_check import RouterSite, check_site, choice, compare_routing, find_sites
from ort_moe.verification.runnable_model import RunnableModel, library_is_there
from ort_moe.verification.sample_inputs import Feeds, Shape, draw, told_apart, usual_shapes
from ort_moe.verification.signatures import check_signatures
from ort_moe.verification.site import SiteCheck, has_body
from ort_moe.verification.tolerance import Tolerance, as_rows, coarsest, relative_difference, told

if TYPE_CHECKING:
    import onnx_ir as ir

MOST_DRAWS = 8
"""Random inputs tried at a shape before it is given up for near ties."""


def verify(
    reference: str | os.PathLike[str],
    optimized: str | os.PathLike[str],
    *,
    providers: Sequence[Provider] = ON_CPU,
    shapes: Sequence[Shape] | None = None,
    seed: int = 0,
) -> Verification:
    """Compares two models on random inputs.

    Args:
        reference: The original, or a folder with one model.
        optimized: The model that shall compute the same, or such a folder.
        providers: Execution providers of the runs end to end, with TF32 off; the nodes by themselves run on the CPU.
        shapes: Sizes of the dynamic dimensions; of those that make the same inputs, the first is taken. None: one
            token, a few in two sequences, and a prompt; where the inputs hold a past, with one, too; where a cache is
            of fixed length, the few in its middle, and a token at its end, too.
        seed: Of the random inputs.

    Raises:
        ModelError: A model cannot be read or compared, or ONNX Runtime cannot load the original, or run it at any of
            the shapes.
        EnvironmentUnfitError: No ONNX Runtime is installed, or one too old, or a provider does not start.
        ValueError: The providers are no list of them.
    """
    names = provider_names(providers)
    reference, optimized = model_file(reference), model_file(optimized)
    with RunnableModel(reference, providers) as original, RunnableModel(optimized, providers) as candidate:
        check_signatures(original.model, candidate.model)
        comparison = _Comparison(original, candidate, seed)
        shapes = usual_shapes(original.model) if shapes is None else told_apart(original.model, shapes)
        by_original, by_bodies = copied_per_token(original.model), copied_by_bodies(candidate.model)
        copied = max(by_original, by_bodies)
        fewer = fitting(shapes, copied)
        site_checks, shape_checks = comparison.run(fewer)
        notes = [
            f"on {', '.join(name.removesuffix('ExecutionProvider') for name in names)}",
            comparison.how,
        ]
        if original.widened or candidate.widened:
            notes.append("bfloat16 widened to float32, which the CPU can run")
        if original.respelt or candidate.respelt:
            notes.append("contrib nodes that the CPU does not run spelled as such that it does")
        if fewer != list(shapes):
            who = "the original copies" if by_original >= by_bodies else "function bodies copy"
            notes.append(f"at fewer tokens, for {who} {copied / 2**20:.0f} MiB of weights for each")
    return Verification(
        os.fspath(reference),
        os.fspath(optimized),
        tuple(site_checks),
        tuple(shape_checks),
        comparison.tolerance.outputs,
        tuple(notes),
        "norm" if comparison.packed else "largest",
    )


class _Comparison:
    """The two models, and what one run needs of another."""

    def __init__(self, original: RunnableModel, candidate: RunnableModel, seed: int) -> None:
        self.original, self.candidate, self.seed = original, candidate, seed
        self.blocks = find_blocks(original.model, candidate.model)
        # Held against a contrib node as a whole, they are not looked at one by one.
        inside = {node for block in self.blocks if isinstance(block, BlockSite) for node in block.nodes}
        self.found = find_sites(original.model, candidate.model, inside)
        self.sites = [site for site in self.found if isinstance(site, RouterSite)]
        self.experts = find_experts(original.model, candidate.model, inside)
        self.originals = OriginalExperts(original)
        self.with_library = library_is_there()
        self.libraries = (True, False) if self.with_library else (False,)
        ours = [node for node in candidate.model.graph.all_nodes() if node.domain == DOMAIN]
        self.has_ours = bool(ours)
        self.with_bodies = all(has_body(node, candidate.model) for node in ours)
        # On the CPU, ONNX Runtime casts all half-precision inputs of a node of ours between others to float32: the
        # weights of all experts of all layers, where the bodies copy those of the choices.
        self.by_bodies = candidate.is_sparing and self.with_bodies and _has_half_experts(ours)
        self.tolerance = _tolerance(original.model, candidate.model)
        # Packed weights differ from the original's: what they do to the outputs has a limit of its own, by norm, and
        # choices behind them differ where experts are as close.
        self.packed = packed_since(original.model, candidate.model)
        if self.packed:
            outputs = max(END_TO_END[node.attributes["weight_format"].as_string()] for node in self.packed)
            self.tolerance = replace(self.tolerance, outputs=outputs, tie=max(map(from_original, self.packed)))
        self.outputs = [value.name or "" for value in original.model.graph.outputs]
        inner = [name for site in self.sites for name in site.values]
        looked_at = [each for each in (*self.experts, *self.blocks) if isinstance(each, FusedExpertsSite | BlockSite)]
        inner += [name for each in looked_at for name in each.values]
        self.fed = {value.name for value in original.model.graph.inputs}
        self.inner = [name for name in dict.fromkeys(inner) if name not in self.outputs and name not in self.fed]

    @property
    def how(self) -> str:
        """By what our nodes run."""
        if not self.has_ours:
            return "there is no node of ours in it"
        if not self.with_library:
            return "our nodes by their function bodies alone, for our library is not there"
        if not self.with_bodies:
            return "our nodes by our kernels, for not all have function bodies"
        if self.by_bodies:
            return "our nodes by our kernels each by itself, and by their function bodies end to end, to spare memory"
        return "our nodes by our kernels and by their function bodies"

    def run(self, shapes: Sequence[Shape]) -> tuple[list[SiteCheck], list[ShapeCheck]]:
        """All checks; the second list is empty where a site failed.

        Raises:
            ModelError: ONNX Runtime cannot load the original, or run it at any of the shapes.
        """
        site_checks: list[SiteCheck] = []
        done: dict[Shape, ShapeCheck] = {}
        refused: dict[Shape, str] = {}
        for attempt in range(MOST_DRAWS):
            pending = [shape for shape in shapes if shape not in done]
            if not pending:
                break
            # One model after the other, so that only one holds its weights in memory.
            drawn = {shape: self._draw(shape, attempt) for shape in pending}
            run = self.original.session([*self.outputs, *self.inner], with_library=self.with_library)
            expected: dict[Shape, dict[str, Any]] = {}
            for shape in pending:
                try:
                    results = run(drawn[shape])
                except ModelError as error:  # models have limits of their own: a longest sequence, a fixed batch
                    refused[shape] = f"the original does not run: {error}"
                    done[shape] = ShapeCheck(shape, "skipped", redraws=attempt, detail=refused[shape])
                    continue
                if _is_nowhere_finite([results[name] for name in self.outputs]):
                    detail = "the original's outputs are NaN or infinite throughout, whatever its routers do"
                    done[shape] = ShapeCheck(shape, "skipped", redraws=attempt, detail=detail)
                    continue
                expected[shape] = {**drawn[shape], **results}
            del run
            if len(refused) == len(shapes):
                tried = ", ".join(map(str, shapes))
                raise ModelError(f"nothing could be verified at {tried}: {refused[shapes[-1]]}")
            if not expected:
                continue
            if attempt == 0:
                captured = list(expected.values())
                site_checks = [
                    check_site(site, captured, self.candidate, self.libraries) if isinstance(site, RouterSite) else site
                    for site in self.found
                ]
                site_checks += [
                    self._check_experts(each, captured) if isinstance(each, FusedExpertsSite) else each
                    for each in self.experts
                ]
                site_checks += [
                    self._check_block(each, captured) if isinstance(each, BlockSite) else each for each in self.blocks
                ]
                if any(check.status == "failed" for check in site_checks):
                    return site_checks, []
            outcomes = self._end_to_end({shape: drawn[shape] for shape in expected}, expected, attempt)
            last = attempt == MOST_DRAWS - 1
            done |= {shape: outcome for shape, outcome in outcomes.items() if last or outcome.status != "skipped"}
        return site_checks, [done[shape] for shape in shapes]

    def _check_experts(self, site: FusedExpertsSite, captured: Sequence[Mapping[str, Any]]) -> SiteCheck:
        if site.is_packed:
            site = replace(site, weights=self.originals.packed_by(site.node))
        return check_experts(site, captured, self.candidate, self.libraries)

    def _check_block(self, site: BlockSite, captured: Sequence[Mapping[str, Any]]) -> SiteCheck:
        if site.packed and not all(self.originals.is_packed_alike(site.contrib, node) for node in site.packed):
            return check_packed_block(site, captured, self.originals, self.candidate, self.libraries)
        return check_block(site, captured, self.candidate, self.libraries)

    def _draw(self, shape: Shape, attempt: int) -> Feeds:
        import numpy as np

        past = [shape.past] if shape.past else []
        rng = np.random.default_rng([self.seed, attempt, shape.batch, shape.tokens, *past])
        return draw(self.original.model, shape, rng)

    def _end_to_end(
        self, drawn: Mapping[Shape, Feeds], expected: Mapping[Shape, Mapping[str, Any]], attempt: int
    ) -> dict[Shape, ShapeCheck]:
        """Runs the candidate; `skipped` marks the shapes whose draw had a near tie.

        With our kernels at every shape, and as others without our library run it, if they can, at the first.
        """
        with_library = self.with_library and not self.by_bodies
        outcomes = self._outcomes(drawn, expected, attempt, with_library)
        first = next(iter(drawn))
        if with_library and self.with_bodies and attempt == 0 and outcomes[first].status == "passed":
            bodies = self._outcomes({first: drawn[first]}, expected, attempt, False)[first]
            if bodies.status == "failed":
                outcomes[first] = replace(bodies, detail=f"by function bodies: {bodies.detail}")
        return outcomes

    def _outcomes(
        self,
        drawn: Mapping[Shape, Feeds],
        expected: Mapping[Shape, Mapping[str, Any]],
        attempt: int,
        with_library: bool,
    ) -> dict[Shape, ShapeCheck]:
        outcomes: dict[Shape, ShapeCheck] = {}
        try:
            run = self.candidate.session(with_library=with_library)
        except ModelError as error:
            return {shape: ShapeCheck(shape, "failed", redraws=attempt, detail=str(error)) for shape in drawn}
        differ: list[tuple[Shape, float, str]] = []
        for shape, feeds in drawn.items():
            try:
                got, again = run(feeds), run(feeds)
            except ModelError as error:
                outcomes[shape] = ShapeCheck(shape, "failed", redraws=attempt, detail=str(error))
                continue
            name, difference = self._largest_difference(got, expected[shape])
            if changed := next((n for n in self.outputs if _bits(got[n]) != _bits(again[n])), None):
                detail = f"output '{changed}' has other bits when the same inputs run again"
                outcomes[shape] = ShapeCheck(shape, "failed", difference, attempt, detail)
            elif difference <= self.tolerance.outputs:
                outcomes[shape] = ShapeCheck(shape, "passed", difference, attempt)
            else:
                differ.append((shape, difference, name))
        del run
        if differ:
            inner = [name for site in self.sites for name in site.own_values]
            inner = [name for name in dict.fromkeys(inner) if name not in self.outputs and name not in self.fed]
            look = self.candidate.session(inner, with_library=with_library) if inner else None
            for shape, difference, name in differ:
                got = {**expected[shape], **look(drawn[shape])} if look is not None else {}
                tied, where = self._first_difference(expected[shape], got)
                measure = "norm" if self.packed else "largest magnitude"
                detail = (
                    f"output '{name}' differs by {difference:.1e} of its {measure} "
                    f"(allowed {told(self.tolerance.outputs)}); {where}"
                )
                if tied:
                    detail = f"each of {attempt + 1} random inputs had a near tie; {where}"
                outcomes[shape] = ShapeCheck(shape, "skipped" if tied else "failed", difference, attempt, detail)
        return outcomes

    def _largest_difference(self, got: Mapping[str, Any], expected: Mapping[str, Any]) -> tuple[str, float]:
        """Name of the output that differs most, and by how much."""
        import numpy as np

        worst, largest = "", -1.0
        for name in self.outputs:
            a, b = got[name], expected[name]
            if b.dtype.kind in "iubO":  # objects are strings
                difference = 0.0 if np.array_equal(a, b) else float("inf")
            else:
                # By the smaller norm: by the original's alone, outputs of zeros would be no further off than 1.
                difference = max(distance(a, b), distance(b, a)) if self.packed else relative_difference(a, b)
            if difference > largest:
                worst, largest = name, difference
        return worst, max(largest, 0.0)

    def _first_difference(self, expected: Mapping[str, Any], got: Mapping[str, Any]) -> tuple[bool, str]:
        """Whether the first router that chooses otherwise does so at a near tie; and what to tell of it."""
        for site in self.sites:
            difference = self._routing_difference(site, expected, got)
            if difference is not None:
                return difference.status == "passed", f"the first router that differs is {site.name}: " + (
                    difference.detail or "two experts are too close to tell apart"
                )
        for block in self.blocks:
            if isinstance(block, BlockSite) and block.near_ties(expected, self.tolerance.tie).any():
                return True, f"two experts are too close to tell apart in {block.name}"
        if not self.found:
            what = "every contrib block alone agrees" if self.blocks else "there is no fused router to look at"
            return False, what
        skipped = [site for site in self.found if isinstance(site, SiteCheck)]
        if not self.sites:
            return False, f"no router could be held against the original: of '{skipped[0].node}', {skipped[0].detail}"
        if skipped:
            return False, f"{len(self.sites)} of {len(self.found)} routers could be looked at and agree"
        return False, "every router agrees, so the difference arises elsewhere"

    def _routing_difference(
        self, site: RouterSite, expected: Mapping[str, Any], got: Mapping[str, Any]
    ) -> SiteCheck | None:
        """How the routings of two runs differ; None where they do not, `passed` where at near ties alone."""
        weights, indices = map(as_rows, site.routing(expected))
        own_weights, own_indices = map(as_rows, site.own_routing(got))
        if own_indices.shape != indices.shape:
            return SiteCheck(site.name, "failed", detail="its indices have another shape than the original's")

        def choose(moved: Any) -> Any:
            shaped = moved.reshape(expected[site.logits].shape)
            return choice(site, {**expected, site.logits: shaped}, self.candidate)

        tolerance = replace(self.tolerance, weights=self.tolerance.outputs)
        check = compare_routing(
            as_rows(expected[site.logits]),
            (weights, indices),
            (own_weights, own_indices),
            tolerance,
            choose,
            same_logits=False,
        )
        return check if check.status == "failed" or check.near_ties else None


def _has_half_experts(nodes: Sequence[ir.Node]) -> bool:
    """Whether a FusedExperts has weights in half precision."""
    import onnx_ir as ir

    half = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    return any(
        value is not None
        and value.const_value is not None
        and value.dtype in half
        and len(value.const_value.shape) == 3
        for node in nodes
        if is_experts(node)
        for value in node.inputs
    )


def _is_nowhere_finite(outputs: Sequence[Any]) -> bool:
    """Whether there are floating-point numbers among the outputs, and none of them tells anything."""
    import numpy as np

    numbers = [array for array in outputs if array.dtype.kind not in "iubO" and array.size]
    return bool(numbers) and not any(np.isfinite(array.astype(np.float64)).any() for array in numbers)


def _bits(array: Any) -> Any:
    """What differs where any bit does."""
    return array.tolist() if array.dtype.kind == "O" else array.tobytes()


def _tolerance(original: ir.Model, candidate: ir.Model) -> Tolerance:
    """By the coarsest floating-point type among the original's inputs, outputs and weights, and contrib experts."""
    values = [*original.graph.inputs, *original.graph.outputs, *original.graph.initializers.values()]
    by_type = coarsest({value.dtype.name.lower() for value in values if value.dtype is not None})
    contrib = [node for model in (original, candidate) for node in model.graph.all_nodes() if is_contrib_moe(node)]
    return max(by_type, contrib_tolerance(contrib), key=lambda tolerance: tolerance.outputs)

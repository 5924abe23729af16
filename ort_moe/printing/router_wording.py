"""The arithmetic of a FusedRouter in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ort_moe.ops import AttributeValue
from ort_moe.printing.wording import counted

_SCORES = {"softmax": "softmax", "sigmoid": "sigmoid", "sqrtsoftplus": "square root of softplus"}


def phrase(attributes: Mapping[str, AttributeValue], inputs: Collection[str] = ()) -> str:
    """A router for a cell of a table, as in `sigmoid + bias, top 8, normalised, times 2.5`.

    Args:
        attributes: Of the FusedRouter, all.
        inputs: Names, as in the op table, of the inputs that it has.
    """
    score, after = attributes["score"], attributes["score_after_topk"]
    ranked = "input" if after or score == "none" else str(score).replace("_", " ")
    if "selection_bias" in inputs:
        ranked += " + bias"
    steps = [f"softcap {attributes['softcap']:g}"] if attributes["softcap"] else []
    steps += [] if ranked == "input" else [ranked]
    choice = f"top {attributes['k']}"
    if _has_groups(attributes):
        choice += f" in the best {attributes['topk_groups']} of {attributes['num_groups']} groups"
    steps.append(choice)
    steps += [str(score)] if after else []
    steps += ["normalised"] if attributes["normalize"] else []
    steps += [f"times {attributes['scale']:g}"] if attributes["scale"] != 1.0 else []
    steps += ["times a scale per expert"] if "expert_scale" in inputs else []
    return ", ".join(steps)


def sentence(attributes: Mapping[str, AttributeValue], inputs: Collection[str], experts: int | None) -> str:
    """What a FusedRouter does, step by step, for someone who compares it with a model's formula."""
    score, k = attributes["score"], attributes["k"]
    everyone = "all experts" if experts is None else counted(experts, "expert")
    steps = [f"soft cap of the logits at {attributes['softcap']:g}"] if attributes["softcap"] else []
    if score == "sparse_mixer":
        return f"sparse mixer with threshold {attributes['mixer_threshold']:g}, the best {k} of {everyone}"
    if not attributes["score_after_topk"] and score != "none":
        steps.append(_SCORES[str(score)])
    if "selection_bias" in inputs:
        steps.append("a bias per expert for the choice alone")
    if _has_groups(attributes):
        top = attributes["group_score_top"]
        of_a_group = "its largest value" if top == 1 else f"the sum of its {top} largest values"
        steps.append(
            f"the best {attributes['topk_groups']} of {attributes['num_groups']} groups (a group's score: {of_a_group})"
        )
    steps.append(f"the best {k} of {everyone}")
    if attributes["score_after_topk"]:
        steps.append(f"{_SCORES[str(score)]} of the chosen")
    if attributes["normalize"]:
        limits = [f" + {attributes['normalize_eps']:g}"] if attributes["normalize_eps"] else []
        if float(attributes["normalize_min"]) > 0.0:
            limits.append(f", at least {attributes['normalize_min']:g}")
        steps.append(f"division by their sum{''.join(limits)}")
    steps += [f"times {attributes['scale']:g}"] if attributes["scale"] != 1.0 else []
    steps += ["times a scale per expert"] if "expert_scale" in inputs else []
    return ", ".join(steps)


def _has_groups(attributes: Mapping[str, AttributeValue]) -> bool:
    return int(attributes["topk_groups"]) < int(attributes["num_groups"])

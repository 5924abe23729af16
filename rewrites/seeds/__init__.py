"""Seeds: rules that turn the choice of a router into a FusedRouter that computes exactly what was there."""

from ort_moe.rewrites.seeds.argmax import ARGMAX_RULES, MAX_RULES
from ort_moe.rewrites.seeds.group_mask import GROUP_MASK_RULES
from ort_moe.rewrites.seeds.plain_topk import PLAIN_TOPK_RULES
from ort_moe.rewrites.seeds.sort import SORT_RULES
from ort_moe.rewrites.seeds.sparse_mixer import SPARSE_MIXER_RULES

__all__ = ["ARGMAX_RULES", "GROUP_MASK_RULES", "MAX_RULES", "PLAIN_TOPK_RULES", "SORT_RULES", "SPARSE_MIXER_RULES"]

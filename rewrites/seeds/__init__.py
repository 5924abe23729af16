"""Seeds: rules that turn the TopK of a router into a FusedRouter that computes exactly what the TopK did."""

from ort_moe.rewrites.seeds.group_mask import GROUP_MASK_RULES
from ort_moe.rewrites.seeds.plain_topk import PLAIN_TOPK_RULES

__all__ = ["GROUP_MASK_RULES", "PLAIN_TOPK_RULES"]

"""Growth rules: each is an identity by which a FusedRouter absorbs what stands next to it.

A new rule goes into the file of its subject, or into a new file that is named here and placed in the engine's order.
"""

from ort_moe.rewrites.growth.casts import CAST_RULES
from ort_moe.rewrites.growth.gather import GATHER_RULES
from ort_moe.rewrites.growth.normalize import NORMALIZE_RULES
from ort_moe.rewrites.growth.per_expert import PER_EXPERT_RULES
from ort_moe.rewrites.growth.scale import SCALE_OF_SCORES_RULES, SCALE_RULES
from ort_moe.rewrites.growth.scatter import SCATTER_RULES
from ort_moe.rewrites.growth.score import SCORE_RULES
from ort_moe.rewrites.growth.score_after_topk import SCORE_AFTER_TOPK_RULES
from ort_moe.rewrites.growth.slice import SLICE_RULES
from ort_moe.rewrites.growth.softcap import SOFTCAP_RULES
from ort_moe.rewrites.growth.unread import UNREAD_RULES
from ort_moe.rewrites.growth.views import VIEW_RULES

__all__ = [
    "CAST_RULES",
    "GATHER_RULES",
    "NORMALIZE_RULES",
    "PER_EXPERT_RULES",
    "SCALE_OF_SCORES_RULES",
    "SCALE_RULES",
    "SCATTER_RULES",
    "SCORE_AFTER_TOPK_RULES",
    "SCORE_RULES",
    "SLICE_RULES",
    "SOFTCAP_RULES",
    "UNREAD_RULES",
    "VIEW_RULES",
]

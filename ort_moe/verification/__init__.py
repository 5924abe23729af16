"""`ort_moe.verify`: holds what an optimised model computes against what the original does, by running both.

`comparison` runs the two models; `router_check` and `experts_check` one fused node, `block_check` and
`packed_block_check` what stands for a contrib node, on the original's own values. `packed_reference`, `packed_weights`
and `original_experts` say what packed weights must be; the others are what these need, and `result` is what they tell.
"""

from ort_moe.verification.comparison import verify
from ort_moe.verification.result import ShapeCheck, Verification
from ort_moe.verification.site import SiteCheck

__all__ = ["ShapeCheck", "SiteCheck", "Verification", "verify"]

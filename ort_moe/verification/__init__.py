"""`ort_moe.verify`: proves that an optimised model computes what the original does, by running both.

`comparison` runs the two models, `router_check` and `experts_check` one fused node on the original's own values;
`sample_inputs`, `runnable_model` and `tolerance` are what they need for it, and `result` is what they tell.
"""

from ort_moe.verification.comparison import verify
from ort_moe.verification.result import ShapeCheck, Verification
from ort_moe.verification.site import SiteCheck

__all__ = ["ShapeCheck", "SiteCheck", "Verification", "verify"]

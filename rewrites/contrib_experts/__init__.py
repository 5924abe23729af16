"""ONNX Runtime's contrib ops of experts, com.microsoft::MoE and QMoE: read, and replaced where ours are no slower."""

from ort_moe.rewrites.contrib_experts.lift import RULE, Lifted, lift_contrib

__all__ = ["RULE", "Lifted", "lift_contrib"]

"""`ort_moe.diagnose`: whether fused models run here, with each op run once."""

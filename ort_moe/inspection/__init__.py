"""`ort_moe.inspect` and `ort_moe.explain`: what is in a model, and what would become of it."""

"""`ort_moe.optimize`, of one model or of a folder of models, and what it reports."""

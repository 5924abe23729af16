"""From a Hugging Face folder to ONNX in the form that rewrites best: what `ort_moe.export` is made of.

`checkpoint` looks at the folder, `architecture` at the model's class, both before any weight is read; `cached_step` is
what is exported, and `graph` exports it.
"""

"""What is read from disk and written to it: models, their weights, their folders, and files beside them.

`loading` reads a model, `staged_model` writes one. Everything is written beside its place and moved there when it is
whole (`staging`).
"""

"""What is asked of a model's graph beside rewriting it.

Which nodes hold routers and experts, the experts' weights behind a router, what a CUDA graph cannot capture, and which
state may stay in its buffer.
"""

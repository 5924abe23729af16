"""`ort_moe.bench`: what fusing a model gains, measured; each model in a process of its own.

`comparison` makes the models and hands each to a `child_process`, where `measurement` runs it; `result` is what they
tell, and `plot` draws it.
"""

from ort_moe.benchmarking.comparison import bench
from ort_moe.benchmarking.result import Benchmark, Timing, Variant

__all__ = ["Benchmark", "Timing", "Variant", "bench"]

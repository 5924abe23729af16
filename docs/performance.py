"""The performance page, from what benchmarks recorded, and its plot of the sweep."""

from __future__ import annotations

from docs import end_to_end, performance_experts, performance_routing, sweep
from docs.performance_tables import is_recorded, record

_HEADER = """\
# Performance

<!-- Generated from benchmarks/results/ by `make docs`; run the benchmark instead of editing. -->

Times are medians on random data, in microseconds and from a cold cache where a section does not say otherwise. On a
machine with a GPU and with PyTorch for CUDA, which `make setup` does not install,

```sh gpu
python -m benchmarks.router --only 128/8 --tokens 1 --without-ort
```

measures again; `--json` records, and without the other options everything is run. `python -m benchmarks.routing` makes
all tables but those of experts and of whole models, one after the other. Peers are measured beside ours, on the same
arrays, where a package index put them: the kernels of vLLM (`vllm`), of SGLang (`sglang-kernel`, and `sglang` for those
in Triton), TransformerEngine (`transformer-engine-cu13`), and PyTorch's ops. Those that are not there, or that were
built for another PyTorch, leave the best time of theirs that was recorded once on an H200, in graphs from a cold cache.
"""


def performance() -> str:
    """The recorded benchmark results, in Markdown."""
    parts = [
        _HEADER,
        *performance_routing.sections(),
        *performance_experts.on_gpu(),
        *(end_to_end.section(record("end_to_end")) if is_recorded("end_to_end") else ()),
        *performance_experts.on_cpu(),
    ]
    return "\n".join(parts)


def sweep_plot() -> str:
    """The plot of the recorded sweep, as SVG."""
    return sweep.plot(record("expert_sweep")["rows"])

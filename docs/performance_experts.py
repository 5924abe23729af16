"""The sections of docs/performance.md on layers of experts: the decode chain, models of contrib nodes, the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from docs import sweep
from docs.markdown_table import markdown_table
from docs.performance_bounds import DECODE_CHAIN_BOUNDS
from docs.performance_tables import machine, record, recorded

_EXPERTS_HEADER = """\
## The decode chain

FusedRouter and FusedExperts against ONNX Runtime's contrib ops, MoE for dense weights and QMoE for those of the other
formats that it takes, on the same layers, in the same run unless said: `python -m benchmarks.experts` for stacks, with
`--sweep` for a layer at every number of tokens, and with `--cycle` for decode steps:

```sh gpu
python -m benchmarks.experts --cycle --only 128/8 --tokens 1 --layers 4
```

The names give the weights, with the size of their blocks where it varies, the rows' type, and E/K/H/I: experts, chosen,
hidden and inner size. A run takes 1.4 GB on host and device for the experts of nvfp4 512/10/2560/640, which all layers
share, and 1.7 GB more on the device for each QMoE node, which keeps a repacked copy of its own: 15 GB for 8 layers,
83 GB for a cycle of 48. All answers are held against each other, and ours against float64.
"""

_STACK_HEADER = """\
### Layers

us per layer in a stack of 8 with given logits, which send each layer and each replay to other experts, beyond the L2.
FC1 and FC2, with finalize in it, are the kernels alone without overlap; "layer" is a CUDA graph of our launchers, of
router and experts; "in ORT" and "contrib" are sessions with CUDA graphs, by host time, so the two differ by some per
cent either way, at 15 us by 15; and from one H200 and run to another times do by up to 12 %: 1 token of dense
512/10/2560/640 took 31.6 to 32.2, in the sweep below 35.2, of dense 128/8/2048/768 25.8 to 28.2. The last column is the
bytes of the experts chosen, each once, by the layer's time, as a share of the bandwidth of a large copy.
"""

_KERNELS_HEADER = """\
The contrib op's kernels in the same run, us per layer by the profiler:
"""

_CROSSINGS_HEADER = """\
### Where the kernels for few tokens end

`python -m benchmarks.expert_crossings` times both ways, which `ORT_MOE_FEW_CHOICES` [forces](environment.md), beside
what the library takes by itself, for layers from 8/2/4096/1792 to 512/10/2560/640 and 256/8/7168/2048:

```sh gpu
python -m benchmarks.expert_crossings --only "nvfp4 bfloat16 8/2/4096/1792" --tokens 1 12
```

By the rule above. The figures are of an earlier build: the kernels for few tokens of mxfp4, int4, int8 and fp8 take
less since (in the sweep below up to 8 %, by Zipf's law 12). Points at which the kernels for few tokens do not fit, so
that there is but one way, are left out:
"""

_CYCLE_HEADER = """\
### Decode cycles

ms for layers one after another, `x = x + experts(x, x . gate)`, with a MatMul as router's product in each, in one
session with a CUDA graph, by host time: some 5 us more for each layer than a layer of the stacks takes. The sum is
FusedExperts' residual, and an Add behind the contrib op.
"""

_UPGRADE_HEADER = """\
### Models of contrib ops

A file with two layers as MoE or QMoE nodes, and the file that `ort-moe optimize` makes of it, each in a session with a
CUDA graph on the same rows: us per layer by host time, and the norm of the difference between their answers by that of
the answer. `python -m benchmarks.contrib_upgrade` measures again. The table is of an earlier build: packed weights take
less with many tokens since ([every number of tokens](#every-number-of-tokens)).
"""

_CPU_HEADER = """\
## Experts on the CPU

`python -m benchmarks.experts_cpu`; the weights, the rows' type, and E/K/H/I of a router and its experts in one session.
ms: the median over draws of rows of the fastest of five runs, ours and the peer's in turn, on a machine that ran other
programs too. "Exported graph" is the layer as PyTorch's exporter writes it, with `batched_mm` experts: it copies the
chosen experts' weights for each choice, and was left out where the copies take over 4 GB. MoE and QMoE are ONNX
Runtime's contrib ops.
"""


def on_gpu() -> Sequence[str]:
    """The parts of those measured on a GPU, in Markdown."""
    layers = ("layer", "tokens", "FC1", "FC2", "layer", "in ORT", "contrib", "in ORT / contrib", "% of copy")
    layer_times = ("fc1_us", "fc2_us", "layer_us", "layer_ort_us", "contrib_us", "ratio_to_contrib")
    cycles = ("layer", "tokens", "layers", "ours", "contrib", "ours / contrib")
    upgrades = ("model", "tokens", "contrib", "optimised", "optimised / contrib", "difference")
    return [
        _EXPERTS_HEADER,
        _STACK_HEADER,
        recorded("experts", layers, partial(_layer_cells, layer_times)),
        *contrib_kernels(record("experts")["rows"]),
        DECODE_CHAIN_BOUNDS,
        *_crossings(),
        *_sweep_section(),
        _CYCLE_HEADER,
        recorded("expert_cycles", cycles, _cycle_cells),
        _UPGRADE_HEADER,
        recorded("contrib_upgrade", upgrades, _upgrade_cells),
    ]


def contrib_kernels(rows: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """The table of the contrib op's kernels, if any of the rows has them."""
    profiled = [row for row in rows if "contrib_kernels_us" in row]
    if profiled:
        yield _KERNELS_HEADER
        yield markdown_table(("layer", "tokens", "kernels"), map(_kernel_cells, profiled))


def on_cpu() -> Iterable[str]:
    """The parts of the section on the CPU, in Markdown."""
    document = record("experts_cpu")
    on = document["environment"]
    yield _CPU_HEADER
    yield f"{on['cpu']} ({on['vectors']}), threads: {on['threads']}, ONNX Runtime {on['onnxruntime']}, {on['date']}.\n"
    yield markdown_table(("layer", "tokens", "ours", "peer", "", "ours / peer"), map(_cpu_cells, document["rows"]))


def _cpu_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    peer, ratio = ("" if row[name] is None else f"{row[name]:.2f}" for name in ("peer_ms", "ratio_to_peer"))
    return row["shape"], str(row["tokens"]), f"{row['ours_ms']:.2f}", peer, row["peer"], ratio


def _crossings() -> Iterable[str]:
    yield _CROSSINGS_HEADER
    yield "".join(f"- {sentence}.\n" for sentence in record("expert_crossings")["losses"])


def _sweep_section() -> Iterable[str]:
    document = record("expert_sweep")
    yield sweep.HEADER
    yield machine(document)
    for shape, by_tokens in sweep.by_shape(document["rows"]).items():
        yield f"#### {shape}\n"
        yield markdown_table(*sweep.table(by_tokens))
    yield sweep.findings(document["slower_than_more_tokens"])


def _layer_cells(times: tuple[str, ...], row: Mapping[str, Any]) -> tuple[str, ...]:
    us = (f"{row[name]:.2f}" if name in row else "" for name in times)
    return row["shape"], str(row["tokens"]), *us, f"{row['percent_of_copy']:.1f}"


def _kernel_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    times = (f"{name} {us:.2f}" for name, us in row["contrib_kernels_us"].items())
    return row["shape"], str(row["tokens"]), ", ".join(times)


def _cycle_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    ms = (f"{row[name]:.3f}" for name in ("cycle_ms", "contrib_ms"))
    return row["shape"], str(row["tokens"]), str(row["layers"]), *ms, f"{row['ratio_to_contrib']:.2f}"


def _upgrade_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    us = (f"{row[name]:.2f}" for name in ("contrib_us", "upgraded_us", "ratio_to_contrib"))
    return row["shape"], str(row["tokens"]), *us, f"{row['difference_from_contrib']:.1e}"

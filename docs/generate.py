"""Writes the pages that are derived from tables and recorded results: `python docs/generate.py` renews them all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from docs import end_to_end, sweep
from docs.code_examples import EXAMPLES
from docs.performance_bounds import DECODE_CHAIN_BOUNDS
from ort_moe.json_schemas import SCHEMAS
from ort_moe.ops import DOMAIN, OPS, VERSION, Attribute, Op, Tensor
from ort_moe.reasons import REASONS, Reason

_HEADER = f"""\
# Ops

<!-- Generated from ort_moe/ops/table.py by `make docs`; edit the table instead. -->

Every op lives in the domain `{DOMAIN}`, version {VERSION}, and has a kernel for the CPU. On a node every attribute must
be written out, because ONNX Runtime reads a misspelt optional attribute as absent; the last column is the value that
changes nothing.
"""

_CODES_HEADER = """\
# Reason codes

<!-- Generated from ort_moe/reasons.py and docs/code_examples.py by `make docs`; edit them instead. -->

`ort-moe explain MODEL` and the report of `ort-moe optimize` name one of these wherever a router was left alone or only
partly fused, or its experts were left. A code never changes its meaning. Each comes with a small model that produces
it, in ONNX's text form; what is declared in it without a number is a weight.
"""


_PERFORMANCE_HEADER = """\
# Performance

<!-- Generated from benchmarks/results/ by `make docs`; run the benchmark instead of editing. -->

All times are medians in microseconds on random data, from a cold cache. On a machine with a GPU and
with PyTorch for CUDA, which `make setup` does not install,

```sh gpu
python -m benchmarks.router --only 128/8 --tokens 1 --without-ort
```

measures again; `--json` records, and without the other options everything is run. `python -m benchmarks.routing` makes
all tables of routers, of their training and of GatherFinalize, one after the other. Peers are measured beside ours, on
the same arrays, where a package index put them: the kernels of vLLM (`vllm`), of SGLang (`sglang-kernel`, and `sglang`
for those in Triton), TransformerEngine (`transformer-engine-cu13`), and PyTorch's ops. Those that are not there, or
that were built for another PyTorch, leave the best time of theirs that was recorded once on an H200, in graphs from a
cold cache.

## FusedRouter

E/K and the logits' type; "ours" is the launcher in a CUDA graph, "moving" a kernel that reads and writes as many bytes
and selects nothing, "ours in ORT" and "unfused ORT" are sessions with CUDA graphs that hold many independent routers,
as one node each and as standard nodes. "Peer" is the fastest of vLLM, SGLang's CUDA kernel, SGLang's Triton kernel with
PDL and PyTorch. The last column is what the kernel reads and writes, as a share of the bandwidth of a large copy in the
same run.
"""

_ROUTER_BOUNDS = """\
What bounds 8192 tokens is instructions, then the latency of one wave of warps: 128/8 moves its bytes in 2.4 us, and
takes 0.45 us less where logits are brought into the L2 ahead of the wait for the kernel before, which a model's, just
written there, need not. Lists of keys that every lane merges whole took 4.2 us; merged where they lie, of a lane's four
best, 3.4. Sigmoids are estimated but for the few that may be chosen: 8.1 us beside 10.9 for 8 of 256 in groups. Other
designs, in us at 8192 tokens: two rows to a warp, each half of which finishes one, 6.6 beside 7.5 for 8 of 256 sigmoids
and 9.2 beside 10.7 for 8 of 384, but 9.9 beside 8.1 in groups, for there is one wave, and it waits for the few rows
that have many candidates; 512/10 of fp32 logits by their floats in place of keys, with the next row's loads ahead, 9.3
beside 10.2, but 25 where rows are sorted or all equal; at 1024 tokens two rows to a warp take 1.5 to 2 times as long.
"""

_MAPS_HEADER = """\
## FusedRouter with routing maps

`python -m benchmarks.router --maps`; the peer is the fastest router and, behind it, the fastest builder of maps, whose
maps pad each expert's rows to a multiple of 64.
Up to 1024 choices the maps come from the router's own launch, more take launches of their own
([switches](environment.md)).
"""

_MAPS_BOUNDS = """\
What the maps add to a router of one token and 512/10 is the barrier at which the warps that build them wait for the
choices (20 of the 30 cycles between two of a warp's instructions, by ncu), a sum over a warp, and the stores. Other
designs, in us at 1 token, beside 2.25: masks of tokens by expert, and a scan of their bits, which is how more tokens
have it, 2.46; that, rehearsed ahead so that its instructions are there by then, 2.51; the set of experts written by
five warps in turn in place of a warp for each of its words, 2.69 (and, of 4 tokens, 3.47 beside 2.51).
"""

_SHARED_GATE_HEADER = """\
## SharedGateRouter

`python -m benchmarks.shared_gate`; E/K/H, the number S of shared experts, and the type. "torch": the same columns by
PyTorch's kernels (top-k and softmax into a strided view, a product in half precision, sigmoid into a strided view).
"Apart": FusedRouter, a product and sigmoid, each with a tensor of its own, and "sliced": SharedGateRouter and three
kernels that bring its columns into such tensors.
"With the gate": the product that makes the logits, by PyTorch, and one SharedGateRouter, beside "merged": one product
for the logits and the shared gates, its columns copied apart, FusedRouter, and sigmoid into a strided view. "Moving":
a kernel that reads and writes as many bytes. "Published" are times of another implementation on an MI355X, which was
not run here.

`ort-moe optimize --rules +shared-gate` writes this op where a sigmoid gates the shared expert, as in Qwen2-MoE and
Qwen3-Next; its columns are sliced apart there, for FusedExperts takes the chosen experts alone. "Sliced" beside "apart"
is about what that gains: up to 2.7 us a layer with up to 256 tokens, little with one to four, nothing with thousands,
and less where a cast to half precision follows. So the rewriter leaves it unless it is asked for.
"""

_GATHER_FINALIZE_HEADER = """\
## GatherFinalize

`python -m benchmarks.gather_finalize`; E/K/H and the rows' type. "Pair": a gather of the rows into permuted order by
PyTorch, given their places, and FinalizeRouting. "Moving": a kernel that reads and writes as many bytes. The peer is
the faster of vLLM's finalize and PyTorch's embedding_bag, which are given each choice's row, and of the 10 to 16 us
that are published for a kernel such as ours with up to 64 tokens on a B200.
"""

_FINALIZE_HEADER = """\
## FinalizeRouting

`python -m benchmarks.finalize`; H/K and the rows' type. "Settled": behind a kernel that ran on the same routing data,
which may then be read ahead. The peer is the best of vLLM and SGLang as recorded once on an H200; it was not run again.
"""

_PERMUTE_HEADER = """\
## PermuteTokens

`python -m benchmarks.permute`; E/K/H and the rows' type, rows and maps together. The peer is vLLM as recorded once on
an H200; it was not run again. Nearly all bytes are writes, of which this GPU takes 3.3 TB/s in a plain fill.
"""

_TRAINING_HEADER = """\
## RouterProbs, RouterScores and AuxLoss

`python -m benchmarks.training_router`; E/K, the type of logits, probs and gradients, and the score; maps have a byte an
expert. "Moving" is a kernel that reads and writes the same arrays and computes nothing of use, timed beside ours. The
gradient of RouterProbs reads of logits and gradients only what the map marks, unless the softmax is over all experts;
what moves the same reads all. The peer is the faster of TransformerEngine and PyTorch's ops. The last rows are logits
that are ascending, all equal, multiples of a half, and NaN in every other row, and routers of few experts.
"""

_EXPERTS_HEADER = """\
## The decode chain

FusedRouter and FusedExperts against ONNX Runtime's contrib ops, MoE for dense weights and QMoE for those of the other
formats that it takes, on the same layers in the same run: `python -m benchmarks.experts` for stacks of layers, with
`--sweep` for a layer at every number of tokens, and with `--cycle` for decode steps:

```sh gpu
python -m benchmarks.experts --cycle --only 128/8 --tokens 1 --layers 4
```

The names give the weights, with the size of their blocks where it varies, the rows' type, and E/K/H/I: experts, chosen,
hidden and inner size. A run takes 1.4 GB on host and device for the experts of nvfp4 512/10/2560/640, which all layers
share, and 1.7 GB more on the device for each QMoE node, which keeps a repacked copy of its own: 14 GB for 8 layers,
83 GB for a cycle of 48. All answers are held against each other, and ours against float64.
"""

_STACK_HEADER = """\
### Layers

us per layer in a stack of 8 with given logits, which send each layer and each replay to other experts, beyond the L2.
FC1 and FC2, with finalize in it, are the kernels alone without overlap; "layer" is a CUDA graph of our launchers, of
router and experts; "in ORT" and "contrib" are sessions with CUDA graphs, by host time. The last column is the bytes of
the experts chosen, each once, by the layer's time, as a share of the bandwidth of a large copy. The rows of 128/8 and
of dense weights were measured on the day before, on the same kind of machine.
"""

_CYCLE_HEADER = """\
### Decode cycles

ms for layers one after another, `x = x + experts(x, x . gate)`, with a MatMul as router's product in each, in one
session with a CUDA graph, by host time. The sum is FusedExperts' residual, and an Add behind the contrib op. The rows
of 128/8 were measured on the day before, on the same kind of machine.
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

_RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


_JSON_HEADER = """\
# JSON documents

<!-- Generated from the modules in ort_moe/json_schemas/ by `make docs`; edit them instead. -->

What `--json` prints on stdout and `--report` writes has a JSON Schema (draft 2020-12) in the package, in the folder
`ort_moe/json_schemas/`. The schemas are closed: every key is always there, and there are no others. Any change of a
document's form raises the number in its `schema`.

```sh
ort-moe optimize models/fixtures/mixtral_block_dynamo_fp32.onnx -o optimized.onnx --report report.json
ort-moe explain models/fixtures/mixtral_block_dynamo_fp32.onnx --json > explain.json
```

```python
import importlib.resources
import json

schemas = importlib.resources.files("ort_moe.json_schemas")
schema = json.loads((schemas / "report.json").read_text())
report = json.loads(open("report.json").read())
assert report["schema"] == schema["properties"]["schema"]["const"]
for site in report["sites"]:
    print(site["node"], site["status"], [finding["code"] for finding in site["findings"]])
```

In the tables, `a[].b` is the key `b` of each member of the list `a`, and `a.*.b` of each value of the object `a`.
"""


def json_documents() -> str:
    """The page of JSON documents, in Markdown."""
    shared: dict[str, Mapping[str, Any]] = {}
    parts = [_JSON_HEADER]
    for name, schema in SCHEMAS.items():
        parts.append(f"## {name}.json\n\n{schema['description']}\n\n{_keys_table(schema)}")
        shared.update(schema.get("$defs", {}))
    for name, schema in shared.items():
        parts.append(f"## {name}\n\n{schema['description']}\n\n{_keys_table(schema)}")
    return "\n".join(parts)


def _keys_table(schema: Mapping[str, Any]) -> str:
    return _table(("key", "type", ""), _key_rows(schema, ""))


def _key_rows(schema: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, ...]]:
    for key, value in schema["properties"].items():
        path, nullable = f"{prefix}{key}", ""
        if "anyOf" in value and value["anyOf"][-1] == {"type": "null"}:
            value, nullable = value["anyOf"][0], " or null"
        yield f"`{path}`", _type_of(value) + nullable, value["description"]
        if value.get("type") == "array":
            path, value = f"{path}[]", value["items"]
        if isinstance(value.get("additionalProperties"), dict):
            path, value = f"{path}.*", value["additionalProperties"]
        if "properties" in value:
            yield from _key_rows(value, f"{path}.")


def _type_of(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#{name})"
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{choice}`" for choice in schema["enum"])
    if "anyOf" in schema:
        return " or ".join(_type_of(each) for each in schema["anyOf"])
    if schema["type"] == "array":
        return f"list of {_type_of(schema['items'])}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type_of(schema['additionalProperties'])}"
    return str(schema["type"])


def performance() -> str:
    """The recorded benchmark results, in Markdown."""
    router = ("router", "tokens", "ours", "moving", "ours in ORT", "unfused ORT", "peer", "", "% of copy")
    router_times = ("ours_us", "moving_us", "ours_ort_us", "unfused_ort_us", "peer_us")
    finalize = ("rows", "tokens", "ours", "settled", "peer", "", "% of copy")
    permute = ("rows", "tokens", "ours", "peer", "", "% of copy")
    gather = ("rows", "tokens", "ours", "pair", "moving", "peer", "", "% of copy")
    shared_gate = (
        "router",
        "tokens",
        "ours",
        "torch",
        "apart",
        "sliced",
        "with the gate",
        "merged",
        "moving",
        "published",
        "% of copy",
    )
    shared_gate_times = (
        "ours_us",
        "torch_us",
        "apart_us",
        "sliced_us",
        "with_gate_us",
        "merged_us",
        "moving_us",
        "peer_us",
    )
    training = ("call", "tokens", "ours", "moving", "peer", "", "% of copy")
    layers = ("layer", "tokens", "FC1", "FC2", "layer", "in ORT", "contrib", "in ORT / contrib", "% of copy")
    layer_times = ("fc1_us", "fc2_us", "layer_us", "layer_ort_us", "contrib_us", "ratio_to_contrib")
    cycles = ("layer", "tokens", "layers", "ours", "contrib", "ours / contrib")
    upgrades = ("model", "tokens", "contrib", "optimised", "optimised / contrib", "difference")
    parts = [
        _PERFORMANCE_HEADER,
        _recorded("router", router, partial(_beside_peer, router_times)),
        _ROUTER_BOUNDS,
        _MAPS_HEADER,
        _recorded("router_maps", router, partial(_beside_peer, router_times)),
        _MAPS_BOUNDS,
        _SHARED_GATE_HEADER,
        _recorded("shared_gate", shared_gate, partial(_timed_cells, shared_gate_times)),
        _FINALIZE_HEADER,
        _recorded("finalize", finalize, partial(_beside_peer, ("ours_us", "settled_us", "peer_us"))),
        _GATHER_FINALIZE_HEADER,
        _recorded("gather_finalize", gather, partial(_beside_peer, ("ours_us", "pair_us", "moving_us", "peer_us"))),
        _PERMUTE_HEADER,
        _recorded("permute", permute, partial(_beside_peer, ("ours_us", "peer_us"))),
        _TRAINING_HEADER,
        _recorded("training_router", training, partial(_beside_peer, ("ours_us", "moving_us", "peer_us"))),
        _EXPERTS_HEADER,
        _STACK_HEADER,
        _recorded("experts", layers, partial(_layer_cells, layer_times)),
        DECODE_CHAIN_BOUNDS,
        *_sweep_section(),
        _CYCLE_HEADER,
        _recorded("expert_cycles", cycles, _cycle_cells),
        _UPGRADE_HEADER,
        _recorded("contrib_upgrade", upgrades, _upgrade_cells),
        *_end_to_end_section(),
        *_cpu_section(),
    ]
    return "\n".join(parts)


def _end_to_end_section() -> Iterable[str]:
    """None until the run on a GPU is recorded."""
    return end_to_end.section(_record("end_to_end"), _table) if (_RESULTS / "end_to_end.json").exists() else ()


def _cpu_section() -> Iterable[str]:
    record = _record("experts_cpu")
    on = record["environment"]
    yield _CPU_HEADER
    yield f"{on['cpu']} ({on['vectors']}), threads: {on['threads']}, ONNX Runtime {on['onnxruntime']}, {on['date']}.\n"
    yield _table(("layer", "tokens", "ours", "peer", "", "ours / peer"), map(_cpu_cells, record["rows"]))


def _cpu_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    peer, ratio = ("" if row[name] is None else f"{row[name]:.2f}" for name in ("peer_ms", "ratio_to_peer"))
    return row["shape"], str(row["tokens"]), f"{row['ours_ms']:.2f}", peer, row["peer"], ratio


def _sweep_section() -> Iterable[str]:
    record = _record("expert_sweep")
    yield sweep.HEADER
    yield _machine(record)
    for shape, by_tokens in sweep.by_shape(record["rows"]).items():
        yield f"#### {shape}\n"
        yield _table(*sweep.table(by_tokens))
    yield sweep.findings(record["slower_than_more_tokens"])


def sweep_plot() -> str:
    """The plot of the recorded sweep, as SVG."""
    return sweep.plot(_record("expert_sweep")["rows"])


def _record(name: str) -> Mapping[str, Any]:
    record: Mapping[str, Any] = json.loads((_RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def _machine(record: Mapping[str, Any]) -> str:
    on = record["environment"]
    runtime = f" ONNX Runtime {on['onnxruntime']}," if "onnxruntime" in on else ""
    kept = f" The columns of ONNX Runtime are kept from another run: {on['in_ort']}." if "in_ort" in on else ""
    return (
        f"{on['gpu']}, driver {on['driver']}, CUDA {on['cuda']},{runtime} SM clock {on['sm_mhz']} MHz, copy bandwidth"
        f" {on['copy_gbps']:.0f} GB/s, {on['date']}.{kept}\n"
    )


def _recorded(name: str, head: tuple[str, ...], cells: Callable[[Mapping[str, Any]], tuple[str, ...]]) -> str:
    """What one benchmark recorded: its machine, the cells of each row, and which peers were wrong."""
    record = _record(name)
    wrong = [f"{sentence}.\n" for sentence in record.get("wrong_peers", ())]
    return "\n".join([_machine(record), _table(head, map(cells, record["rows"])), *wrong])


def _beside_peer(times: tuple[str, ...], row: Mapping[str, Any]) -> tuple[str, ...]:
    *cells, percent = _timed_cells(times, row)
    peer = f"{row['peer']}, {row.get('peer_is', 'recorded')}" if row["peer"] else ""
    return *cells, peer, percent


def _timed_cells(times: tuple[str, ...], row: Mapping[str, Any]) -> tuple[str, ...]:
    us = ("" if row.get(name) is None else f"{row[name]:.2f}" for name in times)
    return row["shape"], str(row["tokens"]), *us, f"{row['percent_of_copy']:.1f}"


def _layer_cells(times: tuple[str, ...], row: Mapping[str, Any]) -> tuple[str, ...]:
    us = (f"{row[name]:.2f}" if name in row else "" for name in times)
    return row["shape"], str(row["tokens"]), *us, f"{row['percent_of_copy']:.1f}"


def _cycle_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    ms = (f"{row[name]:.3f}" for name in ("cycle_ms", "contrib_ms"))
    return row["shape"], str(row["tokens"]), str(row["layers"]), *ms, f"{row['ratio_to_contrib']:.2f}"


def _upgrade_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    us = (f"{row[name]:.2f}" for name in ("contrib_us", "upgraded_us", "ratio_to_contrib"))
    return row["shape"], str(row["tokens"]), *us, f"{row['difference_from_contrib']:.1e}"


def reason_codes() -> str:
    """The page of reason codes, in Markdown."""
    return "\n".join([_CODES_HEADER, *(_reason_section(reason) for reason in REASONS.values())])


def _reason_section(reason: Reason) -> str:
    example = EXAMPLES[reason.slug]
    return (
        f"## {reason}\n\n{reason.sentence}\n\n**What to do:** {reason.remedy}\n\n"
        f"An example. {example.about}\n\n```text\n{example.text}\n```\n"
    )


def op_reference() -> str:
    """The op reference, in Markdown."""
    return "\n".join([_HEADER, *(op_section(op) for op in OPS.values())])


def op_section(op: Op) -> str:
    """The section of one op, in Markdown."""
    parts = [
        f"## {op.name}\n",
        f"{op.doc}\n",
        "### Inputs\n",
        _table(("input", "type", "shape", ""), map(_tensor_row, op.inputs)),
        "### Outputs\n",
        _table(("output", "type", "shape", ""), map(_tensor_row, op.outputs)),
    ]
    if op.attributes:
        rows = map(_attribute_row, op.attributes)
        parts += ["### Attributes\n", _table(("attribute", "kind", "", "neutral"), rows)]
    return "\n".join(parts)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _tensor_row(tensor: Tensor) -> tuple[str, ...]:
    doc = f"Optional. {tensor.doc}" if tensor.optional else tensor.doc
    return f"`{tensor.name}`", ", ".join(tensor.types), f"`{tensor.shape}`", doc


def _attribute_row(attribute: Attribute) -> tuple[str, ...]:
    doc = attribute.doc
    if attribute.choices:
        doc += f" One of {', '.join(f'`{choice}`' for choice in attribute.choices)}."
    if attribute.only_with:
        doc += " Only with `{} = {}`.".format(*attribute.only_with)
    neutral = "to be chosen" if attribute.neutral is None else f"`{attribute.neutral}`"
    return f"`{attribute.name}`", attribute.kind, doc, neutral


def _json(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, indent=2) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "ops.md": op_reference,
    "codes.md": reason_codes,
    "performance.md": performance,
    "performance_sweep.svg": sweep_plot,
    "json.md": json_documents,
    **{f"../ort_moe/json_schemas/{name}.json": partial(_json, schema) for name, schema in SCHEMAS.items()},
}
"""Each generated file, from this folder, and what writes it."""

if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path(__file__).parent / name).write_text(page(), encoding="utf-8")

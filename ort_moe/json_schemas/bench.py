"""What `ort-moe bench` prints."""

from __future__ import annotations

from ort_moe.benchmarking.result import SCHEMA
from ort_moe.json_schemas.form import array, count, document, number, one_of, or_null, record, reference, text

MS = "Milliseconds"

TIMING = record(
    "Runs of one model at one number of tokens.",
    {
        "tokens": or_null(count("Of one sequence."), "the model's inputs have fixed lengths"),
        "steps": count(
            "Runs that were timed, each with other inputs than the one before but for a cache, which goes on."
        ),
        "step_ms": or_null(
            number(f"{MS} of a run with what it copies of its state, the median of the steps."), "it does not run"
        ),
        "fastest_ms": or_null(number(f"{MS} of the fastest."), "it does not run"),
        "graph_ms": or_null(number(f"{MS} of a replay of its CUDA graph, the median."), "there is no graph"),
        "why": text("Why it does not run; empty where it does."),
        "why_no_graph": text("Why there is no CUDA graph; empty where there is."),
        "expert_gbps": or_null(
            number("Bytes of experts' weights read by one token, in 10^9 a second of the shorter median."),
            "not known, or more than one token",
        ),
        "times_faster": or_null(
            number("The shorter median of the model as given, by this one's."), "it is that one, or one does not run"
        ),
    },
)

VARIANT = record(
    "One of the models.",
    {
        "name": text("`as given`, `contrib`, or `ours`, with a format where weights were packed on the way."),
        "model": or_null(text("Its path."), "made for the measurement"),
        "status": one_of(
            "`failed`: it does not load or run; `impossible`: there is no such model.",
            *("measured", "failed", "impossible"),
        ),
        "why": text("Why it was not measured; empty where it was."),
        "remark": text("What else one should know; mostly empty."),
        "weight_bytes": or_null(count("Bytes of all weights."), "there is no such model"),
        "expert_bytes_per_token": or_null(count("Bytes of experts' weights that one token reads."), "not known"),
        "load_seconds": or_null(number("Creation of the session."), "not measured"),
        "host_bytes": or_null(count("Most memory of the process, with Python and mapped files."), "not measured"),
        "host_bytes_before": or_null(count("The same before the session was created."), "not measured"),
        "device_bytes": or_null(
            count("What more of the GPU's memory is in use behind the runs than before the session."),
            "not measured, or on the CPU",
        ),
        "timings": array("At each number of tokens.", reference("timing", "The runs.")),
    },
)

BENCH = document(
    "bench",
    SCHEMA,
    "What `ort-moe bench IN --json` prints.",
    {
        "source": text("Path of the model as given."),
        "provider": text("Name of the execution provider."),
        "device": text("What it ran on."),
        "onnxruntime": text("Version of ONNX Runtime."),
        "steps": count("Runs asked for at each number of tokens."),
        "past": count("Tokens that went before, where the model's inputs hold a past."),
        "variants": array("The model as given first.", reference("variant", "A model.")),
    },
    variant=VARIANT,
    timing=TIMING,
)

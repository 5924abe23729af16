"""Tiny models, exported: the text that they write is PyTorch's, before and after `optimize`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import ort_moe
from ort_moe.errors import ModelError, OutputError, VerificationError
from ort_moe.exporting.export import DECODE, PREFILL, WEIGHTS, Export, export

pytestmark = pytest.mark.export

# Routers of each kind, attention of each kind: with groups of heads, latent, with a window in one layer and sinks.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {"num_attention_heads": 4},
    "deepseek_v3": {},
    "glm4_moe": {},
    "gpt_oss": {"num_attention_heads": 4, "sliding_window": 8},
}
BATCH, LENGTH = 2, 32
PROMPTS = [[3, 5, 7, 11, 13], [4, 6, 8]]
NEW_TOKENS = 20


@dataclass(frozen=True)
class Exported:
    """A checkpoint, the text that PyTorch writes with it, and its export."""

    checkpoint: Path
    text: list[list[int]]
    export: Export


def checkpoint(name: str, path: Path, **changes: Any) -> None:
    from models.checkpoint import write_checkpoint

    write_checkpoint(name, path, **changes)


def pytorch_text(folder: Path) -> list[list[int]]:
    """What PyTorch's own loop writes greedily after each prompt."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    text = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        written = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        text.append(written[0, len(prompt) :].tolist())
    return text


@pytest.fixture(scope="module", params=ARCHITECTURES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint(request.param, folder / "model", **ARCHITECTURES[request.param])
    (folder / "model" / "tokenizer.json").write_text("{}")
    done = export(folder / "model", folder / "out", batch=BATCH, max_length=LENGTH)
    return Exported(folder / "model", pytorch_text(folder / "model"), done)


def prompts() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids and positions of the prompts, padded on the right, and their lengths."""
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    ids = np.zeros((BATCH, lengths.max()), np.int64)
    for row, prompt in zip(ids, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    return ids, np.tile(np.arange(ids.shape[1]), (BATCH, 1)), lengths


class Loop:
    """Both graphs over one cache: past and present share their buffers."""

    def __init__(self, prefill: Path, decode: Path) -> None:
        self.sessions = [ort_moe.session(path, providers=["CPUExecutionProvider"]) for path in (prefill, decode)]
        self.cache = {
            value.name: ort.OrtValue.ortvalue_from_numpy(np.zeros(value.shape, np.float32))
            for value in self.sessions[1].get_inputs()
            if value.name.startswith("past_key_values.")
        }

    def run(self, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Logits of tokens."""
        session = self.sessions[ids.shape[1] == 1]
        binding = session.io_binding()
        binding.bind_cpu_input("input_ids", ids)
        binding.bind_cpu_input("position_ids", positions)
        binding.bind_output("logits")
        for name, value in self.cache.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output(name.replace("past_key_values", "present"), value)
        session.run_with_iobinding(binding)
        return binding.get_outputs()[0].numpy()

    def write(self, *, chunk: int | None = None, repeat: int = 1) -> list[list[int]]:
        """Greedy text after the prompts, which are read in chunks; each step is run `repeat` times."""
        ids, positions, lengths = prompts()
        step = chunk or ids.shape[1]
        parts = [slice(start, start + step) for start in range(0, ids.shape[1], step)]
        logits = np.concatenate([self.run(ids[:, part].copy(), positions[:, part].copy()) for part in parts], axis=1)
        last = logits[np.arange(BATCH), lengths - 1]
        text = []
        for i in range(NEW_TOKENS):
            text.append(last.argmax(-1))
            for _ in range(repeat):
                last = self.run(text[-1][:, None], (lengths + i)[:, None])[:, 0]
        return np.stack(text, axis=1).tolist()


def test_text_is_pytorchs(exported: Exported) -> None:
    assert Loop(exported.export.prefill, exported.export.decode).write() == exported.text
    assert Loop(exported.export.prefill, exported.export.decode).write(chunk=2, repeat=3) == exported.text


def decode_loop_text(prefill: ort.InferenceSession, loop: ort_moe.DecodeLoop) -> list[list[int]]:
    """Greedy text after the prompts; the prefill's cache goes to the loop."""
    ids, positions, lengths = prompts()
    names = [output.name for output in prefill.get_outputs()]
    values = prefill.run(names, {"input_ids": ids, "position_ids": positions, **loop.read_state()})
    outputs = dict(zip(names, values, strict=True))
    loop.write_state({past: outputs[present] for past, present in loop.state.items()})
    last = outputs["logits"][np.arange(BATCH), lengths - 1]
    text = []
    for i in range(NEW_TOKENS):
        text.append(last.argmax(-1))
        last = loop.step(input_ids=text[-1][:, None], position_ids=(lengths + i)[:, None])["logits"][:, 0]
    return np.stack(text, axis=1).tolist()


def test_text_of_a_decode_loop_is_pytorchs(exported: Exported) -> None:
    """Past and present share their buffers."""
    prefill, decode = (
        ort_moe.session(path, providers=["CPUExecutionProvider"])
        for path in (exported.export.prefill, exported.export.decode)
    )
    loop = ort_moe.DecodeLoop(decode)
    assert not loop.copied_state
    assert decode_loop_text(prefill, loop) == exported.text


def test_text_after_optimize_is_pytorchs(exported: Exported, tmp_path: Path) -> None:
    """Every layer is fused whole."""
    paths = []
    for path in (exported.export.prefill, exported.export.decode):
        report = ort_moe.optimize(path, tmp_path / path.name, target="cpu")
        assert [site.status for site in report.sites] == ["whole"] * exported.export.moe_layers
        assert [site.status for site in report.experts] == ["whole"] * exported.export.moe_layers
        assert report.verification is not None
        paths.append(tmp_path / path.name)
    assert exported.export.moe_layers == 2
    assert Loop(*paths).write() == exported.text


def test_folder(exported: Exported) -> None:
    done = exported.export
    made = {path.name: path for path in Path(done.output).iterdir()}
    assert sorted(made) == sorted([DECODE, PREFILL, WEIGHTS, "config.json", "generation_config.json", "tokenizer.json"])
    assert made["config.json"].read_bytes() == (exported.checkpoint / "config.json").read_bytes()
    # Tensors are aligned to pages: as many as there are, and each once.
    stored = (exported.checkpoint / "model.safetensors").stat().st_size
    assert stored / 2 < done.weight_bytes < 2 * stored
    assert done.difference is not None
    assert done.difference < 1e-5


def test_inputs_and_outputs(exported: Exported) -> None:
    for path, tokens in ((exported.export.decode, 1), (exported.export.prefill, "sequence")):
        session = ort.InferenceSession(path)
        inputs = {value.name: value.shape for value in session.get_inputs()}
        outputs = {value.name: value.shape for value in session.get_outputs()}
        assert inputs.pop("input_ids") == inputs.pop("position_ids") == [BATCH, tokens]
        assert outputs.pop("logits") == [BATCH, tokens, 32]
        assert outputs == {name.replace("past_key_values", "present"): shape for name, shape in inputs.items()}
        assert list(inputs)[:3] == [f"past_key_values.{name}" for name in ("0.key", "0.value", "1.key")]
        assert {(shape[0], shape[2]) for shape in inputs.values()} == {(BATCH, LENGTH)}


def test_nothing_keeps_decode_out_of_a_cuda_graph(exported: Exported) -> None:
    assert not ort_moe.inspect(exported.export.decode).blockers


def test_the_cache_is_not_copied_for_each_head(tmp_path: Path) -> None:
    import onnx_ir as ir

    checkpoint("qwen3_moe", tmp_path / "model", num_attention_heads=4, num_key_value_heads=2)
    done = export(tmp_path / "model", tmp_path / "out", max_length=LENGTH)
    graph = ir.load(done.decode).graph
    copied = [node.name for node in graph if node.op_type == "Expand" and LENGTH in tuple(node.inputs[0].shape or ())]
    assert not copied


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_precision(tmp_path: Path, precision: str) -> None:
    checkpoint("mixtral", tmp_path / "model")
    done = export(tmp_path / "model", tmp_path / "out", precision=precision, max_length=16)  # type: ignore[arg-type]
    assert (done.precision, done.batch, done.max_length) == (precision, 1, 16)
    kinds = {value.type for value in ort.InferenceSession(done.prefill).get_inputs()} if precision == "fp16" else set()
    assert kinds <= {"tensor(int64)", "tensor(float16)"}
    report = ort_moe.optimize(done.decode)
    assert [site.status for site in (*report.sites, *report.experts)] == ["whole"] * 4


def test_as_stored(tmp_path: Path) -> None:
    checkpoint("mixtral", tmp_path / "model", precision="fp16")
    done = export(tmp_path / "model", tmp_path / "out")
    assert (done.precision, done.max_length) == ("fp16", 64)


@pytest.mark.parametrize(("batch", "length"), [(5, 8), (3, 3), (1, 2)])
def test_prefill_takes_any_number_of_tokens(tmp_path: Path, batch: int, length: int) -> None:
    """Also where the batch, or the cache, is as long as what is traced."""
    checkpoint("mixtral", tmp_path / "model")
    done = export(tmp_path / "model", tmp_path / "out", batch=batch, max_length=length, verify=False)
    inputs = {value.name: value.shape for value in ort.InferenceSession(done.prefill).get_inputs()}
    assert inputs["input_ids"] == [batch, "sequence"]


def test_model_without_experts(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    done = export(tmp_path / "model", tmp_path / "out", max_length=8)
    assert done.moe_layers == 0
    assert "the model has no experts" in str(done)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("deepseek_v4", "transformers has no cache of fixed length for layers of type 'heavily_compressed_attention'"),
        ("zaya", "2 of its 2 layers are of type 'hybrid', which keep a state other than keys and values"),
        ("llama4_text", "it rotates queries and keys as complex numbers, which ONNX does not have"),
        ("minimax", "its code does not run with a plain key-value cache: MiniMax uses cache of its own"),
    ],
)
def test_architecture_that_cannot_be_exported(tmp_path: Path, name: str, reason: str) -> None:
    checkpoint(name, tmp_path / "model")
    with pytest.raises(ModelError) as refused:
        export(tmp_path / "model", tmp_path / "out")
    assert f"the architecture '{name}' cannot be exported: {reason}" in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_model_without_layers(tmp_path: Path) -> None:
    checkpoint("mixtral", tmp_path / "model", num_hidden_layers=0)
    with pytest.raises(ModelError, match="'mixtral' cannot be exported: none of its 0 layers keeps keys and values, "):
        export(tmp_path / "model", tmp_path / "out")


def test_bad_checkpoint(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    checkpoint("mixtral", tmp_path / "model")
    weights, config = tmp_path / "model" / "model.safetensors", tmp_path / "model" / "config.json"
    with pytest.raises(ModelError, match=r"made for 64 tokens, a cache of 65 was asked for"):
        export(tmp_path / "model", tmp_path / "out", max_length=65)
    for batch in (10**14, 10**20):
        with pytest.raises(ModelError, match=f"a cache of 64 tokens for a batch of {batch} does not fit into memory"):
            export(tmp_path / "model", tmp_path / "out", batch=batch)
    tensors = load_file(weights)
    for name, sentence in (
        ("lm_head.weight", r"by which lm_head\.weight has shape \[32, 16\], but in the files \[31, 16\]$"),
        (
            "model.layers.0.block_sparse_moe.experts.3.w1.weight",
            r"experts cannot be stacked from them, .* config\.json$",
        ),
    ):
        save_file({**tensors, name: tensors[name][:-1].contiguous()}, weights, metadata={"format": "pt"})
        with pytest.raises(ModelError, match=sentence):
            export(tmp_path / "model", tmp_path / "out")
    for factor in (float("nan"), 1e30):
        spoilt = {name: tensor * factor for name, tensor in tensors.items()}
        save_file(spoilt, weights, metadata={"format": "pt"})
        with pytest.raises(
            VerificationError, match="PyTorch itself computes logits that are all zero, infinite or no "
        ):
            export(tmp_path / "model", tmp_path / "out", max_length=8)
    lacking = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    save_file(lacking, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"its files lack weights of the model: model\.norm\.weight$"):
        export(tmp_path / "model", tmp_path / "out")
    config.write_text('{"model_type": "no_such"}')
    with pytest.raises(ModelError, match=r"transformers .* knows no architecture 'no_such'$"):
        export(tmp_path / "model", tmp_path / "out")
    config.write_text('{"model_type": "vit"}')
    with pytest.raises(ModelError, match=r"'vit' cannot be exported: transformers .* generates text from text alone"):
        export(tmp_path / "model", tmp_path / "out")
    config.write_text('{"model_type": "mixtral", "hidden_size": "wide"}')
    with pytest.raises(ModelError, match=r"config\.json does not fit 'mixtral': "):
        export(tmp_path / "model", tmp_path / "out")
    config.write_text('{"model_type": "mixtral", "num_hidden_layers": -1}')
    with pytest.raises(ModelError, match=r"'mixtral' cannot be exported: transformers makes no cache for it: "):
        export(tmp_path / "model", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_wrong_or_interrupted_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ort_moe.exporting import check

    checkpoint("mixtral", tmp_path / "model")

    def run() -> None:
        export(tmp_path / "model", tmp_path / "out", max_length=8)

    with monkeypatch.context() as patched:
        patched.setattr(check, "ALLOWED", dict.fromkeys(check.ALLOWED, -1.0))
        with pytest.raises(VerificationError, match="the exported graphs do not compute what PyTorch does"):
            run()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    for raised, expected in ((KeyboardInterrupt(), KeyboardInterrupt), (OSError(28, "No space left"), OutputError)):

        def interrupted(*_: object, error: BaseException = raised, **__: object) -> None:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr("onnx_ir.save", interrupted)
            with pytest.raises(expected):
                run()
        assert [path.name for path in tmp_path.iterdir()] == ["model"]

"""Tiny MoE models with random weights, as onnxruntime-genai's own builder writes them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCABULARY = 96
END = 2
"""The token that ends a text."""

_TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": END,
}
_GPT_OSS = {
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "num_local_experts": 8,
    "sliding_window": 16,
    "max_position_embeddings": 2048,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 1024,
    },
}
_LFM2_MOE = {
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_dense_layers": 1,
    "num_experts": 8,
    "max_position_embeddings": 256,
    "layer_types": ["conv", "full_attention", "conv"],
}
_QWEN3_5_MOE = {
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_hidden_layers": 2,
    "head_dim": 32,
    "num_experts": 8,
    "max_position_embeddings": 256,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mtp_num_hidden_layers": 0,
}
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}


def build(architecture: str, precision: str, output: Path, *, provider: str = "cpu") -> Path:
    """Writes a model folder; what the builder reads lies beside it. No GPU is needed for one that is for CUDA.

    Args:
        architecture: `gpt_oss`, `lfm2_moe` or `qwen3_5_moe`.
        precision: As the builder names it.
        output: The folder.
        provider: `cpu` or `cuda`. Integers for CUDA are left as they are, not in the order of its kernels.
    """
    checkpoint = output.with_name(f"{output.name}-checkpoint")
    _save_checkpoint(architecture, checkpoint)
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", checkpoint, "-o", output]
    command += ["-p", precision, "-e", provider, "-c", output.with_name(f"{output.name}-cache")]
    if provider == "cuda" and precision == "int4":
        command += ["--extra_options", "qmoe_weights_prepacked=0"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return output


def generate(folder: Path, prompts: Sequence[Sequence[int]], length: int = 64) -> list[list[int]]:
    """The most likely tokens behind each prompt, by onnxruntime-genai.

    In a process and a working folder of its own, where no library is loaded that the folder lacks.

    Raises:
        RuntimeError: It does not load or run; with what it says.
    """
    command = [sys.executable, __file__, str(folder.absolute()), str(length), json.dumps(prompts)]
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr)
    tokens: list[list[int]] = json.loads(done.stdout)
    return tokens


def _generate(folder: str, length: int, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    import onnxruntime_genai as genai

    model = genai.Model(folder)
    tokens = []
    for prompt in prompts:
        parameters = genai.GeneratorParams(model)
        longest = len(prompt) + length
        parameters.set_search_options(max_length=longest, min_length=longest, do_sample=False)
        generator = genai.Generator(model, parameters)
        generator.append_tokens([prompt])
        while not generator.is_done():
            generator.generate_next_token()
        tokens.append([int(token) for token in generator.get_sequence(0)][len(prompt) :])
    return tokens


def _save_checkpoint(architecture: str, folder: Path) -> None:
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    if architecture == "gpt_oss":
        kind, config = transformers.GptOssForCausalLM, transformers.GptOssConfig(**_TINY, **_GPT_OSS)
    elif architecture == "lfm2_moe":
        kind, config = transformers.Lfm2MoeForCausalLM, transformers.Lfm2MoeConfig(**_TINY, **_LFM2_MOE)
    else:
        kind = transformers.Qwen3_5MoeForConditionalGeneration
        config = transformers.Qwen3_5MoeConfig(text_config={**_TINY, **_QWEN3_5_MOE}, vision_config=_VISION)
    torch.manual_seed(0)
    model = kind(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "bias" in name:  # larger than usual, so that tokens differ
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    if architecture == "gpt_oss":
        _add_mxfp4_experts(folder / "model.safetensors")
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def _add_mxfp4_experts(path: Path) -> None:
    """Adds the experts in MXFP4, as published checkpoints of GPT-OSS hold them, which the builder packs."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, depth, rows = tensors[name].shape
        tensors[f"{name}_blocks"] = torch.randint(256, (experts, rows, depth // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(122, 125, (experts, rows, depth // 32), dtype=torch.uint8)
    save_file(tensors, path, {"format": "pt"})


if __name__ == "__main__":
    print(json.dumps(_generate(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))))

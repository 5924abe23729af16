"""The torch side of a fixture: true transformers classes at fixture size, with seeded weights. Needs transformers."""

import dataclasses
import re
import zlib

import numpy as np
import torch
import transformers

from models.architectures import Architecture
from models.geometry import COMMON_CONFIG, EXPERT_COUNT_NAMES, EXPERTS_PER_TOKEN_NAMES
from ort_moe.exporting.graph import quiet

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Block(torch.nn.Module):
    """hidden_states (batch, sequence, H) -> output of that shape, without the router values some blocks return."""

    def __init__(self, block: torch.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        output = self.block(hidden_states)
        if isinstance(output, tuple):
            output = output[0]
        # Some blocks leave the tokens flat. Not for all: a reshape to the same shape would add nodes.
        return output if output.ndim == hidden_states.ndim else output.view(hidden_states.shape)


class CausalLM(torch.nn.Module):
    """input_ids (batch, sequence) int64 -> logits (batch, sequence, vocabulary), without a key-value cache.

    Args:
        model: the language model.
        router_logits: return each layer's, too, as the class does: (batch * sequence, E).
        masked: give it an attention mask of ones. Without any it looks for packed sequences with torch.diff, which the
            legacy exporter cannot translate.
    """

    def __init__(self, model: torch.nn.Module, *, router_logits: bool = False, masked: bool = False) -> None:
        super().__init__()
        self.model = model
        self.router_logits = router_logits
        self.masked = masked

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        options = {"attention_mask": torch.ones_like(input_ids)} if self.masked else {}
        if not self.router_logits:
            return self.model(input_ids=input_ids, use_cache=False, **options).logits
        outputs = self.model(input_ids=input_ids, use_cache=False, output_router_logits=True, **options)
        return (outputs.logits, *outputs.router_logits)


def draw_weight(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draw one fp32 parameter.

    Gains are near 1 and biases are not 0, so that a rewrite that drops one shows. Router logits get a standard
    deviation of about 2, so that experts are seldom nearly equal.
    """
    values = rng.standard_normal(shape, dtype=np.float32)
    if len(shape) < 2 and name.endswith(("weight", "scale")):
        return 1 + np.float32(0.1) * values
    if len(shape) < 2 or name.endswith("bias"):
        return np.float32(0.2) * values
    is_router = re.search(r"\b(router|gate)\b", name) is not None
    gain = np.float32(2 if is_router else 1)
    return gain / np.sqrt(np.float32(shape[-1])) * values


def build_model(row: Architecture, dtype: torch.dtype, experts_implementation: str = "batched_mm") -> torch.nn.Module:
    """Build the language model of `row` with seeded weights, in `dtype` but for what its class keeps in fp32."""
    config_class = transformers.CONFIG_MAPPING[row.name]
    names = {field.name for field in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    experts = {name: row.experts for name in EXPERT_COUNT_NAMES if name in names}
    per_token = {name: row.k for name in EXPERTS_PER_TOKEN_NAMES if name in names}
    config = config_class(**{**COMMON_CONFIG, **experts, **per_token, **row.config})
    # A class without a language model's head of its own, a part of a larger model, does for its block.
    is_causal_lm = config_class in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    auto_class = transformers.AutoModelForCausalLM if is_causal_lm else transformers.AutoModel
    with quiet():
        model = auto_class.from_config(
            config,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation=experts_implementation,
        )
    # What from_pretrained would keep in fp32; from_config and .half() do not look at it.
    kept_in_fp32 = [*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())]
    keep = re.compile("|".join(rf"(^|\.){re.escape(part)}($|\.)" for part in kept_in_fp32) or "$^")
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if not tensor.is_floating_point():
                continue
            seeds = [zlib.crc32(row.name.encode()), zlib.crc32(name.encode()), row.seed]
            rng = np.random.default_rng(seeds if row.seed else seeds[:2])
            values = torch.from_numpy(draw_weight(name, tuple(tensor.shape), rng))
            tensor.data = values.to(torch.float32 if keep.search(name) else dtype)
    return model.eval().requires_grad_(False)


def moe_blocks(model: torch.nn.Module, row: Architecture) -> list[torch.nn.Module]:
    """Return the MoE blocks of `model` in layer order.

    Raises:
        LookupError: if it has none of the row's class.
    """
    blocks = [module for module in model.modules() if type(module).__name__ == row.block_class]
    if not blocks:
        raise LookupError(f"{row.name}: no {row.block_class} in {type(model).__name__}")
    return blocks

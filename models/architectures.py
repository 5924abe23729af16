"""The architectures we export, one row each: what a newcomer edits to add a fixture.

Every model is tiny but has the true topology: the real transformers classes, with a configuration shrunk to
`HIDDEN_SIZE` and two layers. Importing this module needs neither torch nor transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HIDDEN_SIZE = 16
INTERMEDIATE_SIZE = 8
VOCAB_SIZE = 32
NUM_HEADS = 2
HEAD_DIM = 8
NUM_LAYERS = 2

COMMON_CONFIG: Mapping[str, Any] = {
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": INTERMEDIATE_SIZE,
    "moe_intermediate_size": INTERMEDIATE_SIZE,
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Configuration that all rows share; a row's `config` is laid over it."""


@dataclass(frozen=True)
class Architecture:
    """One Mixture-of-Experts architecture at fixture size.

    Attributes:
        name: transformers' `model_type`; also the first part of the fixture's name.
        block_class: class name of the MoE block (router, experts, shared experts) inside the model.
        router: the router's arithmetic in words, in the order in which it is applied.
        experts: number of routed experts, E.
        k: experts chosen per token, K.
        config: configuration overrides, laid over `COMMON_CONFIG`.
        causal_lm: whether the whole language model is exported too, not only its first MoE block.
    """

    name: str
    block_class: str
    router: str
    experts: int
    k: int
    config: Mapping[str, Any] = field(default_factory=dict)
    causal_lm: bool = False


MLA_CONFIG: Mapping[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": HEAD_DIM,
    "qk_rope_head_dim": HEAD_DIM,
    "v_head_dim": HEAD_DIM,
}
"""Multi-head latent attention at fixture size."""

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        name="mixtral",
        block_class="MixtralSparseMoeBlock",
        router="softmax, top-k, renormalise",
        experts=8,
        k=2,
        config={"num_local_experts": 8, "num_experts_per_tok": 2},
        causal_lm=True,
    ),
    Architecture(
        name="deepseek_v3",
        block_class="DeepseekV3MoE",
        router="sigmoid + bias, the 2 best of 4 groups, top-k, gather the unbiased score, renormalise, scale",
        experts=16,
        k=4,
        config={
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 2.5,
            **MLA_CONFIG,
        },
        causal_lm=True,
    ),
    Architecture(
        name="gpt_oss",
        block_class="GptOssMLP",
        router="linear with bias, top-k, softmax over the chosen",
        experts=8,
        k=4,
        config={"num_local_experts": 8, "num_experts_per_tok": 4},
    ),
)


def architecture(name: str) -> Architecture:
    """Return the row called `name`.

    Raises:
        ValueError: if there is no such row; the message lists those there are.
    """
    for row in ARCHITECTURES:
        if row.name == name:
            return row
    raise ValueError(f"no architecture {name!r}; there are {', '.join(row.name for row in ARCHITECTURES)}")

"""The size of every fixture: one small geometry, as configuration classes of transformers name it. Needs no torch."""

from collections.abc import Mapping
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

MLA_CONFIG: Mapping[str, Any] = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": HEAD_DIM,
    "qk_rope_head_dim": HEAD_DIM,
    "v_head_dim": HEAD_DIM,
}
"""Multi-head latent attention at fixture size."""

EXPERT_COUNT_NAMES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN_NAMES = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
"""What configuration classes call E and K."""

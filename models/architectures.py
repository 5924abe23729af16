"""The architectures we export, one row each: what a newcomer edits to add a fixture.

Every model is tiny but has the true topology: the real transformers classes, with a configuration shrunk to the one
geometry of `models.geometry`. Importing this module needs neither torch nor transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.geometry import HEAD_DIM, INTERMEDIATE_SIZE, MLA_CONFIG
from models.plan import EVERYTHING, FAMILY, PLAIN, PRECISIONS, Exports


@dataclass(frozen=True)
class Architecture:
    """One Mixture-of-Experts architecture at fixture size.

    Attributes:
        name: transformers' `model_type`; also the first part of the fixture's name.
        block_class: class name of the MoE block (router, experts, shared experts) inside the model; of the router alone
            where the model has no such block, which is then exported as a whole only.
        family: what routers share whose graphs are alike; a row of every family has `FAMILY` exports or more.
        router: the router's arithmetic in words, in the order in which it is applied.
        experts: number of experts that the router chooses from, E.
        k: experts chosen per token, K.
        config: configuration overrides, laid over `models.geometry.COMMON_CONFIG` and the two counts above.
        seed: of the weights; not 0 where that would leave an expert without tokens.
        block: exports of the first MoE block alone.
        causal_lm: exports of the whole language model.
        variants: further exports: `block` or `causal_lm`, exporter, precision and key of `models.plan.VARIANTS`.
    """

    name: str
    block_class: str
    family: str
    router: str
    experts: int = 8
    k: int = 2
    config: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    block: Exports = field(default_factory=lambda: PLAIN)
    causal_lm: Exports = field(default_factory=dict)
    variants: tuple[tuple[str, str, str, str], ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is exported, `block`, `causal_lm` or both."""
        return tuple(kind for kind, exports in (("block", self.block), ("causal_lm", self.causal_lm)) if exports)


ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture(
        name="afmoe",
        block_class="AfmoeSparseMoeBlock",
        family="biased sigmoid",
        router="sigmoid + bias, top-k, gather the unbiased score, renormalise, scale",
        config={"num_dense_layers": 0, "num_shared_experts": 1, "route_scale": 2.5},
    ),
    Architecture(
        name="aria_text",
        block_class="AriaTextMoELayer",
        family="top-k, softmax",
        router="top-k, softmax over the chosen",
        config={"moe_num_shared_experts": 1},
        # transformers' exporter cannot prove that the block's reshapes take every length.
        block={"dynamo": ("fp32", "fp16"), "legacy": ("fp32",)},
    ),
    Architecture(
        name="cohere2_moe",
        block_class="Cohere2MoeSparseMoeBlock",
        family="top-k, sigmoid",
        router="top-k, sigmoid of the chosen, renormalise",
        config={"expert_selection_fn": "sigmoid", "num_shared_experts": 1},
        block=FAMILY,
    ),
    Architecture(
        name="deepseek_v2",
        block_class="DeepseekV2Moe",
        family="group-limited softmax",
        router="softmax, the 2 best of 4 groups by their best expert, top-k of the masked scores, scale",
        experts=16,
        k=4,
        config={
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 16.0,
            **MLA_CONFIG,
        },
        block=FAMILY,
    ),
    Architecture(
        name="deepseek_v3",
        block_class="DeepseekV3MoE",
        family="group-limited sigmoid",
        router="sigmoid + bias, the 2 best of 4 groups by their 2 best experts, top-k, gather the unbiased score, "
        "renormalise, scale",
        experts=16,
        k=4,
        config={
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 2.5,
            **MLA_CONFIG,
        },
        block=EVERYTHING,
        causal_lm={"dynamo": ("fp32", "fp16"), "legacy": ("fp32",), "transformers": ("fp32",)},
        variants=(
            ("block", "dynamo", "fp32", "static"),
            ("block", "legacy", "fp32", "static"),
            ("block", "transformers", "bf16", "static"),
            ("block", "legacy", "fp32", "opset13"),
            ("block", "transformers", "fp32", "opset18"),
            ("block", "dynamo", "bf16", "opset24"),
            ("block", "transformers_grouped", "fp32", "opset26"),
        ),
    ),
    Architecture(
        name="deepseek_v4",
        block_class="DeepseekV4SparseMoeBlock",
        family="biased square root of softplus",
        router="square root of softplus, + bias, top-k, gather the unbiased score, renormalise, scale",
        config={"mlp_layer_types": ["moe", "moe"], "routed_scaling_factor": 1.5},
        block=FAMILY,
    ),
    Architecture(
        name="dots1",
        block_class="Dots1MoE",
        family="group-limited sigmoid",
        router="sigmoid + bias, groups, top-k, gather the unbiased score, scale",
        config={"n_group": 2, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0},
    ),
    Architecture(
        name="ernie4_5_moe",
        block_class="Ernie4_5_MoeSparseMoeBlock",
        family="biased softmax",
        router="softmax + bias, top-k, gather the unbiased score, divide by the sum but at least 1e-12",
        config={"moe_layer_start_index": 0, "moe_num_shared_experts": 1},
        # In half precision transformers' exporter leaves the router's autocast with inputs and weights of two types.
        block={**FAMILY, "transformers": ("fp32",)},
        causal_lm={"dynamo": ("fp32",)},
    ),
    Architecture(
        name="exaone_moe",
        block_class="ExaoneMoeSparseMoEBlock",
        family="group-limited sigmoid",
        router="sigmoid + bias, the best of 2 groups by its 2 best experts, top-k, gather the unbiased score, "
        "renormalise",
        config={
            "num_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "mlp_layer_types": ["sparse", "sparse"],
            "layer_types": ["full_attention", "full_attention"],
        },
    ),
    Architecture(
        name="flex_olmo",
        block_class="FlexOlmoSparseMoeBlock",
        family="softmax, top-k, renormalise",
        router="softmax, top-k, renormalise",
        config={"norm_topk_prob": True},
    ),
    Architecture(
        name="gemma4_text",
        block_class="Gemma4TextRouter",
        family="scale per expert",
        router="softmax, top-k, renormalise, scale per expert",
        config={
            "enable_moe_block": True,
            "hidden_size_per_layer_input": 0,
            "global_head_dim": HEAD_DIM,
            # transformers goes through a set of layer types: with two, the order of the nodes varies from run to run.
            "layer_types": ["full_attention", "full_attention"],
        },
        block={},
        causal_lm=FAMILY,
    ),
    Architecture(
        name="glm4_moe",
        block_class="Glm4MoeMoE",
        family="group-limited sigmoid",
        router="sigmoid + bias, one group (its mask stays in the graph), top-k, gather the unbiased score, renormalise",
        config={"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 0},
    ),
    Architecture(
        name="glm4_moe_lite",
        block_class="Glm4MoeLiteMoE",
        family="group-limited sigmoid",
        router="sigmoid + bias, one group (its mask stays in the graph), top-k, gather the unbiased score, "
        "renormalise, scale",
        config={
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "mlp_layer_types": ["sparse", "sparse"],
            "routed_scaling_factor": 1.8,
            **MLA_CONFIG,
        },
    ),
    Architecture(
        name="gpt_oss",
        block_class="GptOssMLP",
        family="top-k, softmax",
        router="linear with bias, top-k, softmax over the chosen",
        k=4,
        block=FAMILY,
        causal_lm={"dynamo": ("fp32",)},
        variants=(
            ("block", "legacy", "fp32", "static"),
            ("block", "dynamo", "bf16", "opset24"),
            ("block", "dynamo", "fp16", "opset26"),
            ("causal_lm", "transformers", "fp32", "router_logits"),
        ),
    ),
    Architecture(
        name="granitemoe",
        block_class="GraniteMoeMoE",
        family="top-k, softmax",
        router="top-k, softmax over the chosen",
    ),
    Architecture(
        name="granitemoeshared",
        block_class="GraniteMoeSharedMoE",
        family="top-k, softmax",
        router="top-k, softmax over the chosen",
        config={"shared_intermediate_size": INTERMEDIATE_SIZE},
        causal_lm={"dynamo": ("fp32",)},
    ),
    Architecture(
        name="hunyuan_v1_moe",
        block_class="HunYuanMoEV1Moe",
        family="softmax, top-k, renormalise",
        router="softmax on axis 1, top-k, renormalise",
    ),
    Architecture(
        name="hy_v3",
        block_class="HYV3MoE",
        family="biased sigmoid",
        router="sigmoid + bias, top-k, gather the unbiased score, renormalise, scale",
        config={"num_shared_experts": 1, "mlp_layer_types": ["sparse", "sparse"], "router_scaling_factor": 2.5},
        seed=1,
    ),
    Architecture(
        name="inkling_text",
        block_class="InklingMoE",
        family="shared experts in the normaliser",
        router="sigmoid + bias, top-k, softmax of the logarithm of the sigmoid over the chosen and the shared experts, "
        "scale",
        config={"n_shared_experts": 1, "mlp_layer_types": ["sparse", "sparse"], "route_scale": 2.5},
        block=FAMILY,
    ),
    Architecture(
        name="jamba",
        block_class="JambaSparseMoeBlock",
        family="softmax, top-k",
        router="softmax, top-k",
        config={"expert_layer_offset": 0, "expert_layer_period": 1, "attn_layer_offset": 0, "attn_layer_period": 1},
    ),
    Architecture(
        name="kolibri1",
        block_class="Kolibri1SparseMoeBlock",
        family="bias on the logits",
        router="top-k of the biased logits, sigmoid of the unbiased ones, renormalise",
        config={"shared_expert_intermediate_size": INTERMEDIATE_SIZE, "norm_topk_prob": True},
        block=FAMILY,
    ),
    Architecture(
        name="laguna",
        block_class="LagunaSparseMoeBlock",
        family="softcap",
        router="softcap, sigmoid + bias, top-k, gather the unbiased score, renormalise; scales the experts' output",
        config={
            "shared_expert_intermediate_size": INTERMEDIATE_SIZE,
            "mlp_layer_types": ["sparse", "sparse"],
            "moe_router_logit_softcapping": 3.0,
            "moe_routed_scaling_factor": 2.5,
        },
        block=FAMILY,
    ),
    Architecture(
        name="lfm2_moe",
        block_class="Lfm2MoeSparseMoeBlock",
        family="biased sigmoid",
        router="sigmoid + bias, top-k, gather the unbiased score, divide by the sum + 1e-6, scale",
        config={
            "num_dense_layers": 0,
            "layer_types": ["full_attention", "full_attention"],
            "routed_scaling_factor": 2.5,
        },
    ),
    Architecture(
        name="llama4_text",
        block_class="Llama4TextMoe",
        family="scatter",
        router="top-k, scatter into -inf, sigmoid; scales the experts' input and runs all of them",
        config={"interleave_moe_layer_step": 1, "intermediate_size_mlp": INTERMEDIATE_SIZE},
        # All experts run, whatever the implementation of the others: there is no grouped_mm.
        block={"dynamo": PRECISIONS, "legacy": ("fp32", "fp16"), "transformers": ("fp32", "bf16")},
    ),
    Architecture(
        name="minimax",
        block_class="MiniMaxSparseMoeBlock",
        family="softmax, top-k, renormalise",
        router="softmax, top-k, renormalise",
        config={"layer_types": ["full_attention", "full_attention"]},
    ),
    Architecture(
        name="minimax_m2",
        block_class="MiniMaxM2SparseMoeBlock",
        family="biased sigmoid",
        router="sigmoid + bias, top-k, gather the unbiased score, renormalise",
        block=FAMILY,
    ),
    Architecture(
        name="minimax_m3_vl_text",
        block_class="MiniMaxM3VLSparseMoeBlock",
        family="biased sigmoid",
        router="sigmoid + bias, top-k, gather the unbiased score, renormalise; scales the experts' output",
        config={"shared_intermediate_size": INTERMEDIATE_SIZE, "mlp_layer_types": ["sparse", "sparse"]},
    ),
    Architecture(
        name="mistral4",
        block_class="Mistral4MoE",
        family="group-limited softmax",
        router="softmax, the 2 best of 4 groups by their 2 best experts, top-k, renormalise, scale",
        experts=16,
        k=4,
        config={
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 2.5,
            **MLA_CONFIG,
        },
    ),
    Architecture(
        name="mixtral",
        block_class="MixtralSparseMoeBlock",
        family="softmax, top-k, renormalise",
        router="softmax, top-k, renormalise",
        block=EVERYTHING,
        causal_lm={"dynamo": ("fp32", "fp16", "bf16"), "legacy": ("fp32",), "transformers": ("fp32",)},
        variants=(
            ("block", "dynamo", "fp32", "static"),
            ("block", "legacy", "fp32", "static"),
            ("block", "transformers", "fp32", "static"),
            ("block", "transformers_grouped", "fp32", "static"),
            ("block", "legacy", "fp32", "opset13"),
            ("block", "dynamo", "fp32", "opset18"),
            ("block", "transformers", "fp16", "opset21"),
            ("block", "dynamo", "fp16", "opset24"),
            ("block", "dynamo", "fp32", "opset26"),
            ("causal_lm", "dynamo", "fp32", "static"),
            ("causal_lm", "dynamo", "fp32", "router_logits"),
        ),
    ),
    Architecture(
        name="nemotron_h",
        block_class="NemotronHMoE",
        family="group-limited sigmoid",
        router="sigmoid + bias, one group (its mask stays in the graph), top-k, gather the unbiased score, renormalise",
        config={
            "layers_block_type": ["moe", "attention"],
            "moe_shared_expert_intermediate_size": INTERMEDIATE_SIZE,
            "routed_scaling_factor": 2.5,
        },
    ),
    Architecture(
        name="olmoe",
        block_class="OlmoeSparseMoeBlock",
        family="softmax, top-k",
        router="softmax, top-k",
        block=FAMILY,
        causal_lm={"dynamo": ("fp32",)},
    ),
    Architecture(
        name="phimoe",
        block_class="PhimoeSparseMoeBlock",
        family="sparse mixer",
        router="sparse mixer: the two best by ReduceMax and ArgMax, each with its own masked softmax",
        block=FAMILY,
    ),
    Architecture(
        name="qwen2_moe",
        block_class="Qwen2MoeSparseMoeBlock",
        family="softmax, top-k",
        router="softmax, top-k; a sigmoid gate on the shared expert",
        config={"shared_expert_intermediate_size": INTERMEDIATE_SIZE},
    ),
    Architecture(
        name="qwen3_5_moe_text",
        block_class="Qwen3_5MoeSparseMoeBlock",
        family="softmax, top-k, renormalise",
        router="softmax, top-k, renormalise; a sigmoid gate on the shared expert",
        config={
            "shared_expert_intermediate_size": INTERMEDIATE_SIZE,
            "layer_types": ["full_attention", "full_attention"],
        },
    ),
    Architecture(
        name="qwen3_moe",
        block_class="Qwen3MoeSparseMoeBlock",
        family="softmax, top-k, renormalise",
        router="softmax, top-k, renormalise",
        config={"norm_topk_prob": True},
        causal_lm={"dynamo": ("fp32",)},
        variants=(("causal_lm", "legacy", "fp32", "router_logits"),),
    ),
    Architecture(
        name="qwen3_next",
        block_class="Qwen3NextSparseMoeBlock",
        family="softmax, top-k, renormalise",
        router="softmax, top-k, renormalise; a sigmoid gate on the shared expert",
        config={
            "shared_expert_intermediate_size": INTERMEDIATE_SIZE,
            "layer_types": ["full_attention", "full_attention"],
        },
        causal_lm={"dynamo": ("fp32",)},
    ),
    Architecture(
        name="zaya",
        block_class="ZayaSparseMoeBlock",
        family="skipped experts",
        router="a norm and an MLP to the logits, softmax + bias, top-k, gather the unbiased score; the last expert "
        "means none",
        experts=9,
        k=1,
        config={"num_experts": 8, "router_hidden_size": 8, "layer_types": ["hybrid", "hybrid"]},
        block=FAMILY,
        seed=35,
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

"""The published configurations, as in their config.json: for dry runs and random weights."""

from typing import Any

from common.machines.chips import Slice


def _yarn(**scales: float) -> dict[str, Any]:
    return dict(
        type="yarn",
        factor=40,
        original_max_position_embeddings=4096,
        beta_fast=32,
        beta_slow=1,
        **scales,
    )


COMMON: dict[str, Any] = dict(
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    rms_norm_eps=1e-6,
    rope_theta=10000,
    max_position_embeddings=163840,
    hidden_act="silu",
    attention_bias=False,
    tie_word_embeddings=False,
    moe_layer_freq=1,
    torch_dtype="bfloat16",
)
# DeepSeek-V3, V3-0324, R1 and R1-0528; V3.1 says scale_fmt="ue8m0" besides.
V3 = COMMON | dict(
    model_type="deepseek_v3",
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    num_hidden_layers=61,
    num_attention_heads=128,
    num_key_value_heads=128,
    q_lora_rank=1536,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    n_group=8,
    topk_group=4,
    topk_method="noaux_tc",
    scoring_func="sigmoid",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    num_nextn_predict_layers=1,
    rope_scaling=_yarn(mscale=1.0, mscale_all_dim=1.0),
    quantization_config=dict(
        activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128]
    ),
)
V2 = COMMON | dict(
    model_type="deepseek_v2",
    vocab_size=102400,
    scoring_func="softmax",
    norm_topk_prob=False,
    n_shared_experts=2,
    num_experts_per_tok=6,
    first_k_dense_replace=1,
    rope_scaling=_yarn(mscale=0.707, mscale_all_dim=0.707),
)
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": V2
    | dict(
        hidden_size=2048,
        intermediate_size=10944,
        num_hidden_layers=27,
        num_attention_heads=16,
        num_key_value_heads=16,
        q_lora_rank=None,
        moe_intermediate_size=1408,
        n_routed_experts=64,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        routed_scaling_factor=1.0,
    ),
    "deepseek-v2": V2
    | dict(
        hidden_size=5120,
        intermediate_size=12288,
        num_hidden_layers=60,
        num_attention_heads=128,
        num_key_value_heads=128,
        q_lora_rank=1536,
        moe_intermediate_size=1536,
        n_routed_experts=160,
        n_group=8,
        topk_group=3,
        topk_method="group_limited_greedy",
        routed_scaling_factor=16.0,
    ),
    "deepseek-v3": V3,
    "deepseek-r1": V3,
}

# A TPU slice that holds each size, the mesh on it, and whether weights are in int8. The cache
# stays in bfloat16: a TPU would copy int8 latents once a step.
SLICES = {
    "deepseek-v2-lite": Slice("v5e:2x4", "expert=8"),
    "deepseek-v2": Slice("v5e:4x8", "expert=32", quant="int8"),
    "deepseek-r1": Slice("v5e:8x8", "expert=64", quant="int8"),
}

"""The published configurations, as in their config.json: for dry runs and random weights."""

from typing import Any

from common.machines.chips import Slice


def _k2(factor: int, context: int) -> dict[str, Any]:
    return dict(
        model_type="kimi_k2",
        vocab_size=163840,
        hidden_size=7168,
        intermediate_size=18432,
        num_hidden_layers=61,
        num_attention_heads=64,
        num_key_value_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        moe_intermediate_size=2048,
        n_routed_experts=384,
        n_shared_experts=1,
        num_experts_per_tok=8,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=2.827,
        num_nextn_predict_layers=0,
        rms_norm_eps=1e-6,
        rope_theta=50000.0,
        rope_scaling=dict(
            type="yarn",
            factor=factor,
            original_max_position_embeddings=4096,
            beta_fast=1.0,
            beta_slow=1.0,
            mscale=1.0,
            mscale_all_dim=1.0,
        ),
        max_position_embeddings=context,
        hidden_act="silu",
        attention_bias=False,
        tie_word_embeddings=False,
        moe_layer_freq=1,
        torch_dtype="bfloat16",
        quantization_config=dict(
            activation_scheme="dynamic",
            fmt="e4m3",
            quant_method="fp8",
            weight_block_size=[128, 128],
        ),
    )


SHAPES: dict[str, dict[str, Any]] = {
    "kimi-k2-instruct": _k2(32, 131072),
    "kimi-k2-instruct-0905": _k2(64, 262144),
}

SLICES = {
    "kimi-k2-instruct": Slice("v6e:8x8", "expert=64"),
}

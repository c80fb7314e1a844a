"""The published configurations, as in their config.json: for dry runs and random weights."""

from typing import Any

from common.machines.chips import Slice


def _config(experts: int, **text: Any) -> dict[str, Any]:
    return dict(
        model_type="llama4",
        image_token_index=200092,
        boi_token_index=200080,
        eoi_token_index=200081,
        torch_dtype="bfloat16",
        text_config=dict(
            model_type="llama4_text",
            vocab_size=202048,
            hidden_size=5120,
            intermediate_size=8192,
            intermediate_size_mlp=16384,
            num_hidden_layers=48,
            num_attention_heads=40,
            num_key_value_heads=8,
            head_dim=128,
            attention_bias=False,
            attention_chunk_size=8192,
            attn_temperature_tuning=4,
            floor_scale=8192,
            attn_scale=0.1,
            num_local_experts=experts,
            num_experts_per_tok=1,
            hidden_act="silu",
            rms_norm_eps=1e-5,
            rope_theta=500000.0,
            **text,
        ),
    )


SCOUT = _config(
    16,
    interleave_moe_layer_step=1,
    use_qk_norm=True,
    no_rope_layers=[],
    max_position_embeddings=10485760,
    rope_scaling=dict(
        rope_type="llama3",
        factor=16.0,
        low_freq_factor=1.0,
        high_freq_factor=1.0,
        original_max_position_embeddings=8192,
    ),
)
MAVERICK = _config(
    128,
    interleave_moe_layer_step=2,
    use_qk_norm=False,
    moe_layers=list(range(1, 48, 2)),
    no_rope_layers=[1, 1, 1, 0] * 12,
    max_position_embeddings=1048576,
    rope_scaling=None,
)
SHAPES: dict[str, dict[str, Any]] = {"llama-4-scout": SCOUT, "llama-4-maverick": MAVERICK}

SLICES = {
    "llama-4-scout": Slice("v5e:4x4", "expert=16", quant="int8", kv_quant="int8"),
    "llama-4-maverick": Slice("v5e:4x8", "expert=32", quant="int8", kv_quant="int8"),
}

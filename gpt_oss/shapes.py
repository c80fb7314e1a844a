"""The published configurations, as in their config.json: for dry runs and random weights."""

from typing import Any

from common.machines.chips import Slice


def _config(layers: int, experts: int) -> dict[str, Any]:
    return dict(
        model_type="gpt_oss",
        vocab_size=201088,
        hidden_size=2880,
        intermediate_size=2880,
        num_hidden_layers=layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        attention_bias=True,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        num_local_experts=experts,
        num_experts_per_tok=4,
        swiglu_limit=7.0,
        hidden_act="silu",
        rms_norm_eps=1e-5,
        rope_theta=150000,
        rope_scaling=dict(
            rope_type="yarn",
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=4096,
        ),
        tie_word_embeddings=False,
        max_position_embeddings=131072,
        quantization_config=dict(quant_method="mxfp4"),
    )


SHAPES: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": _config(24, 32),
    "gpt-oss-120b": _config(36, 128),
}

SLICES = {
    "gpt-oss-20b": Slice("v5e:2x2", "expert=4"),
    "gpt-oss-120b": Slice("v5e:4x4", "expert=16"),
}

"""The published configurations, as in their config.json: for dry runs and random weights."""

from typing import Any

from common.machines.chips import Slice


def _config(factor: float, **sizes: Any) -> dict[str, Any]:
    return dict(
        model_type="llama",
        vocab_size=128256,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=dict(
            rope_type="llama3",
            factor=factor,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        max_position_embeddings=131072,
        torch_dtype="bfloat16",
        hidden_act="silu",
        attention_bias=False,
        mlp_bias=False,
        **sizes,
    )


SHAPES: dict[str, dict[str, Any]] = {
    "llama3.2-1b": _config(
        32.0,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    ),
    "llama3.2-3b": _config(
        32.0,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    "llama3.1-8b": _config(
        8.0,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "llama3.1-70b": _config(
        8.0,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
    "llama3.1-405b": _config(
        8.0,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        tie_word_embeddings=False,
    ),
}

SLICES = {
    "llama3.2-1b": Slice("v5e:2x2", "tensor=1"),
    "llama3.2-3b": Slice("v5e:2x2", "tensor=1"),
    "llama3.1-8b": Slice("v5e:2x2", "tensor=4"),
    "llama3.1-70b": Slice("v5e:4x4", "expert=8,tensor=2", quant="int8", kv_quant="int8"),
    "llama3.1-405b": Slice("v5e:8x8", "expert=8,tensor=8", quant="int8", kv_quant="int8"),
}

"""The published configurations, as in their config.json: for dry runs and random weights."""

from typing import Any

from common.machines.chips import Slice


def _dense(**sizes: Any) -> dict[str, Any]:
    return dict(
        model_type="qwen3",
        vocab_size=151936,
        head_dim=128,
        num_key_value_heads=8,
        rms_norm_eps=1e-6,
        rope_theta=1000000,
        rope_scaling=None,
        max_position_embeddings=40960,
        torch_dtype="bfloat16",
        hidden_act="silu",
        attention_bias=False,
        use_sliding_window=False,
    ) | dict(sizes)


def _moe(**sizes: Any) -> dict[str, Any]:
    experts = dict(
        model_type="qwen3_moe",
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
    )
    return _dense(**experts) | dict(sizes)


def _qwen2(**sizes: Any) -> dict[str, Any]:
    return dict(
        model_type="qwen2",
        vocab_size=152064,
        rms_norm_eps=1e-6,
        rope_theta=1000000.0,
        max_position_embeddings=32768,
        torch_dtype="bfloat16",
        hidden_act="silu",
        tie_word_embeddings=False,
        use_sliding_window=False,
        sliding_window=131072,
        max_window_layers=sizes["num_hidden_layers"],
    ) | dict(sizes)


def _fp8(config: dict[str, Any]) -> dict[str, Any]:
    quantization = dict(
        activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[128, 128]
    )
    return config | dict(quantization_config=quantization)


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _dense(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-1.7b": _dense(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-4b": _dense(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": _dense(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=False,
    ),
    "qwen3-14b": _dense(
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=40,
        num_attention_heads=40,
        tie_word_embeddings=False,
    ),
    "qwen3-32b": _dense(
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        tie_word_embeddings=False,
    ),
    "qwen3-30b-a3b": _moe(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
    ),
    "qwen3-235b-a22b": _moe(
        hidden_size=4096,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
    ),
    "qwen3-coder-480b-a35b": _moe(
        hidden_size=6144,
        intermediate_size=8192,
        moe_intermediate_size=2560,
        num_hidden_layers=62,
        num_attention_heads=96,
        num_experts=160,
        rope_theta=10000000,
        max_position_embeddings=262144,
    ),
}
SHAPES |= {f"{name}-fp8": _fp8(config) for name, config in SHAPES.items()}
SHAPES |= {
    "qwen2.5-0.5b": _qwen2(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "qwen2.5-7b": _qwen2(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    ),
    "qwen2.5-32b": _qwen2(
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
    ),
}
SHAPES["r1-distill-qwen-7b"] = SHAPES["qwen2.5-7b"] | dict(
    rope_theta=10000, max_position_embeddings=131072
)
SHAPES["r1-distill-qwen-32b"] = SHAPES["qwen2.5-32b"] | dict(
    rms_norm_eps=1e-5, max_position_embeddings=131072
)

SLICES = {
    "qwen2.5-0.5b": Slice("v5e:2x2", "tensor=1"),
    "qwen2.5-7b": Slice("v5e:2x2", "tensor=4"),
    "qwen2.5-32b": Slice("v5e:2x4", "tensor=8", quant="int8", kv_quant="int8"),
    "qwen3-0.6b": Slice("v5e:2x2", "tensor=1"),
    "qwen3-1.7b": Slice("v5e:2x2", "tensor=1"),
    "qwen3-4b": Slice("v5e:2x2", "tensor=4"),
    "qwen3-8b": Slice("v5e:2x2", "tensor=4"),
    "qwen3-14b": Slice("v5e:2x4", "tensor=8"),
    "qwen3-32b": Slice("v5e:2x4", "tensor=8", quant="int8", kv_quant="int8"),
    "qwen3-30b-a3b": Slice("v5e:2x4", "expert=8"),
    "qwen3-235b-a22b": Slice("v5e:4x8", "expert=32"),
    "qwen3-coder-480b-a35b": Slice("v5e:8x8", "expert=32,tensor=2", quant="int8", kv_quant="int8"),
}

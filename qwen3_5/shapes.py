"""The published configurations, as in their config.json: for dry runs and random weights."""

from typing import Any

from common.machines.chips import Slice


def _text(**sizes: Any) -> dict[str, Any]:
    layers = sizes["num_hidden_layers"]
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)]
    rope = dict(rope_type="default", rope_theta=10000000, partial_rotary_factor=0.25)
    return dict(
        vocab_size=248320,
        head_dim=256,
        linear_num_key_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        full_attention_interval=4,
        layer_types=kinds,
        rope_parameters=rope,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        attention_bias=False,
        attn_output_gate=True,
        hidden_act="silu",
        mamba_ssm_dtype="float32",
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
        dtype="bfloat16",
    ) | dict(sizes)


def _nested(kind: str, tied: bool, **sizes: Any) -> dict[str, Any]:
    text = _text(model_type=f"{kind}_text", **sizes)
    rope = text["rope_parameters"] | dict(mrope_section=[11, 11, 10], mrope_interleaved=True)
    text["rope_parameters"] = rope
    return dict(model_type=kind, text_config=text, tie_word_embeddings=tied)


def _dense(tied: bool = False, **sizes: Any) -> dict[str, Any]:
    return _nested("qwen3_5", tied, **sizes)


def _moe(width: int, experts: int, chosen: int, **sizes: Any) -> dict[str, Any]:
    more = dict(num_experts=experts, num_experts_per_tok=chosen, moe_intermediate_size=width)
    more |= dict(shared_expert_intermediate_size=width)
    return _nested("qwen3_5_moe", False, **more, **sizes)


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": _dense(
        tied=True,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        linear_num_value_heads=16,
    ),
    "qwen3.5-2b": _dense(
        tied=True,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        linear_num_value_heads=16,
    ),
    "qwen3.5-4b": _dense(
        tied=True,
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        linear_num_value_heads=32,
    ),
    "qwen3.5-9b": _dense(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        linear_num_value_heads=32,
    ),
    "qwen3.8-27b": _dense(  # as 3.5 and 3.6
        hidden_size=5120,
        intermediate_size=17408,
        num_hidden_layers=64,
        num_attention_heads=24,
        num_key_value_heads=4,
        linear_num_value_heads=48,
    ),
    "qwen3.6-35b-a3b": _moe(  # as 3.5
        *(512, 256, 8),
        hidden_size=2048,
        num_hidden_layers=40,
        num_attention_heads=16,
        num_key_value_heads=2,
        linear_num_value_heads=32,
    ),
    "qwen3.5-122b-a10b": _moe(
        *(1024, 256, 8),
        hidden_size=3072,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=2,
        linear_num_value_heads=64,
    ),
    "qwen3.5-397b-a17b": _moe(
        *(1024, 512, 10),
        hidden_size=4096,
        num_hidden_layers=60,
        num_attention_heads=32,
        num_key_value_heads=2,
        linear_num_value_heads=64,
    ),
    "qwen3.8-2.4t-a95b": _text(  # holds text alone
        model_type="qwen3_5_moe_text",
        hidden_size=8192,
        num_hidden_layers=92,
        num_attention_heads=64,
        num_key_value_heads=4,
        linear_num_value_heads=128,
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=2048,
        shared_expert_intermediate_size=2048,
        tie_word_embeddings=False,
    ),
}
# For each size a TPU slice that holds it, and the mesh on it.
SLICES: dict[str, Slice] = {
    "qwen3.5-0.8b": Slice("v5e:1x1", "data=1"),
    "qwen3.5-2b": Slice("v5e:1x1", "data=1"),
    "qwen3.5-4b": Slice("v5e:1x1", "data=1"),
    "qwen3.5-9b": Slice("v5e:1x1", "data=1", quant="int8"),
    "qwen3.8-27b": Slice("v5e:2x4", "tensor=8"),
    "qwen3.6-35b-a3b": Slice("v5e:2x4", "expert=8"),
    "qwen3.5-122b-a10b": Slice("v5e:4x4", "expert=16", quant="int8"),
    "qwen3.8-2.4t-a95b": Slice("v5p:4x4x4", "expert=64", quant="int8"),
    "qwen3.5-397b-a17b": Slice("v5e:8x8", "data=2,expert=32", quant="int8"),
}

"""Qwen3.5, dense and as a mixture of experts: the text models, alone and with a vision tower."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from variants import Variant, sized

VISION = dict(
    depth=1, hidden_size=16, intermediate_size=24, num_heads=2, patch_size=2, out_hidden_size=16,
    num_position_embeddings=4, spatial_merge_size=1, temporal_patch_size=1,
)  # fmt: skip


def text(
    *sizes: int,
    linear: tuple[int, int, int, int],
    theta: float,
    rotated: float = 0.25,
    moe: tuple[int, int, int, int] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Returns settings. `linear`: key heads, value heads, and the width of each. `moe`: the width
    of an expert, all experts, those chosen per token, and the width of the shared one."""
    names = "head_dim vocab_size num_hidden_layers" + ("" if moe else " intermediate_size")
    settings = sized(names, sizes) | more
    names = "num_key_heads num_value_heads key_head_dim value_head_dim"
    settings |= {f"linear_{name}": n for name, n in zip(names.split(), linear, strict=True)}
    rope = dict(rope_type="default", rope_theta=theta, partial_rotary_factor=rotated)
    settings["rope_parameters"] = rope | dict(mrope_section=[1, 1, 0], mrope_interleaved=True)
    if moe is not None:
        names = "moe_intermediate_size num_experts num_experts_per_tok"
        names += " shared_expert_intermediate_size"
        settings |= dict(zip(names.split(), moe, strict=True))
    return settings


VARIANTS = {
    # Four key heads of 12, each with two value heads of 10; two heads of attention to a key head.
    "dense": Variant(
        1,
        transformers.Qwen3_5TextConfig(
            **text(40, 8, 2, 16, 131, 4, 34, linear=(4, 8, 12, 10), theta=300.0, rms_norm_eps=3e-3)
        ),
    ),
    "tied": Variant(
        2,
        transformers.Qwen3_5TextConfig(
            **text(
                *(36, 8, 4, 24, 113, 3, 46),
                linear=(2, 8, 8, 16),
                theta=90.0,
                rotated=0.5,
                rms_norm_eps=1e-3,
                full_attention_interval=3,
                tie_word_embeddings=True,
            )
        ),
        dtype=torch.bfloat16,
    ),
    "moe": Variant(
        3,
        Qwen3_5MoeTextConfig(
            **text(
                44,
                8,
                2,
                16,
                107,
                4,
                linear=(4, 8, 16, 12),
                theta=500.0,
                moe=(14, 6, 3, 26),
                rms_norm_eps=1e-2,
            )
        ),
    ),
}

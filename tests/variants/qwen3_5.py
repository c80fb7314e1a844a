"""Qwen3.5, dense and as a mixture of experts: the text models, alone and with a vision tower."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5Config, Qwen3_5MoeConfig
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


def nested(kind: Any, settings: dict[str, Any], **beside: Any) -> Any:
    """A published config: that of the text, and a vision tower."""
    return kind(text_config=settings, vision_config=VISION, **beside)


def as_published(directory: Path) -> None:
    """Adds the settings and a tensor that transformers reads over: a layer that drafts."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    more = dict(attn_output_gate=True, full_attention_interval=4, mamba_ssm_dtype="float32")
    config["text_config"] |= more | dict(
        mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False
    )
    file.write_text(json.dumps(config, indent=2) + "\n")
    tensors = load_file(stored := directory / "model.safetensors")
    save_file(tensors | {"mtp.norm.weight": torch.ones(4)}, stored, metadata={"format": "pt"})


def with_stacked_experts(directory: Path) -> None:
    """`as_published`, and the experts of a layer in two tensors."""
    as_published(directory)
    tensors = load_file(stored := directory / "model.safetensors")
    first = [name for name in tensors if name.endswith(".experts.0.gate_proj.weight")]
    for at in [name.removesuffix("0.gate_proj.weight") for name in first]:
        E = sum(name.startswith(at) for name in tensors) // 3
        gate, up, down = (
            torch.stack([tensors.pop(f"{at}{e}.{kind}_proj.weight") for e in range(E)])
            for kind in ("gate", "up", "down")
        )
        tensors[f"{at}gate_up_proj"], tensors[f"{at}down_proj"] = torch.cat([gate, up], 1), down
    save_file(tensors, stored, metadata={"format": "pt"})


PUBLISHED = dict(dtype=torch.bfloat16, finish=as_published)
VARIANTS = {
    # Four key heads of 12, each with two value heads of 10; two heads of attention to a key head.
    "dense": Variant(
        1,
        transformers.Qwen3_5TextConfig(
            **text(
                *(40, 8, 2, 16, 131, 4, 34),
                linear=(4, 8, 12, 10),
                theta=300.0,
                rms_norm_eps=1e-2,
                initializer_range=0.2,
            )
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
                rms_norm_eps=3e-3,
                initializer_range=0.2,
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
                *(44, 8, 2, 16, 107, 4),
                linear=(4, 8, 16, 12),
                theta=500.0,
                moe=(14, 6, 3, 26),
                rms_norm_eps=1e-2,
                initializer_range=0.2,
            )
        ),
    ),
    "nested_tied": Variant(
        7,
        nested(
            Qwen3_5Config,
            text(
                *(40, 6, 2, 20, 109, 4, 38),
                linear=(6, 6, 10, 12),
                theta=200.0,
                rotated=0.4,
                rms_norm_eps=1e-2,
                initializer_range=0.2,
                tie_word_embeddings=True,
            ),
            tie_word_embeddings=True,
        ),
        **PUBLISHED,
    ),
    "nested_moe": Variant(
        5,
        nested(
            Qwen3_5MoeConfig,
            text(
                *(44, 8, 2, 16, 103, 4),
                linear=(2, 8, 12, 8),
                theta=150.0,
                moe=(18, 8, 2, 22),
                rms_norm_eps=1e-2,
                initializer_range=0.2,
            ),
        ),
        dtype=torch.bfloat16,
        finish=with_stacked_experts,
    ),
    # Heads of 128 leave whole blocks; the other sizes leave partial ones.
    "nested_moe_fp8": Variant(
        6,
        nested(
            Qwen3_5MoeConfig,
            text(
                *(136, 4, 1, 128, 89, 2),
                linear=(1, 2, 128, 128),
                theta=500.0,
                moe=(144, 4, 2, 130),
                rms_norm_eps=1e-2,
                initializer_range=0.1,
                full_attention_interval=2,
            ),
        ),
        **PUBLISHED,
        fp8_scales=torch.float32,
    ),
}

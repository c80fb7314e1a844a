"""Qwen3, dense and as a mixture of experts, in bf16 and fp8; and Qwen2."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from variants import (
    Packing,
    Variant,
    awq,
    compressed,
    gptq,
    plain_rope,
    projections,
    sized,
    yarn_rope,
)


def qwen3(
    *sizes: int,
    rope: dict[str, Any],
    moe: tuple[int, int, int] | None = None,
    tied: bool = False,
    eps: float = 1e-4,
    **more: Any,
) -> Any:
    """Returns a config. `moe`: the width of an expert, all experts, and those chosen per token."""
    settings = sized("head_dim intermediate_size vocab_size num_hidden_layers", sizes)
    settings |= dict(rope_parameters=rope, tie_word_embeddings=tied, rms_norm_eps=eps)
    if moe is None:
        return transformers.Qwen3Config(**settings | more)
    names = ("moe_intermediate_size", "num_experts", "num_experts_per_tok")
    settings |= dict(zip(names, moe, strict=True), norm_topk_prob=True)
    return transformers.Qwen3MoeConfig(**settings | more)


def qwen2(*sizes: int, rope: dict[str, Any], tied: bool, eps: float) -> Any:
    settings = sized("intermediate_size vocab_size num_hidden_layers", sizes)
    settings |= dict(rope_parameters=rope, tie_word_embeddings=tied, rms_norm_eps=eps)
    settings |= dict(use_sliding_window=False, sliding_window=8, max_window_layers=1)
    return transformers.Qwen2Config(**settings)


def older_name(directory: Path) -> None:
    """Renames num_local_experts to num_experts, the spelling of published files."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["num_experts"] = config.pop("num_local_experts")
    file.write_text(json.dumps(config, indent=2) + "\n")


PUBLISHED_MOE = dict(dtype=torch.bfloat16, hub=True, rewrite=older_name)
VARIANTS = {
    "tied": Variant(
        1, qwen3(46, 9, 3, 14, 34, 131, 2, tied=True, eps=3e-3, rope=plain_rope(300.0)), hub=True
    ),
    # Wavelengths 6.3 to 86; YaRN's ramp is between pairs 2 and 7 of 8.
    "yarn": Variant(
        2,
        qwen3(40, 8, 2, 16, 29, 113, 3, eps=1e-5, rope=yarn_rope(20.0, 4.0, 32, 2.0, 0.5)),
        hub=True,
        dtype=torch.bfloat16,
    ),
    # The first and the last layer are sparse. YaRN's ramp is between pairs 0.2 and 2.7 of 4.
    "moe": Variant(
        3,
        qwen3(
            *(40, 10, 5, 8, 36, 107, 3),
            tied=True,
            moe=(14, 6, 3),
            mlp_only_layers=[1],
            rope=yarn_rope(30.0, 3.0, 50, 6.7, 0.8, attention_factor=1.3, truncate=False),
        ),
        shard="60KB",
    ),
    # The second layer is sparse.
    "moe_untied": Variant(
        4,
        qwen3(
            *(44, 8, 4, 10, 34, 97, 3),
            eps=1e-6,
            moe=(26, 12, 2),
            norm_topk_prob=False,
            decoder_sparse_step=2,
            rope=plain_rope(700.0),
        ),
        **PUBLISHED_MOE,
    ),
    # Every size but the head width leaves a partial block. The second layer is sparse.
    "moe_fp8": Variant(
        5,
        qwen3(
            *(136, 4, 1, 128, 164, 89, 2),
            tied=True,
            eps=1e-5,
            moe=(144, 4, 2),
            decoder_sparse_step=2,
            rope=plain_rope(500.0),
        ),
        **PUBLISHED_MOE,
        fp8_scales=torch.bfloat16,
    ),
    "fp8": Variant(
        6,
        qwen3(152, 6, 2, 24, 180, 83, 1, eps=1e-3, rope=plain_rope(400.0)),
        dtype=torch.bfloat16,
        fp8_scales=torch.float32,
    ),
    "qwen2": Variant(
        7, qwen2(72, 6, 2, 50, 127, 2, tied=True, eps=1e-5, rope=plain_rope(300.0)), hub=True
    ),
    "qwen2_untied": Variant(
        8,
        qwen2(80, 8, 8, 38, 101, 2, tied=False, eps=1e-6, rope=plain_rope(90.0)),
        dtype=torch.bfloat16,
        shard="30KB",
    ),
    "packed_awq": Variant(
        21,
        qwen3(64, 6, 2, 16, 192, 101, 2, rope=plain_rope(300.0)),
        dtype=torch.float16,
        hub=True,
        packing=Packing(awq(32), projections),
    ),
    "packed_awq_moe": Variant(
        22,
        qwen3(
            *(64, 8, 4, 8, 96, 97, 2),
            tied=True,
            moe=(32, 6, 2),
            mlp_only_layers=[1],
            rope=plain_rope(500.0),
        ),
        dtype=torch.float16,
        packing=Packing(awq(8), projections),
    ),
    "packed_gptq_int8": Variant(
        23,
        qwen3(64, 8, 8, 12, 160, 83, 2, tied=True, rope=plain_rope(200.0)),
        dtype=torch.float16,
        hub=True,
        packing=Packing(gptq(8, 8), projections),
    ),
    "packed_gptq_moe": Variant(
        24,
        qwen3(64, 8, 4, 16, 96, 107, 2, moe=(32, 8, 3), rope=plain_rope(400.0)),
        **PUBLISHED_MOE,
        packing=Packing(gptq(4, 16, checkpoint_format="gptq", sym=True), projections),
    ),
    # Experts in 8-bit floats, with a scale for each row.
    "packed_fp8": Variant(
        25,
        qwen3(
            42, 6, 2, 14, 34, 103, 2, moe=(26, 4, 2), mlp_only_layers=[0], rope=plain_rope(600.0)
        ),
        **PUBLISHED_MOE,
        packing=Packing(
            compressed("float-quantized", ["lm_head", "re:.*mlp.gate$"], 8, None, type="float"),
            projections,
        ),
    ),
}

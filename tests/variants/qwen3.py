"""Qwen3, dense and as a mixture of experts, in bf16 and fp8; and Qwen2."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from variants import Packing, Variant, awq, compressed, gptq, projections, yarn_rope


def qwen3(
    hidden: int,
    heads: int,
    kv_heads: int,
    head: int,
    ffn: int,
    vocab: int,
    layers: int,
    **more: Any,
) -> Any:
    kind = transformers.Qwen3MoeConfig if "num_experts" in more else transformers.Qwen3Config
    return kind(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        intermediate_size=ffn,
        vocab_size=vocab,
        num_hidden_layers=layers,
        initializer_range=0.25,
        max_position_embeddings=512,
        **more,
    )


def qwen2(hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more: Any) -> Any:
    return transformers.Qwen2Config(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        vocab_size=vocab,
        num_hidden_layers=2,
        initializer_range=0.25,
        max_position_embeddings=512,
        use_sliding_window=False,
        sliding_window=8,
        max_window_layers=1,
        **more,
    )


def older_name(directory: Path) -> None:
    """Renames num_local_experts to num_experts, the spelling of published files."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["num_experts"] = config.pop("num_local_experts")
    file.write_text(json.dumps(config, indent=2) + "\n")


VARIANTS = {
    "tied": Variant(
        1,
        qwen3(
            *(46, 9, 3, 14, 34, 131, 2),
            tie_word_embeddings=True,
            rms_norm_eps=3e-3,
            rope_parameters=dict(rope_type="default", rope_theta=300.0),
        ),
        hub=True,
    ),
    # Wavelengths 6.3 to 86; YaRN's ramp is between pairs 2 and 7 of 8.
    "yarn": Variant(
        2,
        qwen3(
            *(40, 8, 2, 16, 29, 113, 3),
            tie_word_embeddings=False,
            rms_norm_eps=1e-5,
            rope_parameters=yarn_rope(20.0, 4.0, 32, beta_fast=2.0, beta_slow=0.5),
        ),
        hub=True,
        dtype=torch.bfloat16,
    ),
    # The first and the last layer are sparse. YaRN's ramp is between pairs 0.2 and 2.7 of 4.
    "moe": Variant(
        3,
        qwen3(
            *(40, 10, 5, 8, 36, 107, 3),
            tie_word_embeddings=True,
            rms_norm_eps=1e-4,
            moe_intermediate_size=14,
            num_experts=6,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            rope_parameters=yarn_rope(
                *(30.0, 3.0, 50), beta_fast=6.7, beta_slow=0.8, attention_factor=1.3, truncate=False
            ),
        ),
        shard="60KB",
    ),
    # The second layer is sparse.
    "moe_untied": Variant(
        4,
        qwen3(
            *(44, 8, 4, 10, 34, 97, 3),
            tie_word_embeddings=False,
            rms_norm_eps=1e-6,
            moe_intermediate_size=26,
            num_experts=12,
            num_experts_per_tok=2,
            norm_topk_prob=False,
            decoder_sparse_step=2,
            rope_parameters=dict(rope_type="default", rope_theta=700.0),
        ),
        dtype=torch.bfloat16,
        hub=True,
        rewrite=older_name,
    ),
    # Every size but the head width leaves a partial block. The second layer is sparse.
    "moe_fp8": Variant(
        5,
        qwen3(
            *(136, 4, 1, 128, 164, 89, 2),
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            moe_intermediate_size=144,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            decoder_sparse_step=2,
            rope_parameters=dict(rope_type="default", rope_theta=500.0),
        ),
        dtype=torch.bfloat16,
        hub=True,
        rewrite=older_name,
        fp8_scales=torch.bfloat16,
    ),
    "fp8": Variant(
        6,
        qwen3(
            *(152, 6, 2, 24, 180, 83, 1),
            tie_word_embeddings=False,
            rms_norm_eps=1e-3,
            rope_parameters=dict(rope_type="default", rope_theta=400.0),
        ),
        dtype=torch.bfloat16,
        fp8_scales=torch.float32,
    ),
    "qwen2": Variant(
        7,
        qwen2(
            *(72, 6, 2, 50, 127),
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
            rope_parameters=dict(rope_type="default", rope_theta=300.0),
        ),
        hub=True,
    ),
    "qwen2_untied": Variant(
        8,
        qwen2(
            *(80, 8, 8, 38, 101),
            tie_word_embeddings=False,
            rms_norm_eps=1e-6,
            rope_parameters=dict(rope_type="default", rope_theta=90.0),
        ),
        dtype=torch.bfloat16,
        shard="30KB",
    ),
    "packed_awq": Variant(
        21,
        qwen3(
            *(64, 6, 2, 16, 192, 101, 2),
            tie_word_embeddings=False,
            rms_norm_eps=1e-4,
            rope_parameters=dict(rope_type="default", rope_theta=300.0),
        ),
        dtype=torch.float16,
        hub=True,
        packing=Packing(awq(32), projections),
    ),
    "packed_awq_moe": Variant(
        22,
        qwen3(
            *(64, 8, 4, 8, 96, 97, 2),
            tie_word_embeddings=True,
            rms_norm_eps=1e-4,
            moe_intermediate_size=32,
            num_experts=6,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            mlp_only_layers=[1],
            rope_parameters=dict(rope_type="default", rope_theta=500.0),
        ),
        dtype=torch.float16,
        packing=Packing(awq(8), projections),
    ),
    "packed_gptq_int8": Variant(
        23,
        qwen3(
            *(64, 8, 8, 12, 160, 83, 2),
            tie_word_embeddings=True,
            rms_norm_eps=1e-4,
            rope_parameters=dict(rope_type="default", rope_theta=200.0),
        ),
        dtype=torch.float16,
        hub=True,
        packing=Packing(gptq(8, 8), projections),
    ),
    "packed_gptq_moe": Variant(
        24,
        qwen3(
            *(64, 8, 4, 16, 96, 107, 2),
            tie_word_embeddings=False,
            rms_norm_eps=1e-4,
            moe_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=3,
            norm_topk_prob=True,
            rope_parameters=dict(rope_type="default", rope_theta=400.0),
        ),
        dtype=torch.bfloat16,
        hub=True,
        rewrite=older_name,
        packing=Packing(gptq(4, 16, checkpoint_format="gptq", sym=True), projections),
    ),
    # Experts in 8-bit floats, with a scale for each row.
    "packed_fp8": Variant(
        25,
        qwen3(
            *(42, 6, 2, 14, 34, 103, 2),
            tie_word_embeddings=False,
            rms_norm_eps=1e-4,
            moe_intermediate_size=26,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            mlp_only_layers=[0],
            rope_parameters=dict(rope_type="default", rope_theta=600.0),
        ),
        dtype=torch.bfloat16,
        hub=True,
        rewrite=older_name,
        packing=Packing(
            compressed("float-quantized", ["lm_head", "re:.*mlp.gate$"], 8, None, type="float"),
            projections,
        ),
    ),
}

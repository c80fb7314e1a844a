"""Llama 3 with and without rope scaling, and in several files."""

from typing import Any

import torch
import transformers

from variants import Variant


def llama(
    hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, layers: int, **options: Any
) -> Any:
    return transformers.LlamaConfig(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=ffn,
        vocab_size=vocab,
        num_hidden_layers=layers,
        initializer_range=0.25,
        max_position_embeddings=512,
        **options,
    )


def llama3_rope(
    theta: float, factor: float, low: float, high: float, original: int
) -> dict[str, Any]:
    return dict(
        rope_type="llama3",
        rope_theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )


VARIANTS = {
    # Wavelengths 6.3, 23 and 85, with band edges at 8 and 32: the first is kept, the second lies
    # between, the third is slowed.
    "scaled": Variant(
        1,
        llama(
            54,
            9,
            3,
            46,
            131,
            2,
            rms_norm_eps=3e-3,
            rope_parameters=llama3_rope(50.0, 8.0, 1.0, 4.0, 32),
        ),
        hub=True,
    ),
    "tied": Variant(
        2,
        llama(48, 8, 2, 37, 113, 3, tie_word_embeddings=True, rms_norm_eps=1e-5),
        hub=True,
    ),
    "wide_heads": Variant(
        3,
        llama(
            *(30, 10, 1, 44, 97, 2),
            head_dim=14,
            rms_norm_eps=1e-2,
            rope_parameters=dict(rope_type="default", rope_theta=700.0),
        ),
    ),
    # Heads of a width that the GPU kernel supports.
    "heads_of_16": Variant(6, llama(36, 6, 2, 40, 101, 2, head_dim=16)),
    # Wavelengths 6.3, 18, 50 and 140, with band edges at 10 and 60.
    "bf16_sharded": Variant(
        5,
        llama(
            40,
            10,
            5,
            58,
            107,
            2,
            head_dim=8,
            rope_parameters=llama3_rope(64.0, 4.0, 1.0, 6.0, 60),
        ),
        dtype=torch.bfloat16,
        shard="20KB",
    ),
}

"""GPT-OSS, with plain experts and with experts in 4 bits."""

from typing import Any

import torch
import transformers

from variants import Variant


def gpt_oss(
    *sizes: int, head_dim: int, theta: float, factor: float, original: int, **options: Any
) -> Any:
    names = "hidden_size num_attention_heads num_key_value_heads intermediate_size vocab_size "
    names += "num_hidden_layers num_local_experts num_experts_per_tok"
    return transformers.GptOssConfig(
        **dict(zip(names.split(), sizes, strict=True)),
        head_dim=head_dim,
        sliding_window=8,
        swiglu_limit=1.5,  # a third of the numbers exceed it
        initializer_range=0.25,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=theta,
            factor=factor,
            beta_fast=4.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=original,
        ),
        **options,
    )


# Each YaRN ramp begins and ends between two pairs: at 0.2 and 1.3 of 3 pairs, at 1.3 and 2.7 of 7,
# at 0.6 and 2.1 of 4.
VARIANTS = {
    "plain": Variant(
        6,
        gpt_oss(
            *(50, 9, 3, 46, 131, 2, 6, 3),
            head_dim=6,
            theta=50.0,
            factor=8.0,
            original=32,
            rms_norm_eps=3e-3,
        ),
        hub=True,
    ),
    "tied_bf16": Variant(
        7,
        gpt_oss(
            *(44, 10, 1, 30, 97, 3, 6, 2),
            head_dim=14,
            theta=200.0,
            factor=4.0,
            original=48,
            tie_word_embeddings=True,
        ),
        dtype=torch.bfloat16,
        shard="40KB",
    ),
    "mxfp4": Variant(
        8,
        gpt_oss(*(96, 10, 5, 64, 107, 2, 8, 3), head_dim=8, theta=100.0, factor=16.0, original=45),
        dtype=torch.bfloat16,
        hub=True,
        mxfp4=True,
    ),
}

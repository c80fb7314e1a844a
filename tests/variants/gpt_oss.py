"""GPT-OSS, with plain experts and with experts in 4 bits."""

from typing import Any

import torch
import transformers

from variants import Variant, sized, yarn_rope


def gpt_oss(*sizes: int, yarn: tuple[float, float, int], **options: Any) -> Any:
    """Returns a config. `yarn`: the base, the factor and the original length."""
    names = "intermediate_size vocab_size num_hidden_layers num_local_experts "
    names += "num_experts_per_tok head_dim"
    return transformers.GptOssConfig(
        **sized(names, sizes),
        sliding_window=8,
        swiglu_limit=1.5,  # a third of the numbers exceed it
        bos_token_id=None,
        eos_token_id=None,
        rope_parameters=yarn_rope(*yarn, 4.0, 1.0, truncate=False),
        **options,
    )


# Each YaRN ramp begins and ends between two pairs: at 0.2 and 1.3 of 3 pairs, at 1.3 and 2.7 of 7,
# at 0.6 and 2.1 of 4.
VARIANTS = {
    "plain": Variant(
        6,
        gpt_oss(50, 9, 3, 46, 131, 2, 6, 3, 6, yarn=(50.0, 8.0, 32), rms_norm_eps=3e-3),
        hub=True,
    ),
    "tied_bf16": Variant(
        7,
        gpt_oss(44, 10, 1, 30, 97, 3, 6, 2, 14, yarn=(200.0, 4.0, 48), tie_word_embeddings=True),
        dtype=torch.bfloat16,
        shard="40KB",
    ),
    "mxfp4": Variant(
        8,
        gpt_oss(96, 10, 5, 64, 107, 2, 8, 3, 8, yarn=(100.0, 16.0, 45)),
        dtype=torch.bfloat16,
        hub=True,
        mxfp4=True,
    ),
}

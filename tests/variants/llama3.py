"""Llama 3 with and without rope scaling, and in several files."""

from typing import Any

import torch
import transformers

from variants import Packing, Variant, compressed, gptq, llama3_rope, plain_rope, projections, sized


def llama(*sizes: int, **options: Any) -> Any:
    settings = sized("intermediate_size vocab_size num_hidden_layers", sizes)
    return transformers.LlamaConfig(**settings, **options)


def in_w8a16(name: str) -> bool:
    return projections(name) and "layers.0.self_attn.k" not in name


VARIANTS = {
    # Wavelengths 6.3, 23 and 85, with band edges at 8 and 32: the first is kept, the second lies
    # between, the third is slowed.
    "scaled": Variant(
        1,
        llama(
            *(54, 9, 3, 46, 131, 2),
            **dict(rms_norm_eps=3e-3, rope_parameters=llama3_rope(50.0, 8.0, 1.0, 4.0, 32)),
        ),
        hub=True,
    ),
    "tied": Variant(
        2, llama(48, 8, 2, 37, 113, 3, tie_word_embeddings=True, rms_norm_eps=1e-5), hub=True
    ),
    "wide_heads": Variant(
        3,
        llama(
            *(30, 10, 1, 44, 97, 2),
            **dict(head_dim=14, rms_norm_eps=1e-2, rope_parameters=plain_rope(700.0)),
        ),
    ),
    # Heads of a width that the GPU kernel supports.
    "heads_of_16": Variant(6, llama(36, 6, 2, 40, 101, 2, head_dim=16)),
    # Wavelengths 6.3, 18, 50 and 140, with band edges at 10 and 60.
    "bf16_sharded": Variant(
        5,
        llama(
            40, 10, 5, 58, 107, 2, head_dim=8, rope_parameters=llama3_rope(64.0, 4.0, 1.0, 6.0, 60)
        ),
        dtype=torch.bfloat16,
        shard="20KB",
    ),
    # The first layer's attention is not quantised.
    "packed_w4a16": Variant(
        21,
        llama(96, 6, 2, 192, 101, 2, head_dim=32, rms_norm_eps=1e-4),
        hub=True,
        packing=Packing(
            compressed("pack-quantized", ["lm_head", "re:.*layers\\.0\\.self_attn.*"], 4, 16),
            lambda name: projections(name) and "layers.0.self_attn" not in name,
        ),
    ),
    # Keys and values have 12 rows, so their zero points only half fill the last words.
    "packed_asymmetric": Variant(
        22,
        llama(48, 8, 1, 96, 97, 2, head_dim=12, rms_norm_eps=1e-3, tie_word_embeddings=True),
        dtype=torch.bfloat16,
        packing=Packing(
            compressed("pack-quantized", ["model.layers.1.mlp.up_proj"], 4, 8, symmetric=False),
            lambda name: projections(name) and "layers.1.mlp.up" not in name,
        ),
    ),
    # The head is quantised too. No row fills its last word.
    "packed_w8a16": Variant(
        23,
        llama(54, 9, 3, 46, 131, 2, rms_norm_eps=1e-3),
        packing=Packing(
            compressed("pack-quantized", ["model.layers.0.self_attn.k_proj"], 8, None),
            lambda name: name == "lm_head.weight" or in_w8a16(name),
        ),
    ),
    "packed_fbgemm": Variant(
        24,
        llama(50, 5, 1, 38, 107, 2, rms_norm_eps=1e-4),
        dtype=torch.bfloat16,
        hub=True,
        packing=Packing(
            dict(
                quant_method="fbgemm_fp8",
                activation_scale_ub=1200.0,
                modules_to_not_convert=["lm_head", "model.layers.1.self_attn"],
            ),
            lambda name: projections(name) and "layers.1.self_attn" not in name,
        ),
    ),
    "packed_gptq": Variant(
        25,
        llama(64, 8, 2, 192, 89, 2, head_dim=16, rms_norm_eps=1e-4),
        dtype=torch.float16,
        hub=True,
        packing=Packing(gptq(4, 16, sym=False), projections),
    ),
}

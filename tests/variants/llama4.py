"""Llama 4 with a vision tower, like Scout and like Maverick, and for text alone. Within the
prompts, attention chunks end and temperatures change several times."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from variants import Packing, Variant, compressed, llama3_rope, plain_rope, sized


def llama4(
    *sizes: int, moe: tuple[int, int], widths: tuple[int, int], deviation: float, **options: Any
) -> Any:
    """Returns a config. `moe`: experts, and those chosen per token. `widths`: of an expert, and of
    a dense layer."""
    names = "head_dim vocab_size num_hidden_layers num_local_experts num_experts_per_tok "
    names += "intermediate_size intermediate_size_mlp"
    settings = sized(names, (*sizes, *moe, *widths), deviation)
    settings |= dict(bos_token_id=None, eos_token_id=None, rope_parameters=plain_rope(40.0))
    return transformers.Llama4TextConfig(**settings | options)


def beside_images(directory: Path) -> None:
    """Converts the files to those of a model with a vision tower, with config.json as published."""
    file, text = directory / "config.json", load_file(directory / "model.safetensors")
    config = json.loads(file.read_text())
    vision = dict(hidden_size=8, intermediate_size=32, num_attention_heads=2, num_hidden_layers=1)
    vision |= dict(image_size=16, patch_size=8, vision_output_dim=8)
    vision |= dict(projector_input_dim=8, projector_output_dim=8)
    whole = transformers.Llama4Config(text_config=copy.deepcopy(config), vision_config=vision)
    both, dtype = transformers.Llama4ForConditionalGeneration(whole), config.pop("torch_dtype")
    both.to(getattr(torch, dtype)).save_pretrained(directory)
    (directory / "generation_config.json").unlink()
    tensors = load_file(directory / "model.safetensors")
    named = {f"language_model.{name}": tensor for name, tensor in text.items()}
    assert named.keys() < tensors.keys()
    save_file(tensors | named, directory / "model.safetensors", metadata={"format": "pt"})
    if config["attn_temperature_tuning"]:
        config["attn_temperature_tuning"] = 4
    written = json.loads(file.read_text()) | dict(text_config=config, torch_dtype=dtype)
    written.pop("dtype", None)
    file.write_text(json.dumps(written, indent=2) + "\n")


def without(*keys: str) -> Any:
    """Returns a function that removes keys from config.json. transformers writes them; published
    files lack them."""

    def rewrite(directory: Path) -> None:
        file = directory / "config.json"
        config = json.loads(file.read_text())
        for key in keys:
            config.pop(key)
        file.write_text(json.dumps(config, indent=2) + "\n")

    return rewrite


def but_attention(name: str) -> bool:
    return name.removesuffix(".weight").endswith("_proj") and "self_attn" not in name


SCOUT = dict(deviation=0.18, attention_chunk_size=12, floor_scale=9, attn_scale=0.4)
MAVERICK = dict(deviation=0.18, attention_chunk_size=16, floor_scale=20, attn_scale=0.3)
MAVERICK |= dict(widths=(30, 46), use_qk_norm=False, rms_norm_eps=1e-4)
VARIANTS = {
    "scout": Variant(
        14,
        llama4(
            *(50, 9, 3, 6, 131, 4),
            **dict(moe=(6, 1), widths=(34, 58), **SCOUT),
            rms_norm_eps=3e-3,
            rope_parameters=llama3_rope(40.0, 4.0, 1.0, 1.0, 32),
        ),
        hub=True,
        rewrite=without("layer_types", "moe_layers", "no_rope_layers"),
        finish=beside_images,
    ),
    "maverick": Variant(
        15,
        llama4(
            *(44, 10, 5, 8, 97, 4),
            **dict(moe=(8, 2), moe_layers=[1, 3], no_rope_layers=[1, 0, 1, 0], **MAVERICK),
        ),
        dtype=torch.bfloat16,
        hub=True,
        rewrite=without("layer_types"),
        finish=beside_images,
    ),
    "text": Variant(
        16,
        llama4(
            *(38, 11, 1, 14, 107, 3),
            **dict(moe=(6, 1), widths=(26, 42), deviation=0.25),
            interleave_moe_layer_step=2,
            no_rope_layer_interval=3,
            attention_chunk_size=10,
            attn_temperature_tuning=False,
            floor_scale=10,
            tie_word_embeddings=True,
            rms_norm_eps=1e-5,
        ),
        rewrite=without("moe_layers"),
        shard="40KB",
    ),
    # As Maverick is published in fp8: experts one by one.
    "packed_maverick": Variant(
        21,
        llama4(44, 10, 5, 8, 97, 2, moe=(4, 2), **MAVERICK),
        dtype=torch.bfloat16,
        packing=Packing(
            compressed(
                "float-quantized",
                ["re:.*lm_head", "re:.*self_attn", "re:.*router", "re:.*vision_model.*"],
                *(8, None),
                type="float",
            ),
            but_attention,
        ),
    ),
    # As Scout is published in w4a16: gate and up have scales and shapes of their own.
    "packed_scout": Variant(
        22,
        llama4(48, 6, 2, 8, 89, 2, moe=(4, 1), widths=(32, 56), **SCOUT, rms_norm_eps=1e-4),
        dtype=torch.bfloat16,
        packing=Packing(
            compressed("pack-quantized", ["lm_head", "re:.*self_attn", "re:.*router"], 4, 8),
            but_attention,
        ),
    ),
}

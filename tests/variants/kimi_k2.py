"""Kimi K2, which is DeepSeek V3 without groups of experts, in float32 and fp8. transformers does
not know its model_type, so config.json gets it after the goldens are made. Kimi K2.5 is K2 with a
vision tower, and transformers has a class of its own for it."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from variants import Packing, Variant, compressed, plain_rope, projections, yarn_rope
from variants.deepseek_r1 import as_on_the_hub, deepseek, routing


def as_kimi(directory: Path) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text()) | dict(model_type="kimi_k2", num_nextn_predict_layers=0)
    config.pop("num_mtp_layers", None)
    file.write_text(json.dumps(config, indent=2) + "\n")


def with_vision(text: Any) -> Any:
    """The config of K2.5 with this text model."""
    vision = dict(hidden_size=8, intermediate_size=12, num_attention_heads=2, num_hidden_layers=1)
    vision |= dict(patch_size=2, pos_emb_height=3, pos_emb_width=5, pos_emb_time=2)
    parts = dict(text_config=text.to_dict(), vision_config=vision, projection_hidden_size=8)
    return transformers.Kimi_K25Config(**parts, tie_word_embeddings=False)


def k25(*sizes: Any, scale: float) -> Any:
    """A config of Kimi K2.5 with a text part of these sizes, see `deepseek`."""
    rope = yarn_rope(30.0, 8.0, 20, 3.0, 1.0, mscale=1.0, mscale_all_dim=1.0)
    more = dict(routing(1, 1, True, scale), rms_norm_eps=1e-4, rope_parameters=rope)
    return with_vision(deepseek(*sizes, **more))


def as_k25_on_the_hub(directory: Path) -> None:
    """Gives settings and tensors their published names. transformers 5.24 reads these, but saves
    some in other ways: `layers` of the text model as `blocks`, as they are called in the tower."""
    names = {"language_model.model.blocks": "language_model.model.layers"}
    names |= {"vision_tower.encoder.patch_embed": "vision_tower.patch_embed"}
    names |= {"model.mm_projector": "mm_projector"}
    tensors = load_file(file := directory / "model.safetensors")
    for before, after in names.items():
        tensors = {name.replace(before, after): tensor for name, tensor in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((file := directory / "config.json").read_text())
    text, rope = config["text_config"], config["text_config"].pop("rope_parameters")
    for name in ("head_dim", "qk_head_dim", "rope_interleave"):
        text.pop(name)
    text |= dict(model_type="kimi_k2", num_nextn_predict_layers=0, scoring_func="sigmoid")
    text |= dict(topk_method="noaux_tc", moe_layer_freq=1, ep_size=1, seq_aux=True)
    text |= dict(rope_theta=rope.pop("rope_theta"), aux_loss_alpha=0.001)
    text["rope_scaling"] = dict(type=rope.pop("rope_type")) | rope
    config |= dict(media_placeholder_token_id=163605, ignore_index=-100)
    config |= dict(
        use_unified_vision_chunk=True, video_placeholder="<|kimi_k25_video_placeholder|>"
    )
    file.write_text(json.dumps(config, indent=2) + "\n")


def quantised_in_text(directory: Path) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    file.write_text(json.dumps(config, indent=2) + "\n")


PUBLISHED = dict(hub=True, rewrite=as_on_the_hub, finish=as_kimi)
THINKING = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
THINKING += ["re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
EXPERTS_IN_INT4 = Packing(
    compressed("pack-quantized", THINKING, 4, 32),
    lambda name: projections(name) and ".experts." in name,
)
VARIANTS = {
    # YaRN's ramp is one pair wide, as in the published files.
    "yarn": Variant(
        11,
        deepseek(
            *(46, 10, (26, 20), (10, 12, 14), (34, 18), (24, 3, 1), 131, 3),
            **routing(1, 1, True, 0.7),
            rms_norm_eps=1e-3,
            rope_parameters=yarn_rope(20.0, 4.0, 24, 1.0, 1.0, mscale=1.0, mscale_all_dim=1.0),
        ),
        **PUBLISHED,
    ),
    "plain": Variant(
        12,
        deepseek(
            *(38, 9, (14, 22), (8, 6, 16), (44, 14), (12, 4, 2), 97, 2),
            **routing(1, 1, False, 1.5),
            rms_norm_eps=1e-4,
            rope_parameters=plain_rope(300.0),
        ),
        dtype=torch.bfloat16,
        **PUBLISHED,
    ),
    "fp8": Variant(
        13,
        deepseek(
            *(136, 16, (140, 100), (32, 16, 32), (164, 144), (6, 2, 1), 83, 2),
            deviation=0.12,
            **routing(1, 1, True, 0.8),
            rms_norm_eps=1e-5,
            rope_parameters=yarn_rope(60.0, 2.0, 30, 1.0, 1.0, mscale=1.0, mscale_all_dim=1.0),
        ),
        dtype=torch.bfloat16,
        **PUBLISHED,
        fp8_scales=torch.float32,
    ),
    # As Kimi-K2-Thinking is published: only the routed experts are quantised.
    "packed_thinking": Variant(
        21,
        deepseek(
            *(64, 6, (26, 20), (10, 12, 14), (34, 96), (6, 2, 1), 109, 2),
            **routing(1, 1, True, 0.7),
            rms_norm_eps=1e-3,
            rope_parameters=plain_rope(300.0),
        ),
        dtype=torch.bfloat16,
        **PUBLISHED,
        packing=EXPERTS_IN_INT4,
    ),
    "k25": Variant(
        14,
        k25(42, 6, (22, 18), (8, 10, 14), (38, 16), (10, 3, 1), 103, 3, scale=0.9),
        dtype=torch.bfloat16,
        rewrite=as_k25_on_the_hub,
    ),
    "packed_k25": Variant(
        22,
        k25(64, 4, (18, 22), (6, 8, 10), (40, 96), (6, 2, 1), 101, 2, scale=0.8),
        dtype=torch.bfloat16,
        rewrite=as_k25_on_the_hub,
        finish=quantised_in_text,
        packing=EXPERTS_IN_INT4,
    ),
}

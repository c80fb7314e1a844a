"""Kimi K2, which is DeepSeek V3 without groups of experts, in float32 and fp8. transformers does
not know its model_type, so config.json gets it after the goldens are made."""

import json
from pathlib import Path

import torch

from variants import Packing, Variant, compressed, plain_rope, projections, yarn_rope
from variants.deepseek_r1 import as_on_the_hub, deepseek, routing


def as_kimi(directory: Path) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text()) | dict(model_type="kimi_k2", num_nextn_predict_layers=0)
    config.pop("num_mtp_layers", None)
    file.write_text(json.dumps(config, indent=2) + "\n")


PUBLISHED = dict(hub=True, rewrite=as_on_the_hub, finish=as_kimi)
THINKING = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
THINKING += ["re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]
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
        packing=Packing(
            compressed("pack-quantized", THINKING, 4, 32),
            lambda name: projections(name) and ".experts." in name,
        ),
    ),
}

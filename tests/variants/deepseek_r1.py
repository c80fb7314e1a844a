"""DeepSeek V3 in float32, bf16 and fp8, with and without a low-rank bottleneck in the queries; and
DeepSeek V2."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers

from variants import Variant, plain_rope, sized, yarn_rope


def deepseek(
    *sizes: Any, kind: Any = transformers.DeepseekV3Config, deviation: float = 0.25, **more: Any
) -> Any:
    """Returns a config. Among the sizes, `ranks`: of the queries, of the latents. `widths` of a
    head: unrotated, rotated, values. `ffn`: dense, expert. `experts`: all, chosen per token,
    shared."""
    hidden, heads, ranks, widths, ffn, experts, vocab, layers = sizes
    names = "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
    names += "intermediate_size moe_intermediate_size n_routed_experts num_experts_per_tok "
    names += "n_shared_experts vocab_size num_hidden_layers first_k_dense_replace"
    flat = (hidden, heads, heads, *ranks, *widths, *ffn, *experts, vocab, layers, 1)
    return kind(**sized(names, flat, deviation), **more)


def routing(groups: int, kept: int, normalised: bool, factor: float) -> dict[str, Any]:
    shared = dict(n_group=groups, topk_group=kept)
    return shared | dict(norm_topk_prob=normalised, routed_scaling_factor=factor)


def as_on_the_hub(directory: Path) -> None:
    """Adds settings that published files have and transformers 5 does not write. Removes those that
    only transformers 5 writes."""
    file = directory / "config.json"
    config = json.loads(file.read_text())
    for name in ("head_dim", "qk_head_dim", "rope_interleave"):
        config.pop(name, None)
    v2 = config["model_type"] == "deepseek_v2"
    config |= dict(moe_layer_freq=1, ep_size=1, seq_aux=True, aux_loss_alpha=0.001)
    config["scoring_func"] = "softmax" if v2 else "sigmoid"
    config.setdefault("topk_method", "noaux_tc")
    if config.get("rope_scaling"):
        config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")
    file.write_text(json.dumps(config, indent=2) + "\n")


VARIANTS = {
    # Everything that V3 has, in sizes that no number of devices divides. YaRN's ramp begins and
    # ends within the pairs.
    "yarn": Variant(
        1,
        deepseek(
            *(46, 9, (26, 20), (10, 12, 14), (34, 18), (24, 3, 1), 131, 3),
            **routing(4, 2, True, 0.6),
            rms_norm_eps=1e-3,
            rope_parameters=yarn_rope(20.0, 4.0, 24, 3.0, 0.5, mscale=0.8, mscale_all_dim=0.5),
        ),
        shard="200KB",
    ),
    # Like models that a laptop runs: one matrix for the queries, no groups of experts, experts'
    # weights that are not normalised, no YaRN.
    "small": Variant(
        2,
        deepseek(
            *(38, 10, (None, 22), (8, 6, 16), (44, 14), (10, 4, 2), 97, 2),
            **routing(1, 1, False, 1.5),
            rms_norm_eps=1e-4,
            tie_word_embeddings=True,
            rope_parameters=plain_rope(300.0),
        ),
        dtype=torch.bfloat16,
        hub=True,
        rewrite=as_on_the_hub,
    ),
    "v2": Variant(
        3,
        deepseek(
            *(42, 6, (None, 18), (12, 8, 10), (30, 22), (12, 4, 2), 101, 2),
            kind=transformers.DeepseekV2Config,
            n_group=4,
            topk_group=2,
            topk_method="group_limited_greedy",
            routed_scaling_factor=1.6,
            rms_norm_eps=1e-5,
            rope_parameters=yarn_rope(50.0, 8.0, 16, 4.0, 1.0, mscale=0.707, mscale_all_dim=0.707),
        ),
        hub=True,
        rewrite=as_on_the_hub,
    ),
    "v2_lite": Variant(
        4,
        deepseek(
            *(36, 4, (None, 14), (6, 4, 8), (28, 12), (8, 2, 2), 89, 2),
            kind=transformers.DeepseekV2Config,
            topk_method="greedy",
            rms_norm_eps=1e-6,
            rope_parameters=plain_rope(900.0),
        ),
        dtype=torch.bfloat16,
    ),
    # Every matrix has partial blocks, except those that two devices split.
    "fp8": Variant(
        5,
        deepseek(
            *(136, 16, (140, 100), (32, 16, 32), (164, 144), (4, 2, 1), 83, 2),
            deviation=0.12,
            **routing(2, 1, True, 0.7),
            rms_norm_eps=1e-5,
            rope_parameters=yarn_rope(60.0, 2.0, 30, 2.0, 1.0, mscale=1.0, mscale_all_dim=1.0),
        ),
        dtype=torch.bfloat16,
        hub=True,
        rewrite=as_on_the_hub,
        fp8_scales=torch.float32,
        mtp=True,
    ),
}

"""Makes tests/fixtures/far/<family>: tiny models with the published rotations of positions, and
what transformers computes with them up to position 140,000.

    pip install torch==2.13.0 transformers    # beside what the project needs
    python tests/make_far_fixture.py [family ...]

Each model has one layer of each kind of attention, one head and random weights. Its queries are
large, so that few of 140,000 positions decide: if all counted alike, a wrong rotation would change
nothing. `golden.npz` holds `logits` [P, 8, V] for the eight tokens from each of POINTS [P] on.

transformers computes in float64, but for the angles, which are float32 everywhere. It reads PIECE
tokens at a time, in eager mode. Its frequencies are rounded correctly: test_positions.py names the
few that torch rounds otherwise.
"""

import importlib
import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from far import POINTS, SHOWN, tokens  # noqa: E402

PIECE = 1000
ONE_HEAD: dict[str, Any] = dict(
    num_hidden_layers=1,
    hidden_size=32,
    num_attention_heads=1,
    num_key_value_heads=1,
    intermediate_size=48,
    vocab_size=61,
    tie_word_embeddings=False,
    torch_dtype="float32",
    quantization_config=None,
)
LATENT = dict(q_lora_rank=24, kv_lora_rank=40, qk_nope_head_dim=32, v_head_dim=48)
LATENT |= dict(moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2)
LATENT |= dict(first_k_dense_replace=0, num_nextn_predict_layers=0)
# The size whose positions it has, transformers' name of the architecture, and what is smaller. In
# models of two layers every token takes all experts, because a near tie could go either way.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("llama3.2-1b", "llama", {}),
    "qwen3": (
        *("qwen3-8b", "qwen3"),  # its model card asks for this above 32,768 tokens
        dict(
            rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32768),
            max_position_embeddings=131072,
        ),
    ),
    "gpt_oss": (
        *("gpt-oss-20b", "gpt_oss"),
        dict(
            num_hidden_layers=2,
            layer_types=["sliding_attention", "full_attention"],
            num_local_experts=2,
            num_experts_per_tok=2,
        ),
    ),
    "llama4": (
        *("llama-4-scout", "llama4_text"),
        dict(
            num_hidden_layers=2,
            no_rope_layers=[1, 0],
            intermediate_size_mlp=40,
            num_local_experts=1,
        ),
    ),
    "deepseek_r1": ("deepseek-r1", "deepseek_v3", LATENT | dict(n_group=2, topk_group=1)),
    "kimi_k2": ("kimi-k2-instruct", "deepseek_v3", LATENT),
}
LARGER = {"q_proj.weight": 3.0, "q_b_proj.weight": 3.0, "q_norm.weight": 3.0}


def make(family: str) -> tuple[dict[str, Any], Any]:
    """Returns config.json and a random model."""
    size, name, smaller = MODELS[family]
    hf = importlib.import_module(f"{family}.shapes").SHAPES[size]
    hf = hf.get("text_config", hf) | ONE_HEAD | smaller
    del hf["quantization_config"]
    given = {key: value for key, value in hf.items() if key not in ("model_type", "torch_dtype")}
    if "attn_temperature_tuning" in hf:  # published as 4, which transformers 5 refuses
        given["attn_temperature_tuning"] = bool(hf["attn_temperature_tuning"])
    config = CONFIG_MAPPING[name](**given, initializer_range=0.2)
    torch.manual_seed(len(family))
    config._experts_implementation = "eager"  # the other one has no float64
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for key, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.add_(torch.randn(parameter.shape) * 0.3)
        parameter.mul_(next((x for end, x in LARGER.items() if key.endswith(end)), 1.0))
    ours = importlib.import_module(f"{family}.model")
    model.model.rotary_emb.inv_freq = torch.from_numpy(
        ours.rope_frequencies(ours.config_from_hf(hf)).copy()
    )
    return hf, model


@torch.no_grad()
def write(family: str) -> None:
    hf, model = make(family)
    directory = ROOT / "tests" / "fixtures" / "far" / family
    directory.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as place:
        model.save_pretrained(place)
        weights = (Path(place) / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(weights)
    (directory / "config.json").write_text(json.dumps(hf, indent=2) + "\n")

    model.double()
    ids, cache, logits = torch.from_numpy(tokens())[None], DynamicCache(), []
    wanted = np.array(POINTS)[:, None] + np.arange(SHOWN)
    for start in range(0, wanted.max() + 1, PIECE):
        out = model(ids[:, start : start + PIECE], past_key_values=cache, use_cache=True)
        here = wanted[(wanted >= start) & (wanted < start + PIECE)]
        logits.append(out.logits[0, here - start].float().numpy())
        if start % 20_000 == 0:
            print(family, start, flush=True)
    golden = np.concatenate(logits).reshape(*wanted.shape, -1)
    np.savez_compressed(directory / "golden.npz", logits=golden)
    print(f"{family}: logits of standard deviation {golden.std():.2f}", flush=True)


if __name__ == "__main__":
    for family in sys.argv[1:] or MODELS:
        write(family)

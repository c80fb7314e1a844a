"""Writes tiny random Hugging Face models, and what transformers computes with them, to
tests/fixtures/<family>/<variant>.

    python tests/make_golden.py [family ...]

Needs torch and transformers, which the tests do not. Every variant is a directory as
save_pretrained writes it (some rewritten to the spelling that the published repositories use) and
golden.npz, which holds for prompts of n tokens:

    tokens_n [n], logits_n [n, V] float32 in eager attention, greedy_n [NEW]: the greedy
    continuation.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

FIXTURES = Path(__file__).parent / "fixtures"
LENGTHS = (1, 2, 17, 40, 64)
NEW = 12
MARGIN = 0.005  # between the best and the second best logit of a greedy step: far above float noise


class Variant(NamedTuple):
    seed: int
    config: transformers.PretrainedConfig
    dtype: torch.dtype = torch.float32
    hub: bool = (
        False  # config.json as in the published repositories, not as transformers 5 writes it
    )
    shard: str = "1GB"


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


# No number of devices divides the heads, the widths or the vocabularies; dimensions of one variant
# are distinct.
FAMILIES = {
    "llama3": {
        # Wavelengths 6.3, 23 and 85 around the bands' edges at 8 and 32: one kept, one between, one
        # slowed.
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
        # Heads as wide as the GPU kernel takes them.
        "heads_of_16": Variant(6, llama(36, 6, 2, 40, 101, 2, head_dim=16)),
        # Wavelengths 6.3, 18, 50 and 140 around 10 and 60.
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
}


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Norm weights that are not ones, and biases that are not zeros: a fresh model hides a dropped
    one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)


def spell_as_on_the_hub(directory: Path) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    if config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]:
        del config["head_dim"]
    file.write_text(json.dumps(config, indent=2) + "\n")


def greedy(model: Any, tokens: np.ndarray) -> np.ndarray | None:
    """By full forward passes, without a cache; None if a near tie makes the answer a matter of
    rounding."""
    sequence = torch.tensor(tokens)[None]
    for _ in range(NEW):
        best = model(sequence).logits[0, -1].topk(2)
        if best.values[0] - best.values[1] < MARGIN:
            return None
        sequence = torch.cat([sequence, best.indices[None, :1]], 1)
    return sequence[0, -NEW:].numpy().astype(np.int32)


@torch.no_grad()
def write(directory: Path, variant: Variant) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    torch.manual_seed(variant.seed)
    model = transformers.AutoModelForCausalLM.from_config(variant.config)
    randomize(model, variant.seed)
    model.to(variant.dtype).save_pretrained(directory, max_shard_size=variant.shard)
    (directory / "generation_config.json").unlink()
    if variant.hub:
        spell_as_on_the_hub(directory)

    # From the files as they are now, in float32 whatever they are stored in.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    rng = np.random.default_rng(variant.seed)
    golden = {}
    for n in LENGTHS:
        continuation = None
        while continuation is None:
            tokens = rng.integers(variant.config.vocab_size, size=n)
            continuation = greedy(model, tokens)
        golden[f"tokens_{n}"] = tokens.astype(np.int32)
        golden[f"logits_{n}"] = model(torch.tensor(tokens)[None]).logits[0].numpy()
        golden[f"greedy_{n}"] = continuation
    np.savez_compressed(directory / "golden.npz", **golden)
    logits = golden[f"logits_{LENGTHS[-1]}"]
    size = sum(f.stat().st_size for f in directory.iterdir())
    print(f"{directory.name}: {size / 1e3:.0f} kB, logits of standard deviation {logits.std():.2f}")


if __name__ == "__main__":
    for family in sys.argv[1:] or FAMILIES:
        for name, variant in FAMILIES[family].items():
            write(FIXTURES / family / name, variant)

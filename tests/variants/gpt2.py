"""GPT-2, with and without the prefix that transformers puts before the names."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from variants import Variant


def gpt2(width: int, heads: int, vocab: int, layers: int, positions: int, **options: Any) -> Any:
    return transformers.GPT2Config(
        n_embd=width,
        n_head=heads,
        vocab_size=vocab,
        n_layer=layers,
        n_positions=positions,
        initializer_range=0.25,
        bos_token_id=vocab - 1,
        eos_token_id=vocab - 1,
        **options,
    )


def gpt2_as_on_the_hub(directory: Path) -> None:
    """Rewrites the files: names without prefix, masks stored beside the weights, a head that
    repeats the embedding, and a config that omits the dtype and the defaults."""
    files = directory / "config.json", directory / "model.safetensors"
    config, tensors = json.loads(files[0].read_text()), load_file(files[1])
    tensors = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    positions = config["n_positions"]
    for i in range(config["n_layer"]):
        tensors[f"h.{i}.attn.bias"] = torch.ones(1, 1, positions, positions).tril()
        tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    names = ("activation_function", "architectures", "layer_norm_epsilon", "model_type")
    names += ("n_embd", "n_head", "n_layer", "n_positions", "vocab_size")
    kept = {name: config[name] for name in (*names, "bos_token_id", "eos_token_id")}
    files[0].write_text(json.dumps(kept | {"n_ctx": positions}, indent=2) + "\n")
    save_file(tensors, files[1], metadata={"format": "pt"})


VARIANTS = {
    # The position tables end shortly after the longest prompt and its continuation.
    "prefixed": Variant(1, gpt2(42, 7, 113, 3, 78, layer_norm_epsilon=3e-3)),
    "hub": Variant(2, gpt2(36, 9, 131, 2, 77), rewrite=gpt2_as_on_the_hub),
    "wide_mlp": Variant(
        3, gpt2(55, 5, 97, 2, 90, n_inner=46, reorder_and_upcast_attn=True), dtype=torch.bfloat16
    ),
}

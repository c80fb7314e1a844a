"""Tests and times this library on a GPU, within nine minutes.

    python -m benchmarks.gpu [--minutes 9] [--json gpu.json]

Needs the repository, a GPU, and JAX with CUDA. If torch and transformers are installed, it times
them, too. The most important rows come first, and every row is saved as soon as it is done, so a
run that is cut short is still useful:

1. the error of every kernel against the reference, in every dtype;
2. the time of every kernel against its floor, beside JAX's and torch's own for the same arrays;
3. models with random weights, decoding and reading prompts, against their floors.

A floor is the least time possible: bytes / bandwidth of a copy, or operations / rate of a large
product, whichever is longer. Both rates are measured in the same process. Each group of rows has
its own process: if one fails or hangs, the others still run. --tiny runs the same code on any
machine, at sizes whose times mean nothing.
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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import folio, hf, kernels
from benchmarks.worker import Task
from common.kernels.decode_attention import ragged_decode_attention
from common.kernels.prefill_attention import prefill_attention
from common.kernels.ragged_dot import ragged_dot
from common.machines.mesh_choice import Plan, load_of

Row = dict[str, Any]
ROOT = Path(__file__).parent.parent
ONE = dict(data=1, expert=1, tensor=1)
DTYPES = ("bf16", "int8", "fp8")
GRACE = 20  # seconds that a group has to finish its last row, before it is killed


class Group(NamedTuple):
    """Rows of one part, all made by one process."""

    part: str  # "errors", "times" or "models"
    rows: Callable[[bool], Iterator[Callable[[], Row]]]  # from `tiny`: functions, each for a row
    share: float  # the fraction of the minutes that it may take
    threads: int = 1  # how many rows run at the same time, which is 1 if they are timed


def machine(tiny: bool) -> kernels.Machine:
    return kernels.measure_machine(*((0.01, 256, 1) if tiny else (1.0, 8192, 10)))


# ---- errors


def error_row(name: str, dtype: str, run: Callable[..., Any], make: Callable[[], Any]) -> Row:
    """Compares a GPU's kernel (elsewhere, what the platform runs) with the reference. The error is
    a fraction of the largest number."""
    args, ours = make(), "gpu" if jax.default_backend() == "gpu" else "auto"
    try:
        got, want = (jax.jit(partial(run, implementation=i))(*args) for i in (ours, "reference"))
    except ValueError as refusal:
        return dict(case=name, dtype=dtype, refused=str(refusal))
    error = kernels.relative(got, want)
    return dict(case=name, dtype=dtype, error=error, right=error <= kernels.BOUND[dtype])


def attend(attention: Any, heads: kernels.Heads, last: int | None, *args: Any, **options: Any):
    """Calls `kernels.attend`; if `last` is given, only for so many last positions of each slot."""
    if last is not None:
        options |= dict(starts=jnp.maximum(args[3] - last, 0))
    return kernels.attend(attention, heads, *args, **options)


def slots(heads: kernels.Heads, dtype: str, queries: int) -> Any:
    """Returns the arrays of `kernels.make_attention`, with empty, short, odd and full slots."""
    q, k, v, _, *scales = kernels.make_attention(heads, dtype, 5, 0, 512)
    q = jnp.concatenate([(1 + t / 4) * q for t in range(queries)], axis=1)
    return q, k, v, jnp.array([0, queries, 65, 400, 512], jnp.int32), *scales


def attention_errors(dtype: str, tiny: bool) -> Iterator[Callable[[], Row]]:
    for attention, queries, last in (
        (ragged_decode_attention, 1, None),
        (ragged_decode_attention, 1, 100),
        (ragged_decode_attention, 4, None),
        (prefill_attention, 64, None),
    ):
        for name, heads in list(kernels.ATTENTION.items())[: 1 if tiny else None]:
            title = f"{attention.__name__}, {name}, {queries} a slot"
            title += f", the last {last}" if last else ""
            run, make = partial(attend, attention, heads, last), partial(slots, heads, dtype)
            yield partial(error_row, title, dtype, run, partial(make, queries))


def grouped(shape: kernels.Experts, dtype: str, tokens: int) -> Any:
    """Returns the arrays of `kernels.make_experts`: one empty group, and four of random sizes."""
    x, w, _ = kernels.make_experts(shape._replace(number=5, active=2), dtype, tokens)
    cuts = np.random.default_rng(0).integers(len(x) + 1, size=3)
    ends = np.sort([0, 0, *cuts, len(x)])
    return x, w, jnp.asarray(np.diff(ends), jnp.int32)


def product_errors(dtype: str, tiny: bool) -> Iterator[Callable[[], Row]]:
    small = {"a small stack": kernels.Experts(4, 2, 128, 256)}
    for tokens in (4, 100):
        for name, shape in (small if tiny else kernels.EXPERTS).items():
            title, make = f"ragged_dot, {name}, {tokens} tokens", partial(grouped, shape, dtype)
            yield partial(error_row, title, dtype, ragged_dot, partial(make, tokens))


# ---- times


def time_rows(cases: Sequence[kernels.Case], tiny: bool) -> Iterator[Callable[[], Row]]:
    best = machine(tiny)
    speeds = f"copies {best.bandwidth / 1e9:.0f} GB/s, products {best.rate / 1e12:.0f} TFLOP/s"
    yield lambda: dict(case=speeds, **best._asdict())
    for case in cases:
        yield partial(kernels.measure, case, best, 1 if tiny else 20)


def decode_times(tiny: bool) -> Iterator[Callable[[], Row]]:
    sizes = [(2, 64)] if tiny else [(8, 8192), (1, 8192), (64, 2048), (1, 32768)]
    heads = list(kernels.ATTENTION.items())[: 1 if tiny else None]
    cases = [kernels.attention_case(*h, d, *size) for size in sizes for h in heads for d in DTYPES]
    return time_rows(cases, tiny)


def prefill_times(tiny: bool) -> Iterator[Callable[[], Row]]:
    heads = list(kernels.ATTENTION.items())[: 1 if tiny else None]
    prompts = (64,) if tiny else (512, 8192)
    return time_rows([kernels.prefill_case(*h, "bf16", n) for n in prompts for h in heads], tiny)


def product_times(tiny: bool) -> Iterator[Callable[[], Row]]:
    few = {"a small stack": kernels.Experts(4, 2, 128, 256)}
    cases = [
        kernels.experts_case(name, shape, dtype, tokens)
        for tokens in ((2,) if tiny else (8, 1, 64))
        for name, shape in (few if tiny else kernels.EXPERTS).items()
        for dtype in (*DTYPES, "mxfp4")
    ]
    return time_rows([case for case in cases if case.stored < 8e9], tiny)


# ---- models


class Model(NamedTuple):
    family: str
    size: str
    quant: str | None = None
    setting: str | None = None  # if given, transformers runs it with this setting


MODELS = {
    "Llama-3.1-8B, bf16": Model("llama3", "llama3.1-8b"),
    "Llama-3.1-8B, int8": Model("llama3", "llama3.1-8b", "int8"),
    "gpt-oss-20b, mxfp4": Model("gpt_oss", "gpt-oss-20b"),
    "Qwen3-30B-A3B, bf16": Model("qwen3", "qwen3-30b-a3b"),
    "Llama-3.1-8B, bf16, transformers compiled": Model(
        "llama3", "llama3.1-8b", setting="sdpa static compiled"
    ),
    "Llama-3.1-8B, bf16, transformers": Model("llama3", "llama3.1-8b", setting="sdpa dynamic"),
}


def tasks_of(model: Model, shape: dict[str, Any]) -> dict[str, Task]:
    """Returns the tasks of `benchmarks.generate`, with random weights."""
    spec: Any = dict(dtype="bfloat16", quant=model.quant, random=True, model=model.family)
    if model.setting is not None:
        tasks, _ = hf.tasks_of(spec | dict(shape=shape))
        return {name: partial(tasks[name], setting=model.setting) for name in ("prefill", "decode")}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(shape))
        return folio.tasks_of(spec | dict(ckpt=str(file)))[0]


def model_rows(name: str, model: Model, tiny: bool) -> Iterator[Callable[[], Row]]:
    if model.setting and not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        return
    module = importlib.import_module(f"{model.family}.model")
    published = importlib.import_module(f"{model.family}.shapes").SHAPES[model.size]
    embedded = ROOT / model.family / "embedded" / "config.json"
    shape = json.loads(embedded.read_text()) if tiny else published
    best, tasks, steps = machine(tiny), tasks_of(model, shape), 4 if tiny else 64

    def row(case: str, tokens: int, seconds: float, floor: float) -> Row:
        rates = dict(seconds=seconds, tokens_per_s=tokens / seconds, of_floor=floor / seconds)
        return dict(case=f"{name}: {case}", **rates)

    def decode(slots: int) -> Row:
        replies = [tasks["decode"](batch=slots, steps=steps, seed=i) for i in range(3)][1:]
        step = min(r["seconds"] for r in replies) / steps
        return row(f"decoding, {slots} slots", slots, step, replies[0]["bytes"] / best.bandwidth)

    def prompt(tokens: int) -> Row:
        reply = [tasks["prefill"](tokens=tokens, seed=i) for i in range(2)][1]
        plan = Plan(module, module.config_from_hf(shape), 1, capacity=tokens, prompt=tokens)
        floor = load_of(plan, ONE).products / best.rate
        return row(f"prompt of {tokens}", tokens, reply["seconds"], floor)

    for slots in (2,) if tiny else (1, 8, 64):
        yield partial(decode, slots)
    for tokens in (32,) if tiny else (512, 8192):
        yield partial(prompt, tokens)


GROUPS = {
    **{f"attention {d}": Group("errors", partial(attention_errors, d), 0.06, 8) for d in DTYPES},
    **{
        f"ragged_dot {d}": Group("errors", partial(product_errors, d), 0.04, 8)
        for d in (*DTYPES, "mxfp4")
    },
    "decode_attention times": Group("times", decode_times, 0.1),
    "ragged_dot times": Group("times", product_times, 0.1),
    "prefill_attention times": Group("times", prefill_times, 0.05),
    **{
        name: Group("models", partial(model_rows, name, model), 0.07)
        for name, model in MODELS.items()
    },
}


# ---- the processes


def work(group: Group, tiny: bool, seconds: float) -> None:
    """Prints the rows of a group, one line of JSON each. Begins no row after `seconds`."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print goes to stderr
    end, left_out = time.monotonic() + seconds, 0

    def tell(row: Row) -> None:
        out.write(json.dumps(row) + "\n")
        out.flush()

    def attempt(make: Callable[[], Row]) -> Row | None:
        if time.monotonic() > end:
            return None
        try:
            return make()
        except Exception as error:  # from any library: the next row may still work
            return dict(failed=" ".join(str(error).split())[:300] or type(error).__name__)

    device = jax.devices()[0]
    tell(dict(device=device.device_kind, platform=device.platform, jax=jax.__version__))
    with ThreadPoolExecutor(group.threads) as pool:
        for row in pool.map(attempt, group.rows(tiny)):
            if row is None:
                left_out += 1
            else:
                tell(row)
    if left_out:
        tell(dict(left_out=f"{left_out} rows, for want of time"))


def rows_of(command: Sequence[str], seconds: float) -> Iterator[Row]:
    """Yields the rows that a process prints. Kills the process after `seconds`."""
    # The largest model needs nearly all of the memory. JAX allocates it only as needed.
    memory = dict(XLA_PYTHON_CLIENT_PREALLOCATE="false", XLA_PYTHON_CLIENT_MEM_FRACTION="0.95")
    pipes: Any = dict(stdout=subprocess.PIPE, text=True, env=os.environ | memory, cwd=ROOT)
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stderr=errors, **pipes)
        watch = threading.Timer(seconds, process.kill)
        watch.start()
        try:
            for line in process.stdout:
                yield json.loads(line)
            if status := process.wait():
                errors.seek(0)
                said = errors.read().strip().splitlines()[-1:] or ["no message"]
                why = f"ended with status {status}: {said[0][:300]}"
                yield dict(failed=why if watch.is_alive() else f"stopped after {seconds:.0f} s")
        finally:
            watch.cancel()
            process.kill()


COLUMNS = ("case", "floor / time", "time, us", "others' time / ours", "error")


def show(name: str, row: Row, cpu: bool) -> str:
    """Formats a row as a line of the table. Omits the times of a CPU, which only tests use."""
    for what in ("failed", "left_out"):
        if what in row:
            return f"| {name} | {what.replace('_', ' ')}: {row[what]} | | | |"
    share = row.get("of_floor")
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
        "--tiny", action="store_true", help="run anywhere, at sizes whose times mean nothing"
    )
    ap.add_argument("--only", metavar="WORD", default="", help="run groups with WORD in the name")
    ap.add_argument("--group", choices=GROUPS, help=argparse.SUPPRESS)
    ap.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    args = ap.parse_args(argv)
    if args.minutes <= 0:
        ap.error("--minutes must be positive")
    if not any(args.only in name for name in GROUPS):
        ap.error(f"--only {args.only}: no group has this name; there are {', '.join(GROUPS)}")
    return args


def fail(message: str) -> NoReturn:
    sys.stderr.write(f"error: {message}\n")
    sys.exit(2)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.group:
        return work(GROUPS[args.group], args.tiny, args.seconds)
    try:
        args.json.open("a").close()  # found out now; an earlier result stays until there is a GPU
    except OSError as error:
        fail(f"--json: {error}")
    end, kept = time.monotonic() + 60 * args.minutes - GRACE, list[Row]()
    chosen = {name: group for name, group in GROUPS.items() if args.only in name}
    facts: Row = {}
    for i, (name, group) in enumerate(chosen.items()):
        rest = sum(other.share for other in list(chosen.values())[i:])
        # Later groups share the time that earlier ones left over.
        seconds = max(0, end - time.monotonic()) * group.share / rest
        words = ["--group", name, "--seconds", str(seconds), *(["--tiny"] if args.tiny else [])]
        command = [sys.executable, "-m", "benchmarks.gpu", *words]
        for row in rows_of(command, seconds + GRACE):
            if "device" in row:
                if row["platform"] != "gpu" and not args.tiny:
                    fail(
                        f"JAX finds no GPU, only {row['platform']}: try --tiny, which needs no GPU"
                    )
                if not facts:
                    facts = row
                    print(f"{facts['device']}, jax {facts['jax']}\n")
                    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
                continue
            kept.append(dict(group=name, part=group.part) | row)
            print(show(name, row, facts.get("platform") == "cpu"), flush=True)
            args.json.write_text(json.dumps(facts | dict(rows=kept), indent=1) + "\n")
    if any("failed" in row or not row.get("right", True) for row in kept):
        sys.exit("error: some rows failed or are wrong")


if __name__ == "__main__":
    main()

"""Times the shared kernels against the best that this machine can do.

    python -m benchmarks.kernels [--kernel decode_attention] [--dtype int8] [--batch 1 8]

Runs on any platform. Each case is first compared with the reference, at a size small enough for
that, and timed only if it agrees. Its floor is the least time possible, the longer of two: to copy
as many bytes as it must read, and to do as many operations in one large product. Both are measured
in the same run. If JAX or torch have alternatives for the same arrays, these are timed, too. Cases
larger than --gigabytes are left out, and listed.
"""

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from common.command.cli import mistakes_on_one_line
from common.kernels.decode_attention import ragged_decode_attention
from common.kernels.prefill_attention import prefill_attention
from common.kernels.ragged_dot import ragged_dot
from common.loading.checkpoint import laid_out
from common.quant import Fp8, Mxfp4, Rowwise, quantize_rows

KERNELS = ("decode_attention", "prefill_attention", "ragged_dot")
BF16, FP8 = jnp.bfloat16, jnp.float8_e4m3fn
BOUND = dict(bf16=0.02, int8=0.03, fp8=0.02, mxfp4=0.02)  # of the reference's largest number


class Heads(NamedTuple):
    query: int
    kv: int
    width: int  # of a cached key
    v_dim: int | None = None  # width of the values, if rows hold keys and values
    row: int | None = None  # width of such rows; by default that of the keys


class Experts(NamedTuple):
    number: int
    active: int  # per token
    n_out: int
    n_in: int


ATTENTION = {
    "llama3.1-8b": Heads(32, 8, 128),
    "llama3.1-70b": Heads(64, 8, 128),
    "qwen3-30b-a3b": Heads(32, 4, 128),
    "gpt-oss-20b, [value | key]": Heads(64, 8, 64, 64, 128),
    "deepseek-r1": Heads(128, 1, 576, 512),
}
EXPERTS = {
    "qwen3-30b-a3b gate": Experts(128, 8, 768, 2048),
    "qwen3-30b-a3b down": Experts(128, 8, 2048, 768),
    "gpt-oss-20b gate, up": Experts(32, 4, 5760, 2880),
    "gpt-oss-120b gate, up": Experts(128, 4, 5760, 2880),
    "deepseek-r1 gate": Experts(256, 8, 2048, 7168),
    "deepseek-r1 down": Experts(256, 8, 7168, 2048),
}


class Machine(NamedTuple):
    """The best rates measured on this machine."""

    bandwidth: float  # bytes per second, read and written
    rate: float  # floating-point operations per second of a product in bfloat16


class Case(NamedTuple):
    name: str
    dtype: str
    bytes: int  # that it must read or write
    operations: float
    stored: int  # bytes of its arrays
    make: Callable[[], Any]  # makes the arguments of `run` and `others`
    run: Callable[..., Any]
    others: dict[str, Callable[..., Any]]  # alternatives in JAX
    check: Callable[[], float]  # returns the error, as a fraction of the largest number


# ---- cases


def relative(got: Any, want: Any) -> float:
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.abs(got - want).max() / np.abs(want).max())


def make_attention(heads: Heads, dtype: str, batch: int, length: int, capacity: int) -> Any:
    """Returns q, k, v, lengths, k_scale and v_scale. v and the scales may be None."""
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (batch, heads.kv, capacity, heads.row or heads.width)
    q = jax.random.normal(keys[0], (batch, 1, heads.query, heads.width), BF16)
    store = jax.jit(partial(_stored, shape, dtype))
    k, k_scale = store(keys[1])
    v, v_scale = (None, None) if heads.v_dim else store(keys[2])
    return q, k, v, jnp.full(batch, length, jnp.int32), k_scale, v_scale


def _stored(shape: tuple[int, ...], dtype: str, key: Any) -> tuple[Any, Any]:
    x = jax.random.normal(key, shape, BF16)
    if dtype == "bf16":
        return x, None
    values, scale = quantize_rows(x)
    return (values if dtype == "int8" else x.astype(FP8)), (scale if dtype == "int8" else None)


def attend(attention, heads: Heads, q, k, v, lengths_B, k_scale, v_scale, **options):
    options |= dict(v_dim=heads.v_dim, k_scale_BKS=k_scale, v_scale_BKS=v_scale)
    return attention(q, k, v, lengths_B, scale=heads.width**-0.5, **options)


def jax_attention(implementation: str, q, k, v, lengths_B, k_scale, v_scale):
    k, v = (x.swapaxes(1, 2) for x in (k, v))
    options = dict(key_value_seq_lengths=lengths_B, implementation=implementation)
    return jax.nn.dot_product_attention(q, k, v, is_causal=q.shape[1] > 1, **options)


def row_bytes(heads: Heads, dtype: str) -> int:
    """Returns the bytes of one position and head of the cache."""
    arrays, width = (1, heads.row or heads.width) if heads.v_dim else (2, heads.width)
    return {"bf16": 2 * width, "int8": width + 4, "fp8": width}[dtype] * arrays


def other_attention(heads: Heads, dtype: str) -> dict[str, Callable[..., Any]]:
    if dtype != "bf16" or heads.v_dim:
        return {}
    names = ("xla", "cudnn") if jax.default_backend() == "gpu" else ("xla",)
    return {f"jax.nn {name}": partial(jax_attention, name) for name in names}


def apart(run: Callable[..., Any], args: Any) -> float:
    """Returns the error of the implementation that the platform chooses."""
    return relative(
        *(jax.jit(partial(run, implementation=i))(*args) for i in ("auto", "reference"))
    )


def attention_case(name: str, heads: Heads, dtype: str, batch: int, length: int) -> Case:
    widths = heads.width + (heads.v_dim or heads.width)
    size = batch * (heads.kv * length * row_bytes(heads, dtype) + heads.query * widths * 2)
    run = partial(attend, ragged_decode_attention, heads)
    small = partial(make_attention, heads, dtype, min(batch, 2), min(length, 400), 512)
    return Case(
        f"{name}, batch {batch}, length {length}",
        dtype,
        bytes=size,
        operations=2.0 * batch * heads.query * length * widths,
        stored=size,
        make=partial(make_attention, heads, dtype, batch, length, length),
        run=run,
        others=other_attention(heads, dtype),
        check=lambda: apart(run, small()),
    )


def prefill_case(name: str, heads: Heads, dtype: str, tokens: int) -> Case:
    """A prompt that attends to itself. Its floor counts only the products that the mask keeps."""
    widths = heads.width + (heads.v_dim or heads.width)
    size = tokens * (heads.kv * row_bytes(heads, dtype) + heads.query * widths * 2)
    run = partial(attend, prefill_attention, heads)

    def make(tokens: int = tokens) -> Any:
        _, *cache = make_attention(heads, dtype, 1, tokens, tokens)
        q = jax.random.normal(jax.random.key(7), (1, tokens, heads.query, heads.width), BF16)
        return q, *cache

    return Case(
        f"{name}, prompt of {tokens}",
        dtype,
        bytes=size,
        operations=heads.query * widths * tokens * (tokens + 1.0),
        stored=size,
        make=make,
        run=run,
        others=other_attention(heads, dtype),
        check=lambda: apart(run, make(min(tokens, 192))),
    )


def make_experts(shape: Experts, dtype: str, tokens: int) -> Any:
    """Returns x, w and the group sizes. The first groups share the rows; the rest are empty."""
    keys = jax.random.split(jax.random.key(1), 3)
    E, n_out, n_in = shape.number, shape.n_out, shape.n_in
    sizes = np.bincount(np.arange(tokens * shape.active) % active(shape, tokens), minlength=E)
    x = jax.random.normal(keys[0], (tokens * shape.active, n_in), BF16)
    bits = partial(jax.random.bits, keys[1], dtype=jnp.uint8)
    if dtype == "bf16":
        w: Any = jax.random.normal(keys[1], (E, n_out, n_in), BF16)
    elif dtype == "int8":
        w = Rowwise(bits((E, n_out, n_in)).astype(jnp.int8), jnp.full((E, n_out), 0.01))
    elif dtype == "fp8":
        scale = jnp.full((E, -(-n_out // 128), -(-n_in // 128)), 0.01)
        w = Fp8((bits((E, n_out, n_in)) & 0xBF).view(FP8), scale)
    else:
        scale = jnp.full((E, n_out, n_in // 32), 125, jnp.uint8)
        w = Mxfp4(bits((E, n_out, n_in // 2)), scale)
    return x, laid_out(w), jnp.asarray(sizes, jnp.int32)


def active(shape: Experts, tokens: int) -> int:
    """Returns how many experts get rows if the router is fair."""
    return min(
        shape.number,
        max(1, round(shape.number * (1 - (1 - shape.active / shape.number) ** tokens))),
    )


def dense_ragged_dot(x, w, sizes):
    return lax.ragged_dot(x, w.swapaxes(1, 2), sizes)


def experts_case(name: str, shape: Experts, dtype: str, tokens: int) -> Case:
    number = {"bf16": 2.0, "int8": 1 + 4 / shape.n_in, "fp8": 1.0, "mxfp4": 0.5 + 1 / 32}[dtype]
    matrix = shape.n_out * shape.n_in * number
    rows = tokens * shape.active * (shape.n_out + shape.n_in) * 2
    small = shape._replace(number=min(shape.number, 4), active=2)
    return Case(
        f"{name}, {tokens} tokens",
        dtype,
        bytes=int(matrix * active(shape, tokens)) + rows,
        operations=2.0 * tokens * shape.active * shape.n_out * shape.n_in,
        stored=int(matrix * shape.number) + rows,
        make=partial(make_experts, shape, dtype, tokens),
        run=ragged_dot,
        others={"lax.ragged_dot": dense_ragged_dot} if dtype == "bf16" else {},
        check=lambda: apart(ragged_dot, make_experts(small, dtype, min(tokens, 64))),
    )


def cases(args: argparse.Namespace) -> Iterator[Case]:
    for dtype in args.dtype:
        if args.kernel in (None, "decode_attention") and dtype != "mxfp4":
            for name, heads in ATTENTION.items():
                for batch in args.batch:
                    for length in args.length:
                        yield attention_case(name, heads, dtype, batch, length)
        if args.kernel in (None, "prefill_attention") and dtype != "mxfp4":
            for name, heads in ATTENTION.items():
                for tokens in args.prompt:
                    yield prefill_case(name, heads, dtype, tokens)
        if args.kernel in (None, "ragged_dot"):
            for name, shape in EXPERTS.items():
                for tokens in args.tokens:
                    yield experts_case(name, shape, dtype, tokens)


# ---- measuring


def seconds(run: Callable[..., Any], args: Any, repeats: int) -> float:
    """Returns the time of one call: the median of five series of calls without a pause."""
    run = jax.jit(run)
    jax.block_until_ready(run(*args))
    series = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(repeats):
            last = run(*args)
        jax.block_until_ready(last)
        series.append((time.perf_counter() - began) / repeats)
    return statistics.median(series)


def copy_bandwidth(gigabytes: float, repeats: int) -> float:
    """Returns the bytes per second, read plus written, of a copy too large for any cache."""
    x = jnp.zeros(int(gigabytes * 2**30) // 4, jnp.int32)
    return 2 * x.nbytes / seconds(lambda x: x + 1, (x,), repeats)


def product_rate(size: int, repeats: int) -> float:
    x = jnp.ones((size, size), BF16)
    return 2 * size**3 / seconds(lambda x: x @ x, (x,), repeats)


def measure_machine(gigabytes: float, size: int, repeats: int) -> Machine:
    """Measures a copy of so many gigabytes, and a product of square matrices of this size."""
    return Machine(copy_bandwidth(gigabytes, repeats), product_rate(size, repeats))


def torch_others(case: Case, args: Any) -> dict[str, float]:
    """Returns the seconds of torch's own functions, if it is installed and takes these arrays."""
    if importlib.util.find_spec("torch") is None or case.dtype != "bf16":
        return {}
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    give = lambda x: (
        torch.from_numpy(np.asarray(x.view(jnp.uint16)).copy()).view(torch.bfloat16).to(device)
    )

    def clock(run: Callable[[], Any]) -> float:
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None
        run(), wait()
        began = time.perf_counter()
        for _ in range(10):
            run()
        wait()
        return (time.perf_counter() - began) / 10

    if case.run is ragged_dot:
        if device == "cpu":
            return {}
        x, w, sizes = args
        ends = torch.tensor(np.cumsum(sizes), dtype=torch.int32, device=device)
        x, w = give(x), give(w).transpose(1, 2)
        return {"torch._grouped_mm": clock(lambda: torch._grouped_mm(x, w, offs=ends))}
    q, k, v = args[:3]
    if v is None:
        return {}
    causal, (q, k, v) = q.shape[1] > 1, (give(q.swapaxes(1, 2)), give(k), give(v))
    options = dict(enable_gqa=True, is_causal=causal)
    sdpa = partial(torch.nn.functional.scaled_dot_product_attention, **options)
    return {"torch SDPA": clock(lambda: sdpa(q, k, v))}


def measure(case: Case, machine: Machine, repeats: int) -> dict[str, Any]:
    """Measures one case. Raises ValueError if the kernel is wrong."""
    error = case.check()
    if not error <= BOUND[case.dtype]:
        raise ValueError(
            f"{case.name}, {case.dtype}: the kernel's error is {error:.3g} of the largest number"
        )
    args = case.make()
    own = seconds(case.run, args, repeats)
    others = {name: seconds(run, args, repeats) for name, run in case.others.items()}
    others |= torch_others(case, args)
    return dict(
        case=case.name,
        dtype=case.dtype,
        error=error,
        seconds=own,
        of_floor=max(case.bytes / machine.bandwidth, case.operations / machine.rate) / own,
        others={name: other / own for name, other in others.items()},
    )


def show(r: dict[str, Any]) -> str:
    others = ", ".join(f"{name} {ratio:.2f} x" for name, ratio in r["others"].items())
    time_us = "" if jax.default_backend() == "cpu" else f"{1e6 * r['seconds']:.0f}"
    cells = (r["case"], r["dtype"], f"{100 * r['of_floor']:.0f} %", time_us, others)
    return f"| {' | '.join(cells)} | {r['error']:.1g} |"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    ap = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    ap.formatter_class = argparse.RawDescriptionHelpFormatter
    cpu = jax.default_backend() == "cpu"
    ap.add_argument("--kernel", choices=KERNELS, help="default: all")
    dtypes = ["bf16", "int8", "fp8", "mxfp4"]
    ap.add_argument("--dtype", nargs="+", choices=dtypes, default=dtypes)
    ap.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64], metavar="B")
    ap.add_argument("--length", nargs="+", type=int, default=[512, 8192, 32768], metavar="S")
    ap.add_argument("--prompt", nargs="+", type=int, default=[512, 8192], metavar="T")
    ap.add_argument("--tokens", nargs="+", type=int, default=[1, 8, 64, 512], metavar="M")
    ap.add_argument(
        "--gigabytes", type=float, default=0.3 if cpu else 16.0, help="skip larger cases"
    )
    ap.add_argument("--repeats", type=int, default=3 if cpu else 50, metavar="R")
    ap.add_argument("--json", type=Path, metavar="FILE", help="write all numbers")
    args = ap.parse_args(argv)
    sizes = (*args.batch, *args.length, *args.prompt, *args.tokens, args.repeats)
    if min(sizes) < 1 or args.gigabytes <= 0:
        ap.error("sizes, --repeats and --gigabytes must be positive")
    return args


@mistakes_on_one_line()
def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.json:
        args.json.open("a").close()  # found out now, not after the measurements
    size = 1024 if jax.default_backend() == "cpu" else 8192
    machine = measure_machine(min(1.0, args.gigabytes), size, args.repeats)
    device, (bandwidth, rate) = jax.devices()[0].device_kind, machine
    speeds = f"copies {bandwidth / 1e9:.1f} GB/s, multiplies {rate / 1e12:.2f} TFLOP/s"
    print(f"{device}, jax {jax.__version__}; {speeds}\n")
    print("| case | dtype | floor / time | time, us | others' time / ours | error |")
    print("|---|---|---|---|---|---|")
    results, left_out = [], []
    for case in cases(args):
        if case.stored > args.gigabytes * 2**30:
            left_out.append(f"{case.name}, {case.dtype} ({case.stored / 2**30:.1f} GiB)")
            continue
        results.append(measure(case, machine, args.repeats))
        print(show(results[-1]), flush=True)
    if left_out:
        print(f"\nLarger than --gigabytes {args.gigabytes:g}, left out: {'; '.join(left_out)}")
    if args.json:
        facts = dict(device=device, jax=jax.__version__, **machine._asdict())
        args.json.write_text(json.dumps(facts | dict(results=results), indent=1) + "\n")


if __name__ == "__main__":
    main()

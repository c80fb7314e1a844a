"""Counts the cycles of one dense product on a TPU, for each way to store its matrix; or of whole
steps of models in 8 and in 4 bits; or of the gated delta rule, with 32 heads of 128 x 128; or of
attention in decoding and in prompts and of products by expert, beside the cycles in which their
bytes arrive or their products are computed.

    python -m tools.kernel_cycles [--chip v5e:2x2] [--out 3584] [--in 8192]
    python -m tools.kernel_cycles [--chip v5e:2x2] --delta-rule
    python -m tools.kernel_cycles [--chip v5e:2x2] --attention
    python -m tools.kernel_cycles [--chip v5e:2x2] --prompts
    python -m tools.kernel_cycles [--chip v5e:2x2] --experts
    python -m tools.kernel_cycles --steps [NAME ...]

XLA estimates the cycles of its own operations, but not those of Pallas kernels. So both are counted
here in the machine code that the TPU compiler writes for them: one bundle of instructions a cycle,
times the rounds of the loops that it is in. Waiting for memory is not counted: compare with the
megabytes, of which a v5e reads 819,000 a second, or 0.55 KB in a cycle.

Of a whole step, a few layers are compiled, twice: what the further layers add stands for all that
are left. What the compiler writes no code for, such as collectives, counts as XLA estimates it.
"""

import argparse
import importlib
import itertools
import math
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from common.command.cli import mistakes_on_one_line
from common.fields import with_layers
from common.kernels.decode_attention_tpu import decode_attention_tpu, ring_sizes
from common.kernels.delta_rule import Tokens, delta_rule
from common.kernels.prefill_attention_tpu import block_sizes, prefill_attention_tpu
from common.kernels.ragged_dot import format_of, ragged_dot
from common.kernels.ragged_dot_tpu import TileSizes, list_pairs, tile_sizes
from common.machines.chips import CHIPS, devices_of
from common.machines.dryrun import dry_run
from common.machines.hlo import CYCLES, Op, Program, cycles, executed, parse
from common.machines.mesh_choice import Plan
from common.products import linear
from common.quant import (
    FP8_BLOCK,
    INT4_GROUP,
    INT8,
    MXFP4_GROUP,
    Fp8,
    Mxfp4,
    Rowwise,
    Storage,
    bits_of,
    int4,
    quantize_groups,
    quantize_weight,
)
from common.sharding import P, make_mesh, parse_mesh

shaped = jax.ShapeDtypeStruct
ROWS = (8, 64, 512)
STORAGES = {
    "bf16": lambda w: w.astype(jnp.bfloat16),
    "int8": quantize_weight,
    "int4, groups of 128": partial(quantize_groups, group=128),
    "int4, groups of 64": partial(quantize_groups, group=64),
    "int4, groups of 32": partial(quantize_groups, group=32),
}
# Of products by expert: the published widths, and the ways to store 8 matrices [out, in].
EXPERTS = {
    "deepseek-r1 gate": (8, 2048, 7168),
    "qwen3-235b gate": (8, 1536, 4096),
    "gpt-oss-120b gate and up": (8, 5760, 2880),
}
STACKS: dict[str, Callable[..., Any]] = {
    "bf16": lambda E, n, k: shaped((E, n, k), jnp.bfloat16),
    "int8": lambda E, n, k: Rowwise(shaped((E, n, k), jnp.int8), shaped((E, n), jnp.float32)),
    "fp8": lambda E, n, k: Fp8(
        shaped((E, n, k), jnp.float8_e4m3fn),
        shaped((E, -(-n // FP8_BLOCK), -(-k // FP8_BLOCK)), jnp.float32),
    ),
    "mxfp4": lambda E, n, k: Mxfp4(
        shaped((E, n, k // 2), jnp.uint8), shaped((E, n, k // MXFP4_GROUP), jnp.uint8)
    ),
    "int4": lambda E, n, k: jax.eval_shape(quantize_groups, shaped((E, n, k), jnp.float32)),
}
# Cycles in a second follow from the products in a second: each of a device's matrix units
# multiplies 128 x 128 or 256 x 256 numbers in a cycle; the newer ones count as two.
UNITS = {"v5e": 4 * 128**2, "v5p": 8 * 128**2, "v6e": 4 * 256**2, "tpu7x": 4 * 256**2}
CLOCKS = {chip: CHIPS[chip].flops / (2 * n) for chip, n in UNITS.items()}
BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(?:([A-Z]{2})\s*)?:([\s>]*)\{(.*)")
NAME = re.compile(r"^\d+-|-\d+-final_bundles.txt$")  # what a file's name has around its operation's
EXIT = re.compile(r"scmp\.\w+\.s32\.totalorder %\S+, (\d+) /\* loop exit test")


def count(text: str, rounds: Sequence[float] = (1,)) -> int:
    """Counts the bundles of one operation, in all rounds of its loops, as if no branch skipped any.
    The outermost loop has two rounds more than steps, in which it only waits for the first copy and
    for the last. Loops of unknown length have `rounds`, in the order in which they end; the last of
    these stands for any more. A loop may test early in its body whether it ends; it has all bundles
    that are as deep as its first one."""
    found = [match.groups() for line in text.splitlines() if (match := BUNDLE.match(line))]
    times, depth = [1.0] * len(found), 0
    left = itertools.chain(rounds, itertools.repeat(rounds[-1]))
    begun = list[tuple[int, float | None]]()  # first bundles and rounds, if these are known
    for i, (tag, marks, body) in enumerate([*found, (None, "", "end")]):
        if not body.startswith("}"):  # an empty bundle has no marks, in whatever loop it is
            depth = marks.count(">")
        while len(begun) > depth or (tag == "LB" and len(begun) == depth > 0):
            first, own = begun.pop()
            own = next(left) if own is None else own
            times[first:i] = [own * n for n in times[first:i]]
        begun += [(i, None) for _ in range(depth - len(begun))]
        if depth and (test := EXIT.search(body)):
            known = int(test[1]) if depth > 1 else max(1, int(test[1]) - 2)
            begun[-1] = begun[-1][0], known
    return round(sum(times))


def ask_for_code(folder: str) -> None:
    """Makes the TPU compiler write the machine code of all that it compiles into the folder. It
    looks at this when the first topology is made."""
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"


class PromptBundles(NamedTuple):
    """The bundles of prefill attention for a block of queries."""

    edge: int  # that add a block of positions of which some are hidden
    inside: int  # that add a block that all queries see
    ends: int  # around its blocks of positions
    each: int  # that run for each block of positions, added or not


def bundles_of_prompts(folder: Path) -> PromptBundles:
    """The code between marks, the longest part first: the products with a mask, those without, the
    end of a row of blocks, its beginning; no branch skips the rest."""
    file = max(folder.glob("*prefill_attention*[0-9]-final_bundles.txt"), key=os.path.getsize)
    lines = map(BUNDLE.match, file.read_text(errors="replace").splitlines())
    found = [match[1] for match in lines if match]
    marks = [i for i, tag in enumerate(found) if tag]
    edge, inside, end, begin, *others = sorted(
        (b - a for a, b in itertools.pairwise([0, *marks, len(found)])), reverse=True
    )
    return PromptBundles(edge, inside, end + begin, sum(others))


def bundles_of_a_block(folder: Path) -> int:
    """Counts the bundles in which the kernel of prefill attention adds a block of positions that
    all of its queries see."""
    counted = bundles_of_prompts(folder)
    return counted.inside + counted.each


def measure(store: Any, rows: int, chip: str, n_out: int, n_in: int, folder: Path) -> str:
    """Compiles one product; the compiler writes into the folder. Returns its cells of the table."""
    mesh = make_mesh(devices=devices_of(chip)[:1])
    put = partial(jax.ShapeDtypeStruct, sharding=jax.NamedSharding(mesh, P()))
    w = jax.eval_shape(store, jax.ShapeDtypeStruct((n_out, n_in), jnp.float32))
    w = jax.tree.map(lambda a: put(a.shape, a.dtype), w)
    run = jax.shard_map(linear, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    for file in folder.iterdir():
        file.unlink()
    compiled = jax.jit(run).lower(put((rows, n_in), jnp.bfloat16), w).compile()
    program = parse(compiled.as_text())
    files = folder.glob("*[0-9]-final_bundles.txt")
    operations = [file for file in files if re.search("fusion|convert|ragged_dot", file.name)]
    bundles = sum(count(file.read_text(errors="replace")) for file in operations)
    stored = sum(x.size * bits_of(x.dtype) for x in jax.tree.leaves(w))
    return f"{bundles:,} | {cycles(program):,} | {stored / 8e6:.1f}"


def parts_in_a_step(sizes: TileSizes, M: int, E: int) -> list[float]:
    """How many parts of its tile, of each size, a step of ragged dot multiplies on average, if each
    expert has a row, and all are equally likely to get each of the others."""
    groups = 1 + np.random.default_rng(0).multinomial(M - E, np.full(E, 1 / E), 100)

    def parts(group_sizes_E: jax.Array) -> list[jax.Array]:
        pairs = list_pairs(group_sizes_E, M, sizes.rows)
        first = pairs.tile * sizes.rows
        begin = jnp.maximum(pairs.start - first, 0) // sizes.align * sizes.align
        stop = jnp.minimum(pairs.end - first, sizes.rows)
        rows, counts = jnp.where(pairs.start < pairs.end, stop - begin, 0), list[jax.Array]()
        for part, smaller in zip(sizes.parts, (*sizes.parts[1:], 0), strict=True):
            counts.append(jnp.maximum(-(-(rows - smaller) // part), 0))
            rows -= counts[-1] * part
        return counts

    return [float(counts.mean()) for counts in jax.vmap(parts)(groups)]


def measure_experts(store: Any, shape: tuple[int, int, int], M: int, chip: str, p: Path) -> str:
    """Compiles one ragged dot of M rows into the folder p. Returns its cells of the table."""
    (E, n_out, n_in), kind = shape, chip.split(":")[0]
    mesh = make_mesh(devices=devices_of(chip)[:1])
    put = partial(jax.ShapeDtypeStruct, sharding=jax.NamedSharding(mesh, P()))
    w = store(*shape)
    at = partial(format_of, type(w), jax.NamedSharding(mesh, P()))
    w = jax.tree.map(lambda a: a.update(sharding=at(a.ndim)), w)
    x, groups = put((M, n_in), jnp.bfloat16), put((E,), jnp.int32)
    run = partial(ragged_dot, implementation="tpu")
    run = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    for file in p.iterdir():
        file.unlink()
    jax.jit(run).lower(x, w, groups).compile()
    (file,) = p.glob("*ragged_dot*[0-9]-final_bundles.txt")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # as if on that chip
        sizes = tile_sizes(x, w, x.dtype, x.dtype)
    assert sizes is not None
    parts = parts_in_a_step(sizes, M, E) if sizes.parts[0] < sizes.rows else [1]
    counted, c = count(file.read_text(errors="replace"), parts), CHIPS[kind]
    stored = sum(a.size * bits_of(a.dtype) for a in jax.tree.leaves(w)) / 8
    arrive = stored / c.bandwidth * CLOCKS[kind]
    products = M * n_in * n_out / UNITS[kind]
    cells = f"{counted:,} | {arrive:,.0f} | {products:,.0f}"
    return f"{cells} | {counted / max(arrive, products):.2f}"


def print_experts(chip: str, folder: Path) -> None:
    print("| 8 experts, all with rows | stored as | rows | bundles | arrive in | products in | |")
    print("|---|---|---|---|---|---|---|")
    for (name, shape), (form, store), M in itertools.product(
        EXPERTS.items(), STACKS.items(), (16, 64, 2048)
    ):
        cells = measure_experts(store, shape, M, chip, folder)
        print(f"| {name} | {form} | {M} | {cells} |", flush=True)


def measure_delta_rule(slots: int, tokens: int, kept: int, chip: str, folder: Path) -> str:
    """Compiles the gated delta rule; the compiler writes into the folder. Returns cells."""
    mesh = make_mesh(devices=devices_of(chip)[:1])
    heads, size, values = (slots, tokens, 16), 128, 2
    shapes = Tokens(*[(*heads, size)] * 2, (*heads, values, size), *[(*heads, values)] * 2)
    put = partial(jax.ShapeDtypeStruct, sharding=jax.NamedSharding(mesh, P()), dtype=jnp.float32)
    S, x = put((slots, 16, values, size, size)), Tokens(*map(put, shapes))
    run = partial(delta_rule, kept=kept)
    run = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    for file in folder.iterdir():
        file.unlink()
    jax.jit(run, donate_argnums=0).lower(S, x).compile()
    files = folder.glob("*delta_rule*[0-9]-final_bundles.txt")
    bundles = sum(count(file.read_text(errors="replace")) for file in files)
    moved = 4 * (2 * S.size + x.q.size + x.k.size + 2 * x.v.size)
    return f"{bundles:,} | {moved / 1e6:.1f}"


# ---- decode attention

CALLS = ((8, 2048), (64, 2048), (8, 32768), (64, 32768))  # slots, and positions that each has


class Heads(NamedTuple):
    """The heads of a cache on one device."""

    K: int
    G: int
    H: int  # numbers of a query
    W: int  # and of a row of the cache
    v_dim: int | None


ATTENTION = {
    "1 head, G = 4": Heads(1, 4, 128, 128, None),
    "1 head, G = 8": Heads(1, 8, 128, 128, None),
    "8 heads, G = 4": Heads(8, 4, 128, 128, None),
    "4 heads, G = 8": Heads(4, 8, 128, 128, None),
    "8 heads of 64, [value, key] rows, G = 8": Heads(8, 8, 64, 128, 64),
    "latents, 128 heads": Heads(1, 128, 640, 640, 512),
    "latents, 16 heads": Heads(1, 16, 640, 640, 512),
}


class Part(NamedTuple):
    """Bundles that run one after the other."""

    loops: tuple[int, ...]  # that they are in, the outermost first
    code: list[str]

    def has(self, operation: str) -> bool:
        return any(operation in bundle for bundle in self.code)


def parts_of(text: str) -> list[Part]:
    """Cuts the code of one operation at its marks, and behind each branch and the four bundles that
    run while it is taken. Those of a loop's own branch are not marked as the loop's, but count."""
    parts: list[Part] = []
    begun: dict[int, int] = {}  # the loop at each depth
    before, left, taken = 0, 0, -1
    for match in filter(None, map(BUNDLE.match, text.splitlines())):
        tag, marks, code = match.groups()
        depth = marks.count(">")
        if tag == "LB":
            begun = {d: n for d, n in begun.items() if d < depth} | {depth: len(parts)}
        left = 5 if depth < before else max(left - 1, 0)
        loops = tuple(
            n for d, n in sorted(begun.items()) if d <= depth + (left > 0 and tag is None)
        )
        if tag or taken == 0 or not parts or parts[-1].loops != loops:
            parts.append(Part(loops, []))
        parts[-1].code.append(code)
        before, taken = depth, 4 if "sbr.rel" in code else taken - 1
    return parts


class Bundles(NamedTuple):
    """The bundles of decode attention."""

    step: int  # for the blocks of a step
    zeros: int  # besides, if they are all partly filled
    ahead: int  # that start the copies of a step, before the first one
    group: int  # around the steps of the slots that are on the chip at a time
    once: int


def bundles_of_attention(text: str) -> Bundles:
    """The loop with the products is that over the steps, and what it does besides copying,
    multiplying and counting is to write zeros. Other loops in the same one copy ahead."""
    parts = parts_of(text)
    step = max((part.loops for part in parts if part.has("vmatmul")), key=len)
    sums = dict.fromkeys(Bundles._fields, 0)
    for part in parts:
        kind = "group" if part.loops else "once"
        if part.loops == step:
            works = part.has("vmatmul") or part.has("dma.") or not part.has("vst ")
            kind = "step" if works else "zeros"
        elif len(part.loops) == len(step):
            kind = "ahead"
        sums[kind] += len(part.code)
    return Bundles(**sums)


def measure_attention(
    heads: Heads, dtype: Any, slots: int, positions: int, chip: str, folder: Path
) -> tuple[float, float, float]:
    """Compiles decode attention; the compiler writes into the folder. Returns the bundles of a
    step over the cycles in which its blocks arrive, or are multiplied, if that takes longer; those
    outside of steps for a slot; and all of the call, over the same. One block of each slot is
    partly filled."""
    mesh, (K, G, H, W, v_dim) = make_mesh(devices=devices_of(chip)[:1]), heads
    put = partial(jax.ShapeDtypeStruct, sharding=jax.NamedSharding(mesh, P()))
    q, k = put((slots, 1, K * G, H), jnp.bfloat16), put((slots, K, positions, W), dtype)
    v = None if v_dim else k
    scale = put((slots, K, positions), jnp.float32) if dtype == jnp.int8 else None
    scales = scale, None if v_dim and H == W else scale
    arrays = q, k, v, put((slots,), jnp.int32), put((slots, 1), jnp.int32), *scales
    run: Any = partial(decode_attention_tpu, scale=0.1, v_dim=v_dim)
    run = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    for file in folder.iterdir():
        file.unlink()
    jax.jit(run).lower(*arrays).compile()
    (file,) = folder.glob("*ragged_decode_attention*[0-9]-final_bundles.txt")
    n, sizes = bundles_of_attention(file.read_text(errors="replace")), ring_sizes(q, k, v, v_dim)
    assert sizes is not None
    kind = chip.partition(":")[0]
    arrive = K * W * k.dtype.itemsize * (1 if v_dim else 2) / CHIPS[kind].bandwidth
    multiply = 2 * K * G * (H + (v_dim or W)) / CHIPS[kind].flops
    cycles = max(arrive, multiply) * CLOCKS[kind]  # of a position
    steps = -(-slots * positions // (sizes.block * sizes.chains))
    around = n.once + n.group * slots // sizes.slots + n.ahead * min(steps, sizes.stages)
    around += n.zeros * slots // sizes.chains
    call = (around + steps * n.step) / (slots * positions * cycles)
    return n.step / (sizes.block * sizes.chains * cycles), around / slots, call


def print_attention(chip: str, folder: Path) -> None:
    """Each cell is for a cache in bf16 / int8."""
    calls = " | ".join(f"{slots} x {positions:,}" for slots, positions in CALLS)
    print(f"| cache heads, queries each | block | slot, bundles | {calls} |")
    print("|---" * (3 + len(CALLS)) + "|")
    for name, heads in ATTENTION.items():
        rows = [
            [measure_attention(heads, dtype, *call, chip, folder) for dtype in ("bfloat16", "int8")]
            for call in CALLS
        ]
        (bf16, int8), *_ = rows
        cells = [f"{bf16[0]:.2f} / {int8[0]:.2f}", f"{bf16[1]:.0f} / {int8[1]:.0f}"]
        cells += [f"{bf16[2]:.2f} / {int8[2]:.2f}" for bf16, int8 in rows]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


# ---- prefill attention

PROMPTS = tuple(itertools.product((512, 2048), (0, 8192, 65536)))  # tokens, and those before them


class PromptHeads(NamedTuple):
    """The heads of a device, their cache, and the rank of the latents that make keys and values."""

    K: int
    G: int
    H: int
    Hv: int
    W: int  # numbers of a cached row; if they are not H, keys and values are in one row
    rank: int = 0


OF_PROMPTS = {
    "1 head, G = 4": PromptHeads(1, 4, 128, 128, 128),
    "1 head, G = 8": PromptHeads(1, 8, 128, 128, 128),
    "8 heads, G = 4": PromptHeads(8, 4, 128, 128, 128),
    "4 heads, G = 8": PromptHeads(4, 8, 128, 128, 128),
    "8 heads of 64, [value, key] rows, G = 8": PromptHeads(8, 8, 64, 64, 128),
    "latents, 128 heads": PromptHeads(128, 1, 192, 128, 640, 576),
    "latents, 16 heads": PromptHeads(16, 1, 192, 128, 640, 576),
}


def measure_prompts(h: PromptHeads, dtype: Any, T: int, chip: str, folder: Path) -> PromptBundles:
    """Compiles the attention of T tokens; the compiler writes into the folder."""
    mesh, S = make_mesh(devices=devices_of(chip)[:1]), PROMPTS[-1][1] + 2048
    put = partial(jax.ShapeDtypeStruct, sharding=jax.NamedSharding(mesh, P()))
    q, rows = put((1, T, h.K * h.G, h.H), jnp.bfloat16), 1 if h.rank else h.K
    k, apart = put((1, rows, S, h.W), dtype), h.W == h.H
    scale = put((1, rows, S), jnp.float32) if dtype == "int8" else None
    made_by = [put((h.K, h.W, n), jnp.bfloat16) for n in (h.H, h.Hv)] if h.rank else None
    arrays = q, k, k if apart else None, put((1,), jnp.int32), scale, None if h.rank else scale

    def run(arrays: Any, made_by: Any) -> Any:
        options: Any = dict(scale=0.1, v_dim=None if apart or h.rank else h.Hv, made_by=made_by)
        return prefill_attention_tpu(*arrays, **options)

    run = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    for file in folder.iterdir():
        file.unlink()
    jax.jit(run).lower(arrays, made_by).compile()
    return bundles_of_prompts(folder)


def of_prompt(
    h: PromptHeads, n: PromptBundles, T: int, before: int, dtype: Any, chip: str
) -> tuple[float, float]:
    """Returns the cycles in which the products of a prompt are computed, or its cache arrives if
    that takes longer, as a part of the bundles: for units that are full, and for units of which
    heads fill a part. Keys and values that latents make are counted once."""
    queries, block = block_sizes(T, h.G, PROMPTS[-1][1] + 2048)
    bundles, first = 0, range(before, before + T, queries)
    for begin in first:
        added, inside = -(-min(begin + queries, before + T) // block), (begin + 1) // block
        bundles += n.ends + inside * n.inside + (added - inside) * n.edge
    bundles = h.K * (bundles + len(first) * -(-(before + T) // block) * n.each)
    kind, seen = chip.partition(":")[0], T * before + T * (T + 1) // 2
    side = math.isqrt(UNITS[kind] // (8 if kind == "v5p" else 4))

    def products(pad: int) -> float:
        H, Hv, rank = (-(-x // pad) * pad for x in (h.H, h.Hv, h.rank))
        made = (before + T) * rank * (H + Hv)
        return h.K * (h.G * seen * (H + Hv) + made) / UNITS[kind]

    row = h.W * (1 if h.rank else h.K * (2 if h.W == h.H else 1))
    arrive = (before + T) * row * jnp.dtype(dtype).itemsize / CHIPS[kind].bandwidth * CLOCKS[kind]
    full, part = (max(products(pad), arrive) / bundles for pad in (1, side))
    return full, part


def print_prompts(chip: str, folder: Path) -> None:
    """Each cell is for a cache in bf16 / int8."""
    calls = " | ".join(f"{T} after {before:,}" for T, before in PROMPTS)
    print(f"| heads, queries each | {calls} | with units that heads fill in part |")
    print("|---" * (2 + len(PROMPTS)) + "|")
    for name, h in OF_PROMPTS.items():
        counted = {
            (T, dtype): measure_prompts(h, dtype, T, chip, folder)
            for T in (512, 2048)
            for dtype in ("bfloat16", "int8")
        }
        cells = [
            [of_prompt(h, counted[T, d], T, before, d, chip) for d in ("bfloat16", "int8")]
            for T, before in PROMPTS
        ]
        texts = [f"{a[0]:.2f} / {b[0]:.2f}" for a, b in cells]
        texts.append(f"{cells[-1][0][1]:.2f} / {cells[-1][1][1]:.2f}")
        print(f"| {name} | {' | '.join(texts)} |", flush=True)


# ---- whole steps


class StepOf(NamedTuple):
    """A model on a slice, and how many layers are compiled: at first, and added to these."""

    family: str
    size: str
    topology: str
    axes: str
    layers: tuple[int, int] = (2, 2)
    slots: int = 8
    prefill: int = 0  # tokens of one prompt, in place of a decoding step


STEPS = [
    StepOf("llama3", "llama3.1-70b", "v5e:4x4", "tensor=16"),
    StepOf("llama3", "llama3.1-70b", "v5e:4x4", "tensor=16", slots=64),
    StepOf("llama3", "llama3.1-70b", "v5e:4x4", "tensor=16", slots=1, prefill=512),
    StepOf("qwen3", "qwen3-235b-a22b", "v5e:4x8", "expert=32"),
    StepOf("gpt_oss", "gpt-oss-120b", "v5e:4x4", "expert=16"),
    StepOf("llama4", "llama-4-scout", "v5e:4x4", "expert=16", layers=(4, 4)),
    StepOf("deepseek_r1", "deepseek-r1", "v5e:4x8", "expert=32", layers=(4, 1)),
    StepOf("kimi_k2", "kimi-k2-instruct", "v5e:8x8", "expert=64", layers=(2, 1)),
]


def all_bundles(program: Program, folder: Path) -> int:
    """Counts the bundles of a program, of which the compiler wrote each different operation into
    the folder once. Branches do not count. In products by expert, an expert's rows are taken to fit
    into the smallest part."""

    def kind(op: Op, others: dict[str, Op]) -> tuple[Any, ...]:
        operands = tuple(others[name].type for name in op.operands if name in others)
        return op.kind, op.type, operands, estimated(op)

    def estimated(op: Op) -> int:
        return int(found[1]) if (found := CYCLES.search(op.rest)) else 0

    counted = {}
    for file in folder.glob("*[0-9]-final_bundles.txt"):
        rounds = (0, 1) if "ragged_dot" in file.name else (1,)
        counted[NAME.sub("", file.name)] = count(file.read_text(errors="replace"), rounds)
    ops = [(op, kind(op, others), n) for op, others, n, branch in executed(program) if not branch]
    known = {like: counted[op.name] for op, like, _ in ops if op.name in counted}
    return sum(times * known.get(like, estimated(op)) for op, like, times in ops)


def measure_step(row: StepOf, storage: Storage, folder: Path) -> tuple[int, int]:
    """Returns the bundles of a step with all layers, and the bytes that it moves."""
    model = importlib.import_module(f"{row.family}.model")
    config = model.config_from_hf(importlib.import_module(f"{row.family}.shapes").SHAPES[row.size])
    mesh = make_mesh(**parse_mesh(row.axes), devices=devices_of(row.topology))
    plan = Plan(model, config, row.slots, prompt=row.prefill, cache_dtype=jnp.int8, storage=storage)

    def compiled(layers: int) -> np.ndarray:
        for file in folder.iterdir():
            file.unlink()
        few = plan._replace(config=with_layers(config, layers))
        report, text = dry_run(few, mesh)
        return np.array([all_bundles(parse(text), folder), report.traffic])

    first, more = row.layers
    few = compiled(first)
    layer = (compiled(first + more) - few) / more
    cycles, moved = few + layer * (config.num_hidden_layers - first)
    return int(cycles), int(moved)


def print_steps(rows: Sequence[StepOf], folder: Path) -> None:
    print("| step | cycles, int8 | int4 | | GB moved, int8 | int4 | |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        (cycles_8, moved_8), (cycles_4, moved_4) = (
            measure_step(row, storage, folder) for storage in (INT8, int4(INT4_GROUP, False))
        )
        what = f"prompt of {row.prefill}" if row.prefill else f"{row.slots} slots"
        counted = f"{cycles_8 / 1e6:.2f} M | {cycles_4 / 1e6:.2f} M | {cycles_4 / cycles_8:.2f}"
        moved = f"{moved_8 / 1e9:.2f} | {moved_4 / 1e9:.2f} | {moved_4 / moved_8:.2f}"
        print(f"| {row.size}, {row.topology}, {what} | {counted} | {moved} |", flush=True)


@mistakes_on_one_line()
def main(argv: Sequence[str] | None = None) -> None:
    ap = argparse.ArgumentParser(prog="python -m tools.kernel_cycles", description=__doc__)
    ap.formatter_class = argparse.RawDescriptionHelpFormatter
    ap.add_argument("--chip", default="v5e:2x2")
    ap.add_argument("--out", type=int, default=3584, help="rows of the matrix")
    ap.add_argument("--in", type=int, default=8192, help="columns of the matrix", dest="n_in")
    sizes = sorted({row.size for row in STEPS})
    ap.add_argument("--steps", nargs="*", choices=sizes, help="whole steps of these models, or all")
    ap.add_argument("--delta-rule", action="store_true", help="the gated delta rule")
    ap.add_argument("--attention", action="store_true", help="decode attention")
    ap.add_argument("--prompts", action="store_true", help="attention of prompts")
    ap.add_argument("--experts", action="store_true", help="products by expert")
    args = ap.parse_args(argv)
    if min(args.out, args.n_in) < 1:
        ap.error("--out and --in must be at least 1")
    with TemporaryDirectory() as folder:
        ask_for_code(folder)
        if args.steps is not None:
            chosen = [row for row in STEPS if not args.steps or row.size in args.steps]
            return print_steps(chosen, Path(folder))
        if args.attention:
            return print_attention(args.chip, Path(folder))
        if args.prompts:
            return print_prompts(args.chip, Path(folder))
        if args.experts:
            return print_experts(args.chip, Path(folder))
        if args.delta_rule:
            print("| delta rule | bundles | MB |\n|---|---|---|")
            for slots, tokens, kept in ((8, 9, 8), (1, 2048, 2048)):
                cells = measure_delta_rule(slots, tokens, kept, args.chip, Path(folder))
                print(f"| {slots} slots, {tokens} tokens | {cells} |", flush=True)
            return
        print("| stored as | rows | bundles | XLA's estimate, without kernels | MB |")
        print("|---|---|---|---|---|")
        for name, store in STORAGES.items():
            for rows in ROWS:
                cells = measure(store, rows, args.chip, args.out, args.n_in, Path(folder))
                print(f"| {name} | {rows} | {cells} |")


if __name__ == "__main__":
    main()

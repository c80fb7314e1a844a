"""Prints what it costs to read 512 tokens into an empty slot, by how many positions the slot has.

    python tools/long_contexts.py                      # all rows
    python tools/long_contexts.py deepseek-r1 scout    # rows whose name contains one of these
    python tools/long_contexts.py --slots              # how many slots of the full context fit
    python tools/long_contexts.py --chunks             # a prompt of 8,192 tokens, by its chunks
    python tools/long_contexts.py --filled             # what 65,536 filled positions cost more

Compiles a few layers at their true widths for a TPU slice (see `common.machines.dryrun`). Prints
the bytes that move through memory, the compiler's estimate of cycles, the bytes that collectives
return, and the bytes of temporaries. A loop of unknown length counts once: that is what an empty
slot takes, whose filled positions are one part. Branches do not count: an empty slot takes none.
Kernels are not in the estimate. What a filled slot costs in the kernel of attention is counted in
its machine code, a bundle of instructions a cycle.
"""

import argparse
import importlib
import math
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

import jax.numpy as jnp  # noqa: E402

from common.command.cli import mistakes_on_one_line  # noqa: E402
from common.fields import with_layers  # noqa: E402
from common.kernels.prefill_attention_tpu import block_sizes  # noqa: E402
from common.latents import KERNEL_PARTS  # noqa: E402
from common.machines.chips import chip_of, devices_of  # noqa: E402
from common.machines.dryrun import (  # noqa: E402
    Report,
    abstract_state,
    abstract_weights,
    device_bytes,
    dry_run,
)
from common.machines.hlo import (  # noqa: E402
    ENTRY,
    Program,
    called,
    collectives,
    cycles,
    executed,
    parse,
    traffic,
    trips,
)
from common.machines.mesh_choice import Plan  # noqa: E402
from common.quant import INT8  # noqa: E402
from common.sharding import make_mesh, parse_mesh, round_up  # noqa: E402
from tools.kernel_cycles import ask_for_code, bundles_of_a_block  # noqa: E402

CHUNK, PROMPT, FILLED = 512, 8192, 65_536  # tokens
CACHES = ("bfloat16", "int8", "float8_e4m3fn")


class Row(NamedTuple):
    family: str
    size: str
    topology: str
    axes: str
    layers: int
    capacities: tuple[int, int]


ROWS = [
    Row("deepseek_r1", "deepseek-r1", "v5e:8x8", "expert=64", 2, (2048, 131_072)),
    Row("deepseek_r1", "deepseek-r1", "v5e:8x8", "expert=8,tensor=8", 2, (2048, 131_072)),
    Row("kimi_k2", "kimi-k2-instruct", "v6e:8x8", "expert=64", 2, (2048, 131_072)),
    Row("llama4", "llama-4-scout", "v5e:4x4", "expert=16", 4, (2048, 1_048_576)),
    Row("llama3", "llama3.1-70b", "v5e:4x4", "expert=8,tensor=2", 2, (2048, 131_072)),
    Row("gpt_oss", "gpt-oss-120b", "v5e:4x4", "expert=16", 2, (2048, 131_072)),
    Row("qwen3", "qwen3-235b-a22b", "v5e:4x8", "expert=32", 2, (2048, 40_960)),
    Row("gpt2", "gpt2-xl", "v5e:2x2", "tensor=4", 2, (512, 1024)),
]


class Cost(NamedTuple):
    cycles: float
    traffic: float  # bytes
    sent: float  # bytes that collectives return

    def plus(self, other: "Cost", times: float) -> "Cost":
        return Cost(*(a + b * times for a, b in zip(self, other, strict=True)))


def cost(program: Program) -> Cost:
    sent = sum(c.bytes for c in collectives(program) if not c.conditional)
    return Cost(cycles(program), traffic(program), sent)


def turn(program: Program) -> Cost:
    """What one more turn of each loop of unknown length costs: one more part of the positions, in
    every layer that reads all of them."""
    total = Cost(0, 0, 0)
    for op, _, times, conditional in executed(program):
        if op.kind == "while" and not conditional and trips(program, op) == 1:
            total = total.plus(cost(program | {ENTRY: program[called(op)["body"][0]]}), times)
    return total


def part_of(row: Row, capacity: int) -> int:
    """How many positions one turn of the loop over latents reads."""
    each = capacity // parse_mesh(row.axes).get("tensor", 1)
    return next(n for n in KERNEL_PARTS if each % n == 0)


def compiled(
    row: Row, devices: Any, capacity: int, cache: str, chunk: int = CHUNK, layers: int | None = None
) -> tuple[Report, Program]:
    """Compiles `layers` layers, or those of the row, with weights in int8. Experts that are
    published in 4 bits stay so."""
    layers = layers or row.layers
    model = importlib.import_module(f"{row.family}.model")
    config = model.config_from_hf(importlib.import_module(f"{row.family}.shapes").SHAPES[row.size])
    if "first_k_dense_replace" in config._fields:  # one dense layer, then layers with experts
        config = config._replace(first_k_dense_replace=1)
    mesh = make_mesh(**parse_mesh(row.axes), devices=devices)
    kept: Any = dict(storage=INT8, cache_dtype=jnp.dtype(cache))
    plan = Plan(model, with_layers(config, layers), 1, capacity, chunk, **kept)
    report, text = dry_run(plan, mesh)
    return report, parse(text)


def measured(rows: list[Row]) -> Iterator[tuple[Row, str, list[Report]]]:
    """Yields each row with each kind of cache, and its reports: one for each capacity."""
    places = [(row, devices_of(row.topology)) for row in rows]
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            (row, cache, [pool.submit(compiled, row, at, S, cache) for S in row.capacities])
            for row, at in places
            for cache in CACHES
        ]
        for row, cache, reports in jobs:
            yield row, cache, [report.result()[0] for report in reports]


def print_slots() -> None:
    """Prints how many slots of the full context fit beside the weights, with windows and chunks in
    rings, and with all positions in all layers."""
    print(
        "| | memory | cache | a slot, all positions | in rings | slots, all positions | in rings |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in (row for row in ROWS if row.family in ("gpt_oss", "llama4")):
        model = importlib.import_module(f"{row.family}.model")
        sizes = importlib.import_module(f"{row.family}.shapes").SHAPES
        config = model.config_from_hf(sizes[row.size])
        mesh = make_mesh(**parse_mesh(row.axes), devices=devices_of(row.topology))
        chip = chip_of(mesh.devices.flat[0])
        plan = Plan(model, config, 1, row.capacities[1], storage=INT8)
        weights = device_bytes(abstract_weights(plan, mesh))
        for cache in CACHES[:2]:
            state = abstract_state(plan._replace(cache_dtype=jnp.dtype(cache)), mesh)
            layers = [device_bytes(layer) for layer in state.cache]
            slots = [max(layers) * len(layers), sum(layers)]
            room = 0.95 * chip.memory - weights
            fit = " | ".join(f"{room / slot:.1f}" for slot in slots)
            took = " | ".join(f"{slot / 1e9:.2f} GB" for slot in slots)
            print(
                f"| {row.size}, {row.capacities[1]:,} positions, {row.topology}, int8 "
                f"| {room / 1e9:.1f} GB | {cache} | {took} | {fit} |"
            )


def print_chunks() -> None:
    """Prints what a prompt takes in chunks of several lengths, in all layers: two and four layers
    are compiled, and the rest follows from their difference. Each chunk reads as many parts of the
    positions as are filled."""
    print("| | tokens at once | cycles | traffic, GB | collectives, GB | temporaries, MB |")
    print("|---|---|---|---|---|---|")
    for row in (row for row in ROWS if row.size in ("llama3.1-70b", "deepseek-r1", "gpt-oss-120b")):
        shapes = importlib.import_module(f"{row.family}.shapes").SHAPES
        devices, depth = devices_of(row.topology), shapes[row.size]["num_hidden_layers"]
        part = part_of(row, PROMPT)
        for chunk in (512, 1024, 2048):
            ends = range(chunk, PROMPT + 1, chunk)
            turns = sum(-(-end // part) - 1 for end in ends)  # beside the first of each chunk
            (_, few), (report, more) = (
                compiled(row, devices, PROMPT, "int8", chunk, layers) for layers in (2, 4)
            )
            first, last = (
                Cost(0, 0, 0).plus(cost(p), len(ends)).plus(turn(p), turns) for p in (few, more)
            )
            total = first.plus(last, (depth - 2) / 2).plus(first, -(depth - 2) / 2)
            print(
                f"| {row.size}, {row.topology}, `{row.axes}` | {chunk} "
                f"| {total.cycles / 1e6:,.0f} M | {total.traffic / 1e9:.1f} "
                f"| {total.sent / 1e9:.1f} | {report.temporaries / 1e6:.0f} |",
                flush=True,
            )


def print_filled(folder: Path) -> None:
    """Prints what a chunk of a prompt costs in an empty slot, and how much more it costs with
    FILLED positions in the slot, around the kernel and in it. The least that the products take, at
    the full speed of the chip, stands beside them. Llama 4 is left out, because three quarters of
    its layers see two chunks at most."""
    print("| | layers | cache | empty | filled: more, around the kernel | in it | the products |")
    print("|---|---|---|---|---|---|---|")
    for row in ROWS:
        capacity = row.capacities[1]
        if capacity < FILLED or row.family == "llama4" or not row.topology.startswith("v5e"):
            continue
        for cache in CACHES[:2]:
            for file in folder.iterdir():
                file.unlink()
            _, program = compiled(row, devices_of(row.topology), capacity, cache)
            around = turn(program).cycles * FILLED / part_of(row, capacity)
            inside, least = attention_cycles(row, capacity, folder)
            print(
                f"| {row.size}, {row.topology}, `{row.axes}` | {row.layers} | {cache} "
                f"| {cycles(program) / 1e6:.1f} M | {around / 1e6:.1f} M | {inside / 1e6:.1f} M "
                f"| {least / 1e6:.1f} M |",
                flush=True,
            )


def attention_cycles(row: Row, capacity: int, folder: Path) -> tuple[float, float]:
    """The cycles in which the kernel lets a chunk's queries see FILLED positions, in all layers of
    the row that do, as counted in its machine code in `folder`; and the least that its products
    need on a v5e, which has four units of 128 x 128. A narrower matrix takes as long as one of
    128."""
    model = importlib.import_module(f"{row.family}.model")
    config = model.config_from_hf(importlib.import_module(f"{row.family}.shapes").SHAPES[row.size])
    layers = row.layers // 2 if row.family == "gpt_oss" else row.layers
    heads = config.num_attention_heads // math.prod(parse_mesh(row.axes).values())
    if "qk_nope_head_dim" in config._fields:
        made = config.qk_nope_head_dim + config.v_head_dim  # of a latent, for each head
        seen = made + round_up(config.qk_rope_head_dim, 128)
        products = CHUNK * seen + made * config.kv_lora_rank
        groups = heads  # which have keys of their own
    else:
        products = CHUNK * 2 * round_up(config.head_dim, 128)
        groups = max(1, heads * config.num_key_value_heads // config.num_attention_heads)
    queries, block = block_sizes(CHUNK, heads // groups, capacity)
    blocks = layers * groups * (CHUNK // queries) * FILLED // block
    return blocks * bundles_of_a_block(folder), heads * products * FILLED * layers / (4 * 128 * 128)


@mistakes_on_one_line()
def main(argv: Sequence[str] | None = None) -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.formatter_class = argparse.RawDescriptionHelpFormatter
    ap.add_argument("size", nargs="*", help="a word in the name of a published size")
    for name in ("slots", "chunks", "filled"):
        ap.add_argument(f"--{name}", action="store_true", help="another table, of all its sizes")
    args = ap.parse_args(argv)
    if args.slots or args.chunks:
        return print_slots() if args.slots else print_chunks()
    if args.filled:
        with TemporaryDirectory() as folder:
            ask_for_code(folder)
            return print_filled(Path(folder))
    rows = [row for row in ROWS if not args.size or any(name in row.size for name in args.size)]
    if not rows:
        ap.error(f"no size holds one of {args.size}: {', '.join(row.size for row in ROWS)}")
    print(
        "| | layers | cache | capacity | traffic, GB | cycles | collectives, MB | temporaries, MB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row, cache, reports in measured(rows):
        for capacity, r in zip(row.capacities, reports, strict=True):
            print(
                f"| {row.size}, {row.topology}, `{row.axes}` | {row.layers} | {cache} "
                f"| {capacity:,} | {r.traffic / 1e9:.2f} | {r.cycles / 1e6:.1f} M "
                f"| {r.sent / 1e6:.0f} | {r.temporaries / 1e6:.0f} |",
                flush=True,
            )
        small, large = reports
        ratios = [getattr(large, n) / getattr(small, n) for n in ("traffic", "cycles", "sent")]
        print("| | | | ratio | " + " | ".join(f"{x:.2f}" for x in ratios) + " | |", flush=True)


if __name__ == "__main__":
    main()

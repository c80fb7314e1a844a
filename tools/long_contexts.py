"""Prints what it costs to read 512 tokens into an empty slot, by how many positions the slot has.

    python tools/long_contexts.py                      # all rows
    python tools/long_contexts.py deepseek-r1 scout    # rows whose name contains one of these

Compiles a few layers at their true widths for a TPU slice (see `common.machines.dryrun`). Prints
the bytes that move through memory, the compiler's estimate of cycles, the bytes that collectives
return, and the bytes of temporaries. A loop of unknown length counts once: that is what an empty
slot takes, whose filled positions are one part.
"""

import importlib
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT)]

import jax.numpy as jnp  # noqa: E402

from common.machines.chips import devices_of  # noqa: E402
from common.machines.dryrun import Report, dry_run  # noqa: E402
from common.quant import INT8  # noqa: E402
from common.sharding import make_mesh, parse_mesh  # noqa: E402

CHUNK = 512
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


def measure(row: Row, devices: Any, capacity: int, cache: str) -> Report:
    """Compiles `row.layers` layers in int8 (experts that are published in 4 bits stay so)."""
    model = importlib.import_module(f"{row.family}.model")
    config = model.config_from_hf(importlib.import_module(f"{row.family}.shapes").SHAPES[row.size])
    if "first_k_dense_replace" in config._fields:  # one dense layer, then layers with experts
        config = config._replace(first_k_dense_replace=1)
    fields: Any = dict(num_hidden_layers=row.layers)
    if "n_layer" in config._fields:
        fields = dict(n_layer=row.layers)
    if "layer_types" in config._fields:
        fields |= dict(layer_types=config.layer_types[: row.layers])
    mesh = make_mesh(**parse_mesh(row.axes), devices=devices)
    options: Any = dict(storage=INT8, cache_dtype=jnp.dtype(cache), prefill=CHUNK, slots=1)
    report, _ = dry_run(model, config._replace(**fields), mesh, capacity=capacity, **options)
    return report


def measured(rows: list[Row]) -> Iterator[tuple[Row, str, list[Report]]]:
    """Yields each row with each kind of cache, and its reports: one for each capacity."""
    places = [(row, devices_of(row.topology)) for row in rows]
    with ThreadPoolExecutor(2) as pool:
        jobs = [
            (row, cache, [pool.submit(measure, row, at, S, cache) for S in row.capacities])
            for row, at in places
            for cache in CACHES
        ]
        for row, cache, reports in jobs:
            yield row, cache, [report.result() for report in reports]


def main(wanted: list[str]) -> None:
    rows = [row for row in ROWS if not wanted or any(name in row.size for name in wanted)]
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
    main(sys.argv[1:])

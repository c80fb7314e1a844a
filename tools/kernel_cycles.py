"""Counts the cycles of one dense product on a TPU, for each way to store its matrix.

    python -m tools.kernel_cycles [--chip v5e:2x2] [--out 3584] [--in 8192]

XLA estimates the cycles of its own operations, but not those of Pallas kernels. So both are counted
here in the machine code that the TPU compiler writes for them: one bundle of instructions a cycle,
times the rounds of the loops that it is in. Waiting for memory is not counted: compare with the
megabytes, of which a v5e reads 819,000 a second, or 0.55 KB in a cycle.
"""

import argparse
import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp

from common.machines.chips import devices_of
from common.machines.hlo import cycles, parse
from common.products import linear
from common.quant import bits_of, quantize_groups, quantize_weight
from common.sharding import P, make_mesh

ROWS = (8, 64, 512)
STORAGES = {
    "bf16": lambda w: w.astype(jnp.bfloat16),
    "int8": quantize_weight,
    "int4, groups of 128": partial(quantize_groups, group=128),
    "int4, groups of 64": partial(quantize_groups, group=64),
    "int4, groups of 32": partial(quantize_groups, group=32),
}
BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(?:([A-Z]{2})\s*)?:[\s>]*\{(.*)")
EXIT = re.compile(r"scmp\.\w+\.s32\.totalorder %\S+, (\d+) /\* loop exit test")


def count(text: str) -> int:
    """Counts the bundles of one operation, in all rounds of its loops. The outermost loop has two
    rounds more than steps, in which it only waits for the first copy and for the last."""
    found = [match.groups() for line in text.splitlines() if (match := BUNDLE.match(line))]
    times, begun = [1] * len(found), list[int]()
    for i, (tag, body) in enumerate(found):
        if tag == "LB":
            begun.append(i)
        if begun and (test := EXIT.search(body)):
            first = begun.pop()
            rounds = int(test[1]) if begun else max(1, int(test[1]) - 2)
            times[first : i + 1] = [rounds * n for n in times[first : i + 1]]
    return sum(times)


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


def main(argv: Sequence[str] | None = None) -> None:
    ap = argparse.ArgumentParser(prog="python -m tools.kernel_cycles", description=__doc__)
    ap.formatter_class = argparse.RawDescriptionHelpFormatter
    ap.add_argument("--chip", default="v5e:2x2")
    ap.add_argument("--out", type=int, default=3584, help="rows of the matrix")
    ap.add_argument("--in", type=int, default=8192, help="columns of the matrix", dest="n_in")
    args = ap.parse_args(argv)
    print("| stored as | rows | bundles | XLA's estimate, without kernels | MB |")
    print("|---|---|---|---|---|")
    with TemporaryDirectory() as folder:
        # libtpu reads this when the first topology is made.
        os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        for name, store in STORAGES.items():
            for rows in ROWS:
                cells = measure(store, rows, args.chip, args.out, args.n_in, Path(folder))
                print(f"| {name} | {rows} | {cells} |")


if __name__ == "__main__":
    main()

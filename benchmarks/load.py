"""Times loading a checkpoint against just reading its files, and measures the host memory it takes.

    python -m benchmarks.load deepseek_r1 --shape deepseek-r1 --layers 2 \\
        --set first_k_dense_replace=1 n_routed_experts=16

Writes a directory of random numbers in the published layout of a size, at its true widths. Then
loads it as it is, or in int8. The files were just written, so both read them from memory, not from
a disk; and both write to newly allocated memory. On Linux, /proc also tells how much memory the
load needs beyond the arrays themselves.
"""

import argparse
import gc
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import model_file
from common.command.cli import mistakes_on_one_line
from common.loading.checkpoint import load_weights, stored_layout
from common.loading.matching import fill, rows_by_path, starred
from common.loading.reading import stored_shape
from common.loading.shape import read_shape
from common.loading.stored import DTYPES
from common.quant import INT8
from common.sharding import make_mesh, parse_mesh
from common.weights import by_path

PIECE = 1 << 28
CODES = {dtype: code for code, dtype in DTYPES.items()}


def stored_tensors(module: Any, config: Any) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yields the name, dtype and shape of every tensor of a checkpoint, by applying the model
    file's table backwards."""
    rows = rows_by_path(module.checkpoint_table(config))
    for path, array in by_path(stored_layout(module.weight_layout(config))).items():
        pattern, numbers = starred(path)
        name, transform = rows[pattern]
        stacked = name.count("*") > len(numbers)
        shape = stored_shape(array.shape[1:] if stacked else array.shape, transform)
        code = CODES[np.dtype(array.dtype or jnp.bfloat16)]
        for i in range(array.shape[0] if stacked else 1):
            yield fill(name, [*numbers, str(i)]), code, shape


def write_random(directory: Path, tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> int:
    """Writes one safetensors file of random bytes below 120, which are finite in every dtype.
    Returns the size of its tensors in bytes."""
    header, at = {}, 0
    for name, code, shape in tensors:
        size = math.prod(shape) * DTYPES[code].itemsize
        header[name] = dict(dtype=code, shape=shape, data_offsets=[at, at + size])
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = np.random.default_rng(0).integers(0, 120, 1 << 24, np.uint8)
    with open(directory / "model.safetensors", "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for start in range(0, at, len(noise)):
            f.write(noise[: at - start].data)
    return at


def read_speed(file: Path) -> float:
    """Returns the bytes per second of reading the file into new memory, PIECE by PIECE: the best of
    three."""
    best = math.inf
    for _ in range(3):
        began = time.perf_counter()
        with open(file, "rb", buffering=0) as f:
            while f.readinto(np.empty(PIECE, np.uint8).data):
                pass
        best = min(best, time.perf_counter() - began)
    return file.stat().st_size / best


def resident(field: str) -> int | None:
    """Returns a field of /proc/self/status in bytes, or None if there is no such file."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    return int(status.read_text().split(field + ":")[1].split()[0]) * 1024


def reset_peak() -> None:
    if Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")


def value(text: str) -> tuple[str, Any]:
    key, _, number = text.partition("=")
    return key, json.loads(number)


@mistakes_on_one_line()
def main(argv: Sequence[str] | None = None) -> None:
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("model", help="the model's package, such as llama3")
    ap.add_argument("--shape", required=True, help="a name in its shapes.py, or a config.json")
    ap.add_argument("--layers", type=int, default=2, metavar="N")
    ap.add_argument("--set", nargs="*", type=value, default=[], metavar="KEY=JSON")
    ap.add_argument("--mesh", default="", metavar="AXES")
    ap.add_argument("--quant", choices=["int8"])
    args = ap.parse_args(argv)
    module = model_file(args.model)
    axes: Any = parse_mesh(args.mesh)
    if (need := math.prod(axes.values())) > 1:
        jax.config.update("jax_num_cpu_devices", need)
    hf = read_shape(module, args.shape, random=True)[0] | dict(args.set)
    config = module.config_from_hf(hf | dict(num_hidden_layers=args.layers))
    mesh, storage = make_mesh(**axes), INT8 if args.quant else None
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        size = write_random(directory, list(stored_tensors(module, config)))
        speed = read_speed(directory / "model.safetensors")
        seconds, weights = math.inf, None
        for _ in range(3):  # in the first load, the machine itself may have to find the memory
            del weights
            gc.collect()
            reset_peak()
            before = resident("VmRSS")
            began = time.perf_counter()
            weights = load_weights(directory, module, config, mesh, jnp.bfloat16, storage=storage)
            seconds = min(seconds, time.perf_counter() - began)
    arrays = sum(x.nbytes for x in jax.tree.leaves(weights))
    peak = resident("VmHWM")
    sys.stdout.write(
        f"{size / 1e9:.2f} GB in {seconds:.2f} s: {size / seconds / speed:.0%} of the file's "
        f"read speed, {speed / 1e9:.2f} GB/s\n"
    )
    if peak is not None and before is not None and mesh.devices.flat[0].platform == "cpu":
        beyond = peak - before - arrays
        sys.stdout.write(
            f"memory beyond {arrays / 1e9:.2f} GB of arrays: {beyond / 2**20:.0f} MiB\n"
        )


if __name__ == "__main__":
    main()

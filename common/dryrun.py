"""The dry run: what a decoding or prefill step costs on hardware that is not there.

Compiles a model's `generate` or `prefill` for a TPU topology (or the CPU's host devices) from a
config alone: no weights, no accelerator. What the compiler then says is exact (memory, aliasing,
collectives); what it moves through memory is read off the program; how long it takes is not known.

    python -m common.dryrun llama3 --shape llama3.1-70b --topology v5e:4x4 \\
        --mesh expert=8,tensor=2 --slots 8 --capacity 2048 --quant int8 --kv-quant int8
"""

import argparse
import importlib
import math
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from common.hlo import Collective, collectives, cycles, operations, parse, traffic
from common.kernels.dispatch import Impl
from common.kernels.ragged_dot import row_major
from common.load import published_sizes, read_shape
from common.quant import INT8, Storage
from common.random_weights import random_weights
from common.sharding import DATA, P, make_mesh, model_shards, parse_mesh
from common.weights import check_divides, specs_like

# What libtpu reads when it is loaded: no question to a metadata server, no complaint that the host
# is not a TPU's, and several dry runs at once.
TPU_ENVIRONMENT = dict(
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-1",
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="true",
)


class Report(NamedTuple):
    """One device's share of one step, in bytes unless named otherwise."""

    devices: int
    seconds: float  # to compile
    weights: int
    cache: int
    arguments: int  # weights, cache and the few numbers per slot; a TPU pads each to whole tiles
    outputs: int  # the new cache among them
    aliased: int  # outputs that overwrite an argument: all of the cache, or it is copied
    temporaries: int
    traffic: int  # see `traffic`
    flops: float  # by XLA, which counts loops once and kernels not at all
    cycles: int  # the TPU compiler's own estimate, operation by operation
    operations: int  # that run one after the other
    collectives: tuple[Collective, ...]

    @property
    def memory(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries


def abstract(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """The shapes of a tree of arrays, laid out as `specs` (a prefix of the tree) say."""

    def place(spec: Any, subtree: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), subtree
        )

    return jax.tree.map(place, specs, tree, is_leaf=lambda x: isinstance(x, P))


def as_loaded(tree: Any) -> Any:
    """Weights as the loader lays them out."""

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        rows: Any = row_major(x.sharding, x.ndim)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)

    return jax.tree.map(place, tree)


def abstract_weights(
    module: ModuleType, config: Any, mesh: Mesh, dtype: DTypeLike, storage: Storage | None
) -> Any:
    """A model's weights on a mesh, as shapes."""
    layout = module.weight_layout(config, model_shards(mesh))
    check_divides(layout, model_shards(mesh))
    weights = jax.eval_shape(partial(random_weights, layout, mesh, dtype, 0, storage))
    return as_loaded(abstract(weights, specs_like(weights, layout), mesh))


def abstract_state(
    module: ModuleType, config: Any, mesh: Mesh, slots: int, capacity: int, dtype: DTypeLike
) -> Any:
    """Its DecodeState, as shapes."""
    make = partial(module.init_state, config, slots, capacity, dtype, model_shards(mesh))
    return abstract(jax.eval_shape(make), module.STATE_SPEC, mesh)


def device_bytes(tree: Any) -> int:
    """Bytes of one device's part of a tree of abstract arrays."""
    parts = ((x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(tree))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)


def dry_run(
    module: ModuleType,
    config: Any,
    mesh: Mesh,
    *,
    slots: int,
    capacity: int,
    prefill: int | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    cache_dtype: DTypeLike = jnp.bfloat16,
    storage: Storage | None = None,
    implementation: Impl = None,
) -> tuple[Report, str]:
    """The report on one step, and the compiled program as text.

    A step decodes one token in all slots, or reads `prefill` tokens of one prompt per data shard.
    """
    rows = mesh.shape[DATA] if prefill else slots
    weights = abstract_weights(module, config, mesh, dtype, storage)
    state = abstract_state(module, config, mesh, rows, capacity, cache_dtype)
    static: Any = dict(config=config, mesh=mesh, implementation=implementation)
    if prefill:
        tokens = abstract(jax.ShapeDtypeStruct((rows, prefill), jnp.int32), P(DATA), mesh)
        lowered = module.prefill.lower(weights, state, tokens, state.length_B, **static)
    else:
        lowered = module.generate.lower(weights, state, **static)
    start = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    program = parse(text)
    report = Report(
        devices=mesh.size,
        seconds=seconds,
        weights=device_bytes(weights),
        cache=device_bytes(state.cache),
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        traffic=traffic(program),
        flops=compiled.cost_analysis().get("flops", 0.0),
        cycles=cycles(program),
        operations=operations(program),
        collectives=collectives(program),
    )
    return report, text


def show(report: Report) -> str:
    """The report as text."""
    r, gb = report, lambda n: f"{n / 1e9:9.3f} GB"
    share = r.traffic / (r.weights + r.cache)
    lines = [
        f"compiled for {r.devices} devices in {r.seconds:.0f} s; per device:",
        f"weights        {gb(r.weights)}",
        f"cache          {gb(r.cache)}  {r.aliased / r.cache:.1%} of it updated in place",
        f"temporaries    {gb(r.temporaries)}",
        f"memory in all  {gb(r.memory)}",
        f"traffic        {gb(r.traffic)}  {share:.2f} of weights and cache",
        f"flops          {r.flops / 1e12:9.3f} T",
        f"operations     {r.operations:9} one after the other, estimated at {r.cycles} cycles",
    ]
    for conditional, title in enumerate(("collectives", "  in branches")):
        chosen = [c for c in r.collectives if c.conditional == bool(conditional)]
        times, size = sum(c.times for c in chosen), sum(c.bytes for c in chosen)
        lines.append(f"{title:14} {times:9} of {size / 1e6:.2f} MB")
        lines += [f"    {c.times:5} x {c.kind:18} {c.shape}" for c in chosen]
    return "\n".join(lines)


def devices_of(topology: str) -> Sequence[Any]:
    """Devices to compile for: of a TPU topology such as "v5e:4x4", or this host's for "cpu"."""
    if topology == "cpu":
        return jax.devices("cpu")
    for name, value in TPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(topology, platform="tpu").devices
    except Exception as error:  # of whatever kind the plugin raises
        line = str(error).splitlines()[0]
        raise ValueError(f"--topology {topology!r}: {line} (TPUs need libtpu installed)") from None


def parser() -> argparse.ArgumentParser:
    ap = argparse.ArgumentParser(prog="python -m common.dryrun", description=__doc__.split("\n")[0])
    ap.add_argument("model", help="the model's package, such as llama3")
    ap.add_argument(
        "--shape", required=True, help="a name in the model's shapes.py, or a config.json"
    )
    ap.add_argument("--layers", type=int, metavar="N", help="instead of the shape's own number")
    ap.add_argument("--topology", default="cpu", help="v5e:4x4, v5p:2x2x1, v6e:8x8, ... or cpu")
    ap.add_argument("--mesh", default="", metavar="AXES", help="e.g. data=1,expert=8,tensor=2")
    ap.add_argument("--slots", type=int, default=8, metavar="N")
    ap.add_argument("--capacity", type=int, default=2048, metavar="N", help="positions a slot")
    ap.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    ap.add_argument("--quant", choices=["int8"])
    ap.add_argument("--kv-quant", choices=["int8"])
    ap.add_argument(
        "--prefill", type=int, metavar="T", help="T tokens of one prompt per data shard"
    )
    ap.add_argument("--implementation", help="of attention; default: the platform's")
    ap.add_argument("--hlo", type=Path, metavar="FILE", help="write the compiled program")
    return ap


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the report; exits with 2 on a user's mistake, or if the step does not fit."""
    args = parser().parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    try:
        report, text = run(args)
        if args.hlo:
            args.hlo.write_text(text, encoding="utf-8")
    except (ValueError, OSError, ModuleNotFoundError, jax.errors.JaxRuntimeError) as error:
        sys.stderr.write(f"error: {str(error).splitlines()[0]}\n")
        sys.exit(2)
    print(show(report))


def run(args: argparse.Namespace) -> tuple[Report, str]:
    for name in ("layers", "slots", "capacity", "prefill"):
        if (n := getattr(args, name)) is not None and n < 1:
            raise ValueError(f"--{name} {n}: must be at least 1")
    module = importlib.import_module(f"{args.model}.model")
    if args.shape not in (sizes := published_sizes(module)) and not Path(args.shape).is_file():
        raise ValueError(f"--shape {args.shape!r} is neither a file nor one of {', '.join(sizes)}")
    config = module.config_from_hf(read_shape(module, args.shape, random=True)[0])
    if args.layers:
        if args.layers > (layers := config.num_hidden_layers):
            raise ValueError(f"--layers {args.layers}: the model has only {layers}")
        config = config._replace(num_hidden_layers=args.layers)
    axes = parse_mesh(args.mesh)
    if args.slots % axes.get(DATA, 1):
        raise ValueError(f"--slots {args.slots} do not divide over data={axes[DATA]}")
    if args.topology == "cpu":
        jax.config.update("jax_num_cpu_devices", math.prod(axes.values()))
    mesh = make_mesh(**axes, devices=devices_of(args.topology))
    return dry_run(
        module,
        config,
        mesh,
        slots=args.slots,
        capacity=args.capacity,
        prefill=args.prefill,
        dtype=jnp.dtype(args.dtype),
        cache_dtype=jnp.dtype(args.kv_quant or args.dtype),
        storage=INT8 if args.quant else None,
        implementation=args.implementation,
    )


if __name__ == "__main__":
    main()

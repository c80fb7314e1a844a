"""The dry run: what a decoding or prefill step costs on hardware that is not there.

Compiles a model's `generate` or `prefill` for a TPU topology (or the CPU's host devices) from a
config alone: no weights, no accelerator. What the compiler then says is exact (memory, aliasing,
collectives); what it moves through memory is read off the program; how long it takes is not known.

    python -m common.dryrun llama3 --shape llama3.1-70b --topology v5e:4x4 \\
        --mesh expert=8,tensor=2 --slots 8 --capacity 2048 --quant int8 --kv-quant int8
"""

import argparse
import importlib
import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from common.checkpoint import random_weights
from common.kernels.ragged_dot import row_major
from common.quant import INT8, Form, specs_like
from common.sharding import DATA, make_mesh, model_shards

# What libtpu reads when it is loaded: no question to a metadata server, no complaint that the host
# is not a TPU's, and several dry runs at once.
TPU_ENVIRONMENT = dict(
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-1",
    TPU_WORKER_HOSTNAMES="localhost",
    ALLOW_MULTIPLE_LIBTPU_LOAD="true",
)


class Collective(NamedTuple):
    """Equal collectives of one step, on one device."""

    kind: str  # "all-reduce"
    shape: str  # of the result: "bf16[8,1,8192]"
    times: int
    bytes: int  # of all results together
    conditional: bool  # in a branch that a step may not take, such as that of sampling


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
    collectives: tuple[Collective, ...]

    @property
    def memory(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries


def abstract(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """The shapes of a tree of arrays, laid out as `specs` (a prefix of the tree) say."""

    def place(spec: P, subtree: Any) -> Any:
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


def abstract_weights(model: Any, config: Any, mesh: Mesh, dtype: Any, form: Form | None) -> Any:
    """A model's weights on a mesh, as shapes."""
    specs, shapes = model.weight_specs(config), model.weight_shapes(config, model_shards(mesh))
    make = partial(random_weights, shapes, specs, mesh, dtype, seed=0, form=form)
    weights = jax.eval_shape(make)
    return as_loaded(abstract(weights, specs_like(weights, specs), mesh))


def abstract_state(
    model: Any, config: Any, mesh: Mesh, slots: int, capacity: int, cache_dtype: Any
) -> Any:
    """Its DecodeState, as shapes."""
    make = partial(model.init_state, config, slots, capacity, cache_dtype, model_shards(mesh))
    return abstract(jax.eval_shape(make), model.STATE_SPEC, mesh)


def device_bytes(tree: Any) -> int:
    """Bytes of one device's part of a tree of abstract arrays."""
    parts = ((x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(tree))
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in parts)


def dry_run(
    model: Any,
    config: Any,
    mesh: Mesh,
    *,
    slots: int,
    capacity: int,
    prefill: int | None = None,
    dtype: Any = jnp.bfloat16,
    cache_dtype: Any = jnp.bfloat16,
    form: Form | None = None,
    implementation: str | None = None,
) -> tuple[Report, str]:
    """The report on one step, and the compiled program as text.

    A step decodes one token in all slots, or reads `prefill` tokens of one prompt per data shard.
    """
    rows = mesh.shape[DATA] if prefill else slots
    weights = abstract_weights(model, config, mesh, dtype, form)
    state = abstract_state(model, config, mesh, rows, capacity, cache_dtype)
    options = dict(config=config, mesh=mesh, implementation=implementation)
    if prefill:
        tokens = abstract(jax.ShapeDtypeStruct((rows, prefill), jnp.int32), P(DATA), mesh)
        columns = (tokens, state.length_B, state.length_B, state.sampling)
        lowered = model.prefill.lower(weights, state.cache, *columns, **options)
    else:
        lowered = model.generate.lower(weights, state, **options)
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
        collectives=collectives(program),
    )
    return report, text


# Compiled HLO: a program is named computations, each a list of operations in text.


class Op(NamedTuple):
    name: str
    type: str  # "bf16[8,128]{1,0:T(8,128)(2,1)S(1)}", or a tuple of such
    kind: str
    operands: tuple[str, ...]  # names; of a parameter its number, of a constant its value
    rest: str  # attributes
    root: bool


class Program(NamedTuple):
    computations: dict[str, dict[str, Op]]
    entry: str


OP = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(?:, (.*))?$")
ARRAY = re.compile(r"\b([a-z]+(\d+)\w*|pred)\[([\d,]*)\](?:\{([^}]*)\})?")
CALLS = re.compile(
    r"\b(calls|to_apply|condition|body|\w+_computations?)=\{?(%[\w.\-]+(?:, %[\w.\-]+)*)"
)
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
COLLECTIVES = ["all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute"]
CONTROL = ("while", "conditional", "call", "async-start")  # run other computations
VIEWS = ("bitcast", "tuple", "get-tuple-element", "parameter", "constant", "opt-barrier")
SLICES = ("dynamic-slice", "slice", "gather")  # read what they return
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # in place: write this operand


def parse(text: str) -> Program:
    computations: dict[str, dict[str, Op]] = {}
    entry = ""
    for line in text.splitlines():
        if found := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            current = computations.setdefault(found[2], {})
            entry = found[2] if found[1] else entry
        elif found := OP.match(line):
            root, name, type_, kind, operands, rest = found.groups("")
            names = tuple(re.findall(r"%([\w.\-]+)", operands)) or (operands,)
            current[name] = Op(name, type_, kind, names, rest, bool(root))
    return Program(computations, entry)


def arrays(type_: str) -> list[tuple[str, int, bool]]:
    """Of each array in a type: dtype and shape, bytes, and whether it lies in main memory."""
    out = []
    for dtype, bits, shape, layout in ARRAY.findall(type_):
        size = math.prod(int(n) for n in shape.split(",") if n)
        bytes_ = -(-size * int(bits or 8) // 8)
        out.append((f"{dtype}[{shape}]", bytes_, "S(" not in layout))
    return out


def called(op: Op) -> dict[str, list[str]]:
    """The computations that an operation runs, by the name of the attribute."""
    return {kind: re.findall(r"%([\w.\-]+)", names) for kind, names in CALLS.findall(op.rest)}


def trips(program: Program, loop: Op) -> int:
    """How often a loop runs, 1 if that is not known.

    A program for CPU says it. One for TPU shows the limit, if constant; it is taken to be counted
    to from 0 by 1, as `lax.scan` does.
    """
    if known := TRIPS.search(loop.rest):
        return int(known[1])
    condition = program.computations[called(loop)["condition"][0]]
    root = next(op for op in condition.values() if op.root)
    limit = condition[root.operands[-1]]
    counts = root.kind == "compare" and "direction=LT" in root.rest and limit.kind == "constant"
    return int(limit.operands[0]) if counts else 1


def executed(
    program: Program, into: tuple[str, ...] = CONTROL
) -> Iterator[tuple[Op, dict[str, Op], int, bool]]:
    """Operations in the order of the text: with their computation, how often, and if in a branch.

    A loop of unknown length counts once.
    """

    def walk(name: str, times: int, conditional: bool) -> Iterator[Any]:
        computation = program.computations[name]
        for op in computation.values():
            yield op, computation, times, conditional
            if op.kind in into:
                repeat = times * trips(program, op) if op.kind == "while" else times
                for child in (c for names in called(op).values() for c in names):
                    yield from walk(child, repeat, conditional or op.kind == "conditional")

    return walk(program.entry, 1, False)


def collectives(program: Program) -> tuple[Collective, ...]:
    """Equal collectives together, those of every step first."""
    counts: Counter[tuple[bool, str, str, int]] = Counter()
    for op, _, times, conditional in executed(program, (*CONTROL, "fusion")):
        kind = op.kind.removesuffix("-start")
        if kind not in COLLECTIVES:
            continue
        results = arrays(op.type)
        if op.kind in ("all-gather-start", "collective-permute-start"):
            results = results[1:2]  # the operand comes first
        shape = ", ".join(shape for shape, _, _ in results)
        counts[conditional, kind, shape, sum(n for _, n, _ in results)] += times
    return tuple(
        Collective(kind, shape, n, n * size, conditional)
        for (conditional, kind, shape, size), n in sorted(counts.items())
    )


def traffic(program: Program) -> int:
    """Bytes that every step moves between main memory and the chip, read off the program.

    Operands and results that lie in main memory; of slices and updates in place, the part that
    they touch. A prefetch into on-chip memory counts where it is made. A kernel counts as reading
    all of its operands; branches do not count. XLA's own "bytes accessed" is several times more on
    TPU: it also counts on-chip memory, and for each piece of a prefetch the whole array.
    """
    return sum(
        times * sum(moved(program, computation, op))
        for op, computation, times, conditional in executed(program)
        if not conditional
    )


def moved(program: Program, computation: dict[str, Op], op: Op) -> tuple[int, int]:
    """Bytes that an operation of `computation` reads from and writes to main memory."""
    if op.kind in (*VIEWS, *CONTROL) or op.kind.endswith("-done"):
        return 0, 0
    if op.kind in ("copy-start", "slice-start"):
        if "cross_program_prefetch_index" in op.rest:
            return 0, 0  # made at the end of the step before, and counted there
        first, second = arrays(op.type)[:2]
        source, target = (second, first) if op.kind == "copy-start" else (first, second)
        size = min(source[1], target[1])
        return size * source[2], size * target[2]
    read = 0
    for i, name in enumerate(op.operands):
        if name in computation:
            full = sum(n for _, n, main in arrays(computation[name].type) if main)
            read += full and _read(program, computation, op, i, full)
    inner = [program.computations[c] for c in called(op).get("calls", [])]
    return read, _written(inner[0] if inner else computation, op)


def _read(program: Program, computation: dict[str, Op], op: Op, i: int, full: int) -> int:
    """What `op` reads of its operand i of `full` bytes."""
    if op.kind == "fusion":
        inner = program.computations[called(op)["calls"][0]]
        parameter = next(
            p for p in inner.values() if p.kind == "parameter" and p.operands[0] == str(i)
        )
        return _read_by_users(program, inner, parameter, full)
    if op.kind in SLICES and i == 0:
        return min(full, sum(n for _, n, _ in arrays(op.type)))
    if op.kind in UPDATES and i == 0:
        return 0
    if op.kind in ("bitcast", "reshape", "convert"):
        return _read_by_users(program, computation, op, full)
    return full


def _read_by_users(program: Program, computation: dict[str, Op], op: Op, full: int) -> int:
    if op.root:
        return full
    users = ((u, i) for u in computation.values() for i, x in enumerate(u.operands) if x == op.name)
    return min(full, sum(_read(program, computation, u, i, full) for u, i in users))


def _written(inner: dict[str, Op], op: Op) -> int:
    """What `op` writes; `inner` is the computation that holds what it runs."""
    root = next((x for x in inner.values() if x.root), op) if op.kind == "fusion" else op
    parts = [inner[x] for x in root.operands] if root.kind == "tuple" else [root]
    written = 0
    for part, (_, size, main) in zip(parts, arrays(op.type), strict=False):
        while part.kind == "bitcast":
            part = inner[part.operands[0]]
        update = inner.get(part.operands[UPDATES[part.kind]]) if part.kind in UPDATES else None
        size = sum(n for _, n, _ in arrays(update.type)) if update else size
        written += size if main else 0
    return written


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
    from common.cli import parse_mesh

    for name in ("layers", "slots", "capacity", "prefill"):
        if (n := getattr(args, name)) is not None and n < 1:
            raise ValueError(f"--{name} {n}: must be at least 1")
    model = importlib.import_module(f"{args.model}.model")
    shapes = importlib.import_module(f"{args.model}.shapes").SHAPES
    if args.shape in shapes:
        hf = shapes[args.shape]
    elif Path(args.shape).is_file():
        hf = json.loads(Path(args.shape).read_text(encoding="utf-8"))
    else:
        raise ValueError(f"--shape {args.shape!r} is neither a file nor one of {', '.join(shapes)}")
    try:
        config = model.config_from_hf(hf)
    except KeyError as missing:
        raise ValueError(f"--shape {args.shape!r} has no {missing}") from None
    if args.layers:
        config = config._replace(num_hidden_layers=args.layers)
    axes = parse_mesh(args.mesh)
    if args.slots % axes.get(DATA, 1):
        raise ValueError(f"--slots {args.slots} do not divide over data={axes[DATA]}")
    if args.topology == "cpu":
        jax.config.update("jax_num_cpu_devices", math.prod(axes.values()))
    mesh = make_mesh(**axes, devices=devices_of(args.topology))
    return dry_run(
        model,
        config,
        mesh,
        slots=args.slots,
        capacity=args.capacity,
        prefill=args.prefill,
        dtype=jnp.dtype(args.dtype),
        cache_dtype=jnp.dtype(args.kv_quant or args.dtype),
        form=INT8 if args.quant else None,
        implementation=args.implementation,
    )


if __name__ == "__main__":
    main()

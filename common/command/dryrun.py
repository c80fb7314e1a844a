"""The option --dry-run: decides what is compiled for which devices, and prints the figures."""

import argparse
import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from common.command.environment import MOST_CPU_DEVICES
from common.fields import with_layers
from common.loading.packed import declare
from common.loading.shape import model_dtype, read_model_config, read_shape
from common.machines.chips import UNKNOWN, Chip
from common.machines.dryrun import DryRun, Report, dry_runs
from common.machines.mesh_choice import Plan
from common.quant import TRANSPOSED, Fp8, Mxfp4, Packed
from common.serving.load import cache_dtype, storage_of
from common.sharding import axes_of
from common.weights import by_path, storage_for


def plan_of(module: ModuleType, args: argparse.Namespace, topology: str) -> Plan:
    """Returns what a run with these options would have. ValueError if it could not run."""
    hf, directory = read_shape(module, args.ckpt, args.revision, random=True, config_only=True)
    files = directory if directory is not None and any(directory.glob("*.safetensors")) else None
    config = read_model_config(module, hf)
    depth, limit = config.num_hidden_layers, config.max_position_embeddings
    if (layers := args.layers or depth) > depth:
        raise ValueError(f"--layers {layers}: the model has only {depth}")
    if (capacity := args.max_len or min(2048, limit)) > limit:
        raise ValueError(f"--max-len {capacity} is above max_position_embeddings, {limit}")
    on_cpu = topology.startswith("cpu")
    dtype = model_dtype(hf, files, args.dtype, on_cpu)
    return Plan(
        module,
        with_layers(config, layers),
        slots=args.slots or 8,
        capacity=capacity,
        dtype=dtype,
        cache_dtype=cache_dtype(dtype, on_cpu, args.kv_quant),
        storage=storage_of(dtype, on_cpu, args.quant),
        name=Path(args.ckpt).name if args.ckpt else str(module.__package__),
    )


# Names of published forms, and of the values of packed ones.
PUBLISHED: dict[Any, str] = {Fp8: "fp8", Mxfp4: "mxfp4", jnp.float8_e4m3fn: "fp8"}
PUBLISHED |= {jnp.int4: "int4", jnp.int8: "int8"}


def stored(plan: Plan) -> str:
    """Says in words how weights and cache are stored."""
    layout = by_path(declare(plan.module, plan.config)[0]).values()
    kept = [w.published for w in layout if storage_for(w, plan.storage) is None]
    forms = (x.dtype if isinstance(x, Packed) else x for x in kept)
    names = {PUBLISHED[form] for form in forms if form in PUBLISHED}
    if plan.storage is not None and plan.storage is not TRANSPOSED:
        names.add(plan.storage.name)
    elif "fp8" not in names:
        names.add(str(plan.dtype))
    return f"{' and '.join(sorted(names))} weights, {plan.cache_dtype} cache"


def gigabytes(n: float) -> str:
    return "unknown memory" if n == UNKNOWN else f"{n / 1e9:.2f} GB"


def cells(r: Report, chip: Chip) -> dict[str, str]:
    """Returns the figures of a step by name."""
    figures = {"weights": gigabytes(r.weights), "cache": gigabytes(r.cache)}
    if r.refusal:
        return figures
    figures |= {
        "temporaries": gigabytes(r.temporaries),
        "memory of the step": gigabytes(r.memory),
        "cache in place": f"{min(1.0, r.aliased / r.cache):.0%}",
        "traffic": gigabytes(r.traffic),
        "collectives": f"{r.messages} of {r.sent / 1e6:.2f} MB",
        "operations": str(r.operations),
        "cycles": str(r.cycles) if r.cycles else "not said",
        "compiled in": f"{r.seconds:.0f} s",
    }
    return figures | {f"floor: {name}": f"{ms:.3f} ms" for name, ms in r.floor_ms(chip).items()}


def verdict(run: DryRun) -> str:
    """Says whether serving fits, and how much more would fit; or why it does not fit."""
    text = f"serving takes {gigabytes(run.memory)} of {gigabytes(run.chip.memory)} a device"
    if not run.fits:
        refusals = [r.refusal for r in (run.decode, run.read) if r.refusal]
        return "\n".join([f"does not fit: {text}", *refusals])
    if run.chip.memory == UNKNOWN:
        return f"serving takes {gigabytes(run.memory)} a device"
    slots, positions = run.room
    more = f"{slots} slots of {run.plan.capacity}, or {run.plan.slots} of {positions} positions"
    return f"fits: {text}; room for {more}"


ASSUMED = "  (a CPU's bandwidth and arithmetic are assumed, not measured, and so are the floors)"


def show(run: DryRun) -> str:
    """Formats one dry run as text: what a device has and does in each step."""
    plan, chip, mesh, steps = run.plan, run.chip, run.mesh, (run.decode, run.read)
    by = ", the mesh chosen" if run.chosen and mesh.size > 1 else ""
    lines = [
        f"{plan.name}: {stored(plan)}; {plan.slots} slots of {plan.capacity} positions, "
        f"{plan.config.num_hidden_layers} layers",
        f"{run.topology}: {mesh.size} devices of {gigabytes(chip.memory)}, "
        f"{chip.bandwidth / 1e9:.0f} GB/s, {chip.flops / 1e12:.0f} TFLOP/s; {axes_of(mesh)}{by}",
        verdict(run),
        "  (weights, the cache of all slots and of one prompt, the larger temporaries)",
        *([ASSUMED] if chip.memory == UNKNOWN else []),
    ]
    columns = [cells(step, chip) for step in steps]
    lines += ["", f"{'':18}{steps[0].name:>18}{steps[1].name:>18}"]
    for name in max(columns, key=len):
        lines.append(f"{name:18}" + "".join(f"{column.get(name, '-'):>18}" for column in columns))
    for step in steps:
        lines += [f"collectives, {step.name}:"] if step.collectives else []
        for c in step.collectives:
            branch = "  (when sampling)" if c.conditional else ""
            lines.append(f"  {c.times:5} x {c.kind:18} {c.shape}{branch}")
    return "\n".join(lines)


def as_json(run: DryRun) -> dict[str, Any]:
    """Returns all figures: bytes, milliseconds and counts."""

    def of(r: Report) -> dict[str, Any]:
        if r.refusal:
            return dict(weights=r.weights, cache=r.cache, refusal=r.refusal)
        figures = r._asdict() | dict(memory=r.memory, seconds=round(r.seconds, 1))
        figures["collectives"] = [c._asdict() for c in r.collectives]
        figures["floor_ms"] = {name: round(ms, 6) for name, ms in r.floor_ms(run.chip).items()}
        return {x: figures[x] for x in figures if x not in ("name", "unread", "refusal")}

    plan, (slots, positions) = run.plan, run.room
    what = dict(model=plan.name, stored=stored(plan), slots=plan.slots, capacity=plan.capacity)
    where = dict(topology=run.topology, mesh=axes_of(run.mesh), mesh_chosen=run.chosen)
    fits = dict(memory=run.memory, fits=run.fits, most_slots=slots, most_positions=positions)
    steps = dict(decode=of(run.decode), prompt=of(run.read))
    return dict(**what, prompt=plan.prompt, **where, chip=run.chip._asdict(), **fits, steps=steps)


def print_dry_runs(module: ModuleType, args: argparse.Namespace) -> None:
    """Runs --dry-run: checks everything, compiles, and prints the figures to stdout."""
    if hosts := [int(n) for n in re.findall(r"cpu:(\d+)", " ".join(args.dry_run))]:
        jax.config.update("jax_num_cpu_devices", min(max(1, *hosts), MOST_CPU_DEVICES))
    meshes = args.mesh or [""]
    targets = [(plan_of(module, args, t), t, axes) for t in args.dry_run for axes in meshes]
    if sys.stderr.isatty():
        sys.stderr.write(f"[compiling {2 * len(targets)} programs; large ones take minutes]\n")
    runs = dry_runs(targets, args.prompt_tokens)
    if args.json:
        return print(json.dumps([as_json(run) for run in runs], indent=1))
    for i, run in enumerate(runs):
        print("\n" * (i > 0) + show(run), flush=True)

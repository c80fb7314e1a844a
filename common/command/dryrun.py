"""The option --dry-run: decides what is compiled for which devices, and prints the figures.

python -m llama3.main --ckpt llama3.1-70b --quant int8 --kv-quant int8 --dry-run v5e:4x4
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax

from common.command.environment import MOST_CPU_DEVICES
from common.kernels.dispatch import AUTO
from common.loading.shape import model_dtype, read_model_config, read_shape
from common.machines.chips import UNKNOWN, Chip
from common.machines.dryrun import CompiledStep, DryRun, Plan, dry_runs, target_of
from common.serving.load import cache_dtype, storage_of
from common.sharding import axes_of


def plan_of(module: ModuleType, args: argparse.Namespace, topology: str) -> Plan:
    """Returns what a run with these options would have on a topology. ValueError if it could not
    run."""
    for name in ("slots", "max_len", "prompt_tokens", "layers"):
        if (n := getattr(args, name)) is not None and n < 1:
            raise ValueError(f"--{name.replace('_', '-')} {n}: must be at least 1")
    hf, directory = read_shape(module, args.ckpt, args.revision, random=True, config_only=True)
    stored = directory if directory is not None and any(directory.glob("*.safetensors")) else None
    config = read_model_config(module, hf)
    if args.layers:
        if args.layers > config.num_hidden_layers:
            raise ValueError(
                f"--layers {args.layers}: the model has only {config.num_hidden_layers}"
            )
        config = config._replace(num_hidden_layers=args.layers)
    limit = config.max_position_embeddings
    if (capacity := args.max_len or min(2048, limit)) > limit:
        raise ValueError(f"--max-len {capacity} is above max_position_embeddings, {limit}")
    dtype, on_cpu = model_dtype(hf, stored, args.dtype), topology.startswith("cpu")
    name = Path(args.ckpt).name if args.ckpt else str(module.__package__)
    return Plan(
        module,
        config,
        name,
        slots=args.slots or 8,
        capacity=capacity,
        prompt=min(args.prompt_tokens, capacity),
        dtype=dtype,
        cache_dtype=cache_dtype(dtype, on_cpu, args.kv_quant),
        storage=storage_of(dtype, on_cpu, args.quant),
        implementation=args.implementation or AUTO,
    )


def gigabytes(n: float) -> str:
    return f"{n / 1e9:.2f} GB"


def memory_of(chip: Chip) -> str:
    return "unknown memory" if chip.memory == UNKNOWN else gigabytes(chip.memory)


def cells(step: CompiledStep, chip: Chip) -> dict[str, str]:
    """Returns the figures of a step by name."""
    figures = {"weights": gigabytes(step.weights), "cache": gigabytes(step.cache)}
    if (r := step.report) is None:
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
    floors = step.floor_ms(chip).items()
    return figures | {f"floor: {name}": f"{ms:.3f} ms" for name, ms in floors}


def verdict(run: DryRun) -> str:
    """Says whether serving fits, and how much more would fit; or why it does not fit."""
    if run.fits and run.chip.memory == UNKNOWN:
        return f"serving takes {gigabytes(run.memory)} a device"
    text = f"serving takes {gigabytes(run.memory)} of {memory_of(run.chip)} a device"
    if run.fits:
        slots, positions = run.room
        more = f"{slots} slots of {run.plan.capacity}, or {run.plan.slots} of {positions}"
        return f"fits: {text}; room for {more} positions"
    refusals = [step.refusal for step in (run.decode, run.read) if step.refusal]
    return "\n".join([f"does not fit: {text}", *refusals])


def title(run: DryRun) -> str:
    plan, chip, mesh = run.plan, run.chip, run.mesh
    by = ", the mesh chosen" if run.chosen and mesh.size > 1 else ""
    return (
        f"{plan.name}: {plan.stored}; {plan.slots} slots of {plan.capacity} positions, "
        f"{plan.config.num_hidden_layers} layers\n"
        f"{run.topology}: {mesh.size} devices of {memory_of(chip)}, "
        f"{chip.bandwidth / 1e9:.0f} GB/s, {chip.flops / 1e12:.0f} TFLOP/s; {axes_of(mesh)}{by}"
    )


def show(run: DryRun) -> str:
    """Formats one dry run as text: what a device has and does in each step."""
    steps = (run.decode, run.read)
    columns = [cells(step, run.chip) for step in steps]
    lines = [title(run), verdict(run), SERVING]
    lines += [ASSUMED] if run.chip.memory == UNKNOWN else []
    lines += ["", f"{'':18}{steps[0].name:>18}{steps[1].name:>18}"]
    for name in max(columns, key=len):
        lines.append(f"{name:18}" + "".join(f"{column.get(name, '-'):>18}" for column in columns))
    for step in steps:
        sent = step.report.collectives if step.report else ()
        lines += [f"collectives, {step.name}:"] if sent else []
        for c in sent:
            branch = "  (when sampling)" if c.conditional else ""
            lines.append(f"  {c.times:5} x {c.kind:18} {c.shape}{branch}")
    return "\n".join(lines)


SERVING = "  (weights, the cache of all slots and of one prompt, the larger temporaries)"
ASSUMED = "  (a CPU's bandwidth and arithmetic are assumed, not measured, and so are the floors)"
COLUMNS = ["weights", "cache", "temporaries", "traffic", "collectives", "floor: memory"]


def show_table(runs: Sequence[DryRun]) -> str:
    """Formats several dry runs as one table, a line for each step."""
    rows = [["topology", "mesh", "step", *COLUMNS, "serving"]]
    for run in runs:
        for step in (run.decode, run.read):
            figures = cells(step, run.chip)
            fits = f"{gigabytes(run.memory)}, {'fits' if run.fits else 'does not fit'}"
            numbers = [figures.get(name, "-") for name in COLUMNS]
            rows.append([run.topology, axes_of(run.mesh), step.name, *numbers, fits])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{x:{n}}" for x, n in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def as_json(run: DryRun) -> dict[str, Any]:
    """Returns all figures: bytes, milliseconds and counts."""

    def of(step: CompiledStep) -> dict[str, Any]:
        figures: dict[str, Any] = dict(weights=step.weights, cache=step.cache)
        if step.report is None:
            return figures | dict(refusal=step.refusal)
        report = step.report._asdict() | dict(memory=step.report.memory)
        report["seconds"] = round(step.report.seconds, 1)
        report["collectives"] = [c._asdict() for c in step.report.collectives]
        floor = {name: round(ms, 6) for name, ms in step.floor_ms(run.chip).items()}
        return figures | report | dict(floor_ms=floor, products=step.products)

    plan, (slots, positions) = run.plan, run.room
    return dict(
        model=plan.name,
        stored=plan.stored,
        slots=plan.slots,
        capacity=plan.capacity,
        prompt=plan.prompt,
        topology=run.topology,
        mesh=axes_of(run.mesh),
        mesh_chosen=run.chosen,
        chip=run.chip._asdict(),
        memory=run.memory,
        fits=run.fits,
        most_slots=slots,
        most_positions=positions,
        steps={"decode": of(run.decode), "prompt": of(run.read)},
    )


def print_dry_runs(module: ModuleType, args: argparse.Namespace) -> None:
    """Runs --dry-run: checks everything, compiles, and prints the figures to stdout."""
    hosts = [int(n) for n in (t.partition("cpu:")[2] for t in args.dry_run) if n.isdecimal()]
    if hosts:
        if (n := max(1, *hosts)) > MOST_CPU_DEVICES:
            raise ValueError(f"'cpu:{n}': a host can stand for {MOST_CPU_DEVICES} devices at most")
        jax.config.update("jax_num_cpu_devices", n)
        args.dry_run = ["cpu:1" if t == "cpu" else t for t in args.dry_run]
    plans = [
        (plan := plan_of(module, args, topology), target_of(plan, topology, axes))
        for topology in args.dry_run
        for axes in args.mesh or [""]
    ]
    runs = dry_runs(plans, args.hlo)
    if args.json:
        print(json.dumps([as_json(run) for run in runs], indent=1))
    else:
        print(show_table(runs) if len(runs) > 1 else show(runs[0]))

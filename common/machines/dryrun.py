"""The dry run: what a model costs on hardware that is absent.

Compiles a model's `generate` and `prefill` for a TPU slice, for GPUs or for this host's CPU. It
needs only a config: no weights, no accelerator. The compiler's figures are exact: memory, aliasing,
collectives. The bytes that a step moves through memory are read off the program. The time that it
takes is not known, but a lower bound is.
"""

import math
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from common.kernels.dispatch import AUTO
from common.kernels.ragged_dot import row_major
from common.loading.files import first_line
from common.loading.packed import declare
from common.loading.random_weights import random_weights
from common.machines.bandwidth import experts_read
from common.machines.chips import Chip, chip_of, devices_of
from common.machines.hlo import Collective, collectives, cycles, operations, parse, traffic
from common.machines.mesh_choice import Axes, best_mesh, load_of, parts, weight_bytes
from common.quant import TRANSPOSED, Fp8, Mxfp4, Packed, Storage, bits_of
from common.sharding import DATA, EXPERT, TENSOR, P, Shards, make_mesh, model_shards, parse_mesh
from common.weights import by_path, check_divides, specs_like, storage_for


class Plan(NamedTuple):
    """What to compile: a model, and how it is stored and used."""

    module: ModuleType
    config: Any
    name: str  # of the model
    slots: int = 8
    capacity: int = 2048  # positions per slot
    prompt: int = 512  # tokens
    dtype: Any = jnp.dtype("bfloat16")
    cache_dtype: Any = jnp.dtype("bfloat16")
    storage: Storage | None = None
    implementation: str = AUTO

    @property
    def stored(self) -> str:
        """Says in words how weights and cache are stored."""
        layout = by_path(declare(self.module, self.config)[0]).values()
        kept = (w for w in layout if storage_for(w, self.storage) is None)
        names = {name_of(w.published) for w in kept} - {None}
        if self.storage is not None and self.storage is not TRANSPOSED:
            names.add(self.storage.name)
        elif "fp8" not in names:
            names.add(str(self.dtype))
        return f"{' and '.join(sorted(map(str, names)))} weights, {self.cache_dtype} cache"


def name_of(published: type | Packed | None) -> str | None:
    """Returns the name of a published form; None for a plain array."""
    if isinstance(published, Packed):
        bits = bits_of(published.dtype)
        return "fp8" if published.dtype == jnp.float8_e4m3fn else f"int{bits}"
    names: dict[type | None, str] = {Fp8: "fp8", Mxfp4: "mxfp4"}
    return names.get(published)


class Report(NamedTuple):
    """One device's share of one step, in bytes unless a field says otherwise."""

    devices: int
    seconds: float  # to compile
    weights: int
    cache: int
    arguments: int  # weights, cache, a few numbers per slot; a TPU pads each to whole tiles
    outputs: int  # including the new cache
    aliased: int  # outputs that overwrite an argument; if the cache does not, it is copied
    temporaries: int
    traffic: int  # see `traffic`
    cycles: int  # the TPU compiler's own estimates, summed over operations
    operations: int  # how many run one after the other
    collectives: tuple[Collective, ...]

    @property
    def memory(self) -> int:
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def sent(self) -> int:
        """Bytes that collectives return in every step."""
        return sum(c.bytes for c in self.collectives if not c.conditional)

    @property
    def messages(self) -> int:
        """The number of collectives in every step."""
        return sum(c.times for c in self.collectives if not c.conditional)


def abstract(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """Returns a tree of arrays as shapes, laid out as `specs` (a prefix of the tree) say."""

    def place(spec: Any, subtree: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), subtree
        )

    return jax.tree.map(place, specs, tree, is_leaf=lambda x: isinstance(x, P))


def as_loaded(tree: Any) -> Any:
    """Gives the shapes of weights the layout that the loader gives the weights."""

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        rows: Any = row_major(x.sharding, x.ndim)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows)

    return jax.tree.map(place, tree)


def abstract_weights(
    module: ModuleType, config: Any, mesh: Mesh, dtype: DTypeLike, storage: Storage | None
) -> Any:
    """Returns a model's weights on a mesh, as shapes."""
    layout, _ = declare(module, config, model_shards(mesh))
    check_divides(layout, model_shards(mesh))
    weights = jax.eval_shape(partial(random_weights, layout, mesh, dtype, 0, storage))
    return as_loaded(abstract(weights, specs_like(weights, layout), mesh))


def abstract_state(
    module: ModuleType, config: Any, mesh: Mesh, slots: int, capacity: int, dtype: DTypeLike
) -> Any:
    """Returns a model's DecodeState on a mesh, as shapes."""
    make = partial(module.init_state, config, slots, capacity, dtype, model_shards(mesh))
    return abstract(jax.eval_shape(make), module.STATE_SPEC, mesh)


def device_bytes(tree: Any) -> int:
    """Returns the bytes of one device's part of a tree of abstract arrays."""
    parts = ((x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(tree))
    return sum(math.prod(shape) * bits_of(dtype) // 8 for shape, dtype in parts)


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
    implementation: str = AUTO,
) -> tuple[Report, str]:
    """Compiles one step. Returns the report on it, and the compiled program as text.

    The step decodes one token in all slots; or, if `prefill` is given, it reads `prefill` tokens of
    one prompt per data shard.
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
        cycles=cycles(program),
        operations=operations(program),
        collectives=collectives(program),
    )
    return report, text


class CompiledStep(NamedTuple):
    """A decode step, or the reading of a prompt, on one device."""

    name: str
    weights: int  # bytes
    cache: int  # bytes
    products: float  # floating-point operations in products with weights
    unread: float  # bytes of the experts that no token is expected to choose
    report: Report | None  # None if the compiler refused
    refusal: str  # the compiler's own words

    def floor_ms(self, chip: Chip) -> dict[str, float]:
        """Returns the milliseconds that moving bytes, multiplying and sending take at least."""
        if self.report is None:
            return {}
        seconds = dict(
            memory=(self.report.traffic - self.unread) / chip.bandwidth,
            products=self.products / chip.flops,
            links=2 * self.report.sent / chip.links,  # an all-reduce sends each byte twice
        )
        return {name: 1e3 * s for name, s in seconds.items()}


class DryRun(NamedTuple):
    """A plan on one mesh of one topology."""

    plan: Plan
    topology: str
    mesh: Mesh
    chosen: bool  # whether the library chose the mesh
    decode: CompiledStep
    read: CompiledStep  # the reading of a prompt

    @property
    def chip(self) -> Chip:
        return chip_of(self.mesh.devices.flat[0])

    @property
    def memory(self) -> int:
        """Bytes that one device needs to serve: the weights, the cache of all slots, the cache in
        which prompts are read, and the larger temporaries of the two steps."""
        decode, read = self.decode.report, self.read.report
        held = (
            decode.memory - decode.temporaries
            if decode
            else self.decode.weights + self.decode.cache
        )
        temporaries = max(report.temporaries if report else 0 for report in (decode, read))
        return held + self.read.cache + temporaries

    @property
    def fits(self) -> bool:
        compiled = self.decode.report is not None and self.read.report is not None
        return compiled and self.memory <= self.chip.memory

    @property
    def room(self) -> tuple[int, int]:
        """The most slots that fit at this capacity, and the most positions at this number of slots.
        The temporaries are assumed not to grow: those of a prompt are enough for as many slots as
        it has tokens."""
        if not self.fits:
            return 0, 0
        plan, rows = self.plan, self.mesh.shape[DATA]
        free, slot = self.chip.memory - self.memory, self.decode.cache / plan.slots
        position = (self.decode.cache + self.read.cache) / plan.capacity
        slots = plan.slots + int(free / slot) // rows * rows
        positions = plan.capacity + int(free / position)
        return slots, min(positions, plan.config.max_position_embeddings)


def products_and_unread(plan: Plan, axes: Axes, tokens: int) -> tuple[float, float]:
    """Returns the floating-point operations of `tokens` tokens with the weights of one device, and
    the bytes of the experts that no token chooses, if all are equally likely. Counts two operations
    for each token and each number of a matrix; of experts, only the chosen ones."""
    config = plan.config
    layout, _ = declare(plan.module, config, Shards(axes[EXPERT], axes[TENSOR]))
    chosen, share = getattr(config, "num_experts_per_tok", 0), experts_read(config, tokens)
    looked_up = "embed" if getattr(layout, "head", None) is not None else ""
    products = unread = 0.0
    for path, weight in by_path(layout).items():
        if weight.kind == "array" or path == looked_up:
            continue
        numbers = math.prod(weight.shape) / parts(weight.spec, axes)
        if weight.kind == "stack":
            numbers *= chosen / weight.shape[0]
            size = weight_bytes(weight, plan.dtype, plan.storage, axes)
            unread += size * (1 - share(weight.shape[0]))
        products += 2 * numbers * tokens
    return products, unread


def compile_step(
    plan: Plan, mesh: Mesh, prompt: int | None = None, keep: Path | None = None
) -> CompiledStep:
    """Compiles one step, and writes its program to a file in the directory `keep`, if given."""
    rows = mesh.shape[DATA] if prompt else plan.slots
    module, config, storage, cache_dtype = plan.module, plan.config, plan.storage, plan.cache_dtype
    weights = abstract_weights(module, config, mesh, plan.dtype, storage)
    cache = abstract_state(module, config, mesh, rows, plan.capacity, cache_dtype).cache
    report, refusal = None, ""
    try:
        report, text = dry_run(
            module,
            config,
            mesh,
            slots=plan.slots,
            capacity=plan.capacity,
            prefill=prompt,
            dtype=plan.dtype,
            cache_dtype=cache_dtype,
            storage=storage,
            implementation=plan.implementation,
        )
    except jax.errors.JaxRuntimeError as error:
        refusal = first_line(error)
    if report is not None and keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        axes = "-".join(f"{axis}{n}" for axis, n in mesh.shape.items())
        name = f"{plan.name}-{axes}-{'prompt' if prompt else 'decode'}.txt"
        (keep / name).write_text(text, encoding="utf-8")
    tokens = rows // mesh.shape[DATA] * (prompt or 1)
    name = f"prompt of {prompt}" if prompt else "decode"
    did = products_and_unread(plan, dict(mesh.shape), tokens)
    return CompiledStep(name, device_bytes(weights), device_bytes(cache), *did, report, refusal)


class Target(NamedTuple):
    """The topology and the mesh on which a plan is tried."""

    topology: str
    mesh: Mesh
    chosen: bool


def target_of(plan: Plan, topology: str, axes: str) -> Target:
    """Makes the mesh of these axes on a topology, or the best mesh if `axes` is empty. ValueError
    if it cannot split the model."""
    devices = devices_of(topology)
    options = dict(
        slots=plan.slots,
        capacity=plan.capacity,
        dtype=plan.dtype,
        cache_dtype=plan.cache_dtype,
        storage=plan.storage,
    )
    if not axes:
        return Target(topology, best_mesh(plan.module, plan.config, devices, **options), True)
    sizes: Any = parse_mesh(axes)
    mesh = make_mesh(**sizes, devices=devices)
    load_of(plan.module, plan.config, dict(mesh.shape), **options)
    return Target(topology, mesh, False)


def dry_runs(plans: Sequence[tuple[Plan, Target]], keep: Path | None = None) -> list[DryRun]:
    """Compiles both steps of each plan, as many at once as this machine has cores."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        steps = [
            [pool.submit(compile_step, plan, at.mesh, n, keep) for n in (None, plan.prompt)]
            for plan, at in plans
        ]
        return [
            DryRun(plan, *at, *(step.result() for step in both))
            for (plan, at), both in zip(plans, steps, strict=True)
        ]

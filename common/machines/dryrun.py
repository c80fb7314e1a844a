"""The dry run: what a model costs on hardware that is absent.

Compiles a model's `generate` and `prefill` for a TPU slice, for GPUs or for this host's CPU. It
needs only a config: no weights, no accelerator. The compiler's figures are exact: memory, aliasing,
collectives. The bytes that a step moves through memory are read off the program. The time that it
takes is not known, but a lower bound is.
"""

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from common.kernels.ragged_dot import format_of
from common.loading.files import first_line
from common.loading.packed import declare
from common.loading.random_weights import random_weights
from common.machines.bandwidth import tree_bytes
from common.machines.chips import Chip, chip_of, devices_of
from common.machines.hlo import Collective, collectives, cycles, operations, parse, traffic
from common.machines.mesh_choice import Plan, best_mesh, load_of
from common.quant import is_stored
from common.sharding import DATA, make_mesh, model_shards, parse_mesh
from common.weights import specs_like


class Report(NamedTuple):
    """One device's share of one step, in bytes unless a field says otherwise."""

    name: str
    devices: int
    weights: int
    cache: int
    growing: int  # of the cache, what grows with the capacity
    products: float  # floating-point operations in products with weights
    unread: float  # of the experts that no token is expected to choose
    refusal: str = ""  # the compiler's own words; the figures below are then 0
    seconds: float = 0  # to compile
    arguments: int = 0  # weights, cache, a few numbers per slot; a TPU pads each to whole tiles
    outputs: int = 0  # including the new cache
    aliased: int = 0  # outputs that overwrite an argument; if the cache does not, it is copied
    temporaries: int = 0
    traffic: int = 0  # see `traffic`
    cycles: int = 0  # the TPU compiler's own estimates, summed over operations
    operations: int = 0  # how many run one after the other
    collectives: tuple[Collective, ...] = ()

    @property
    def held(self) -> int:
        """Arguments and outputs; the weights and the cache, if the compiler refused."""
        if self.refusal:
            return self.weights + self.cache
        return self.arguments + self.outputs - self.aliased

    @property
    def memory(self) -> int:
        return self.held + self.temporaries

    @property
    def sent(self) -> int:
        """Bytes that collectives return in every step."""
        return sum(c.bytes for c in self.collectives if not c.conditional)

    @property
    def messages(self) -> int:
        """The number of collectives in every step."""
        return sum(c.times for c in self.collectives if not c.conditional)

    def floor_ms(self, chip: Chip) -> dict[str, float]:
        """Returns the milliseconds that moving bytes, multiplying and sending take at least."""
        return dict(
            memory=1e3 * (self.traffic - self.unread) / chip.bandwidth,
            products=1e3 * self.products / chip.flops,
            links=1e3 * 2 * self.sent / chip.links,  # an all-reduce sends each byte twice
        )


def abstract_weights(plan: Plan, mesh: Mesh) -> Any:
    """Returns a model's weights on a mesh, as shapes in the layout that the loader gives them."""
    layout, _ = declare(plan.module, plan.config, model_shards(mesh))
    weights = jax.eval_shape(partial(random_weights, layout, mesh, plan.dtype, 0, plan.storage))

    def place(form: type, spec: Any, x: Any) -> Any:
        if x is not None:  # the zero points of a form that has none
            return x.update(sharding=format_of(form, NamedSharding(mesh, spec), x.ndim))

    def matrix(specs: Any, w: Any) -> Any:
        return jax.tree.map(partial(place, type(w)), specs, w)

    return jax.tree.map(matrix, specs_like(weights, layout), weights, is_leaf=is_stored)


def abstract_state(plan: Plan, mesh: Mesh) -> Any:
    """Returns a model's DecodeState on a mesh, as shapes."""
    init, shards = plan.module.init_state, model_shards(mesh)
    make = partial(init, plan.config, plan.slots, plan.capacity, plan.cache_dtype, shards)
    shardings = jax.tree.map(partial(NamedSharding, mesh), plan.module.STATE_SPEC)
    return jax.jit(make, out_shardings=shardings).eval_shape()


def device_bytes(tree: Any) -> int:
    """Returns the bytes of one device's part of a tree of abstract arrays."""
    part = lambda x: jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype)
    return tree_bytes(jax.tree.map(part, tree))


def trace(plan: Plan, mesh: Mesh) -> tuple[Report, jax.stages.Lowered]:
    """Traces a step. Returns what its shapes say, and the step for the compiler."""
    static: Any = dict(config=plan.config, mesh=mesh)
    plan = plan._replace(slots=mesh.shape[DATA]) if plan.prompt else plan
    weights, state = abstract_weights(plan, mesh), abstract_state(plan, mesh)
    if plan.prompt:
        tokens = state.length_B.update(shape=(plan.slots, plan.prompt))
        lowered = plan.module.prefill.lower(weights, state, tokens, state.length_B, **static)
    else:
        lowered = plan.module.generate.lower(weights, state, **static)
    name = f"prompt of {plan.prompt}" if plan.prompt else "decode"
    load = load_of(plan, mesh.shape)
    growing = [layer for layer in state.cache if layer.ring is None]
    held = device_bytes(weights), device_bytes(state.cache), device_bytes(growing)
    return Report(name, mesh.size, *held, load.products, load.unread), lowered


def dry_run(plan: Plan, mesh: Mesh) -> tuple[Report, str]:
    """Compiles a step: the report, and the program as text. JaxRuntimeError if it is refused."""
    report, lowered = trace(plan, mesh)
    start = time.perf_counter()
    compiled: Any = lowered.compile()
    seconds = time.perf_counter() - start
    memory, text = compiled.memory_analysis(), compiled.as_text()
    program = parse(text)
    report = report._replace(
        seconds=seconds,
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


def compile_step(plan: Plan, mesh: Mesh) -> Report:
    """Compiles a step. Returns the report on it, which may be that the compiler refused it."""
    try:
        return dry_run(plan, mesh)[0]
    except jax.errors.JaxRuntimeError as error:
        return trace(plan, mesh)[0]._replace(refusal=first_line(error))


class DryRun(NamedTuple):
    """Both steps of a plan on one mesh of one topology."""

    plan: Plan  # with the tokens of `read`
    topology: str
    mesh: Mesh
    chosen: bool  # whether the library chose the mesh
    decode: Report
    read: Report  # of a prompt

    @property
    def chip(self) -> Chip:
        return chip_of(self.mesh.devices.flat[0])

    @property
    def memory(self) -> int:
        """Bytes that one device needs to serve: the weights, the cache of all slots, the cache in
        which prompts are read, and the larger temporaries of the two steps."""
        temporaries = max(self.decode.temporaries, self.read.temporaries)
        return self.decode.held + self.read.cache + temporaries

    @property
    def fits(self) -> bool:
        refused = self.decode.refusal or self.read.refusal
        return not refused and self.memory <= self.chip.memory

    @property
    def room(self) -> tuple[int, int]:
        """The most slots that fit at this capacity, and the most positions at this number of slots.
        The temporaries are assumed not to grow: those of a prompt are enough for as many slots as
        it has tokens."""
        if not self.fits:
            return 0, 0
        plan, rows = self.plan, self.mesh.shape[DATA]
        free, slot = self.chip.memory - self.memory, self.decode.cache / plan.slots
        position = max(self.decode.growing + self.read.growing, 1) / plan.capacity
        slots = plan.slots + int(free / slot) // rows * rows
        positions = plan.capacity + int(free / position)
        return slots, min(positions, plan.config.max_position_embeddings)


def dry_runs(targets: Sequence[tuple[Plan, str, str]], prompt: int) -> Iterator[DryRun]:
    """Compiles both steps for each plan, topology and axes, as many at once as this machine has
    cores, and yields each dry run as soon as it is done. Without axes, the best mesh is taken. The
    second step reads `prompt` tokens. ValueError if a mesh cannot split the model."""
    runs, jobs = list[tuple[Plan, str, Mesh, bool]](), list[tuple[Plan, Mesh]]()
    for plan, topology, axes in targets:
        devices, sizes = devices_of(topology), parse_mesh(axes)
        mesh = make_mesh(**sizes, devices=devices) if sizes else best_mesh(plan, devices)
        load_of(plan, mesh.shape)
        read = plan._replace(prompt=min(prompt, plan.capacity))
        runs.append((read, topology, mesh, not axes))
        jobs += [(plan, mesh), (read, mesh)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        steps = pool.map(compile_step, *zip(*jobs, strict=True))
        for run in runs:
            yield DryRun(*run, next(steps), next(steps))

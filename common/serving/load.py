"""Turns a checkpoint into a model that runs, by one call with a directory or a hub id.

from llama3 import model
llama = load(model, "meta-llama/Llama-3.2-1B-Instruct")
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from common.kernels.dispatch import AUTO, Impl
from common.loading.adapter import open_adapter
from common.loading.checkpoint import Progress, laid_out, load_weights
from common.loading.files import is_there
from common.loading.generation import read_generation
from common.loading.hub import ADAPTER
from common.loading.packed import declare
from common.loading.random_weights import random_weights
from common.loading.shape import model_dtype, read_model_config, read_shape, stored_dtype
from common.machines.mesh_choice import Plan, best_mesh
from common.quant import TRANSPOSED, Storage, storage_named
from common.sharding import DATA, MODEL, model_shards
from common.text.tokenizer import Tokenizer, has_tokenizer, load_tokenizer
from common.weights import check_divides


class Model(NamedTuple):
    """A model file with everything that it needs to run one checkpoint."""

    module: ModuleType  # the model file
    config: Any  # its Config
    mesh: Mesh
    weights: Any  # its Weights on the mesh; None until they are read
    tokenizer: Tokenizer | None  # None: there are no files of one, so ids go in and come out
    dtype: jnp.dtype  # of activations, and of weights that are not quantised
    storage: Storage | None  # chosen for the matrices; None: as published
    directory: Path | None  # None for random weights
    adapter: Path | None = None  # to be merged into the weights
    sampling: Mapping[str, float] = MappingProxyType({})  # what generation_config.json recommends
    notes: tuple[str, ...] = ()  # what the files say that is not done

    @property
    def on_cpu(self) -> bool:
        return self.mesh.devices.flat[0].platform == "cpu"

    @property
    def static(self) -> dict[str, Any]:
        """What functions of the model file take beside arrays. AUTO would do on CPU what BLOCKED
        does, but would first import the kernels of other platforms, which takes half a second."""
        implementation = Impl.BLOCKED if self.on_cpu else AUTO
        return dict(config=self.config, mesh=self.mesh, implementation=implementation)


def load(
    module: ModuleType, ckpt: str | None = None, allow_nonfinite: bool = False, **options: Any
) -> Model:
    """Loads a checkpoint as a model that is ready to run; `options` are those of `open_model`.
    ValueError or OSError has a line for each thing that is wrong. Weights that are NaN or infinite
    are wrong, too, unless `allow_nonfinite`."""
    return read_weights(open_model(module, ckpt, **options), allow_nonfinite=allow_nonfinite)


def open_model(
    module: ModuleType,
    ckpt: str | None = None,
    *,
    revision: str | None = None,
    mesh: Mesh | None = None,
    dtype: DTypeLike | None = None,
    quant: str | None = None,
    kv_quant: str | None = None,
    random: bool = False,
    adapter: str | None = None,
    slots: int = 8,
    capacity: int = 2048,
) -> Model:
    """Opens a model without its weights, and checks all that can be checked before they are read.

    Args:
      module: the model file, such as `llama3.model`.
      ckpt: a directory or a hub id; by default, the base model that the adapter names, or the model
        in the family's folder. With `random`, also a lone config.json, or a published size's name.
      revision: branch, tag or commit of a hub repository.
      mesh: see `make_mesh`; by default, `common.machines.mesh_choice` picks one over all devices.
      dtype: float32 or bfloat16; by default, that of the checkpoint.
      quant: "int8" or "int4" quantises the matrices as they are read: see `storage_named`.
      random: makes random weights instead of reading stored ones.
      adapter: a LoRA adapter, as a directory or a hub id, to be merged into the weights.
      slots, capacity, kv_quant: the load for which a mesh is picked: prompts at once, positions of
        each, and the form of the cache, see `cache_dtype`.
    """
    if not hasattr(module, "config_from_hf"):
        raise TypeError(f"{module!r} is not a model file, such as the module llama3.model")
    if mesh is not None and (*getattr(mesh, "shape", ()),) != (DATA, *MODEL):
        raise TypeError(f"a mesh is made by common.sharding.make_mesh, and {mesh!r} was not")
    if not min(slots, capacity) >= 1:
        raise ValueError(f"slots and capacity must be at least 1, not {slots} and {capacity}")
    if random and adapter is not None:
        raise ValueError("--adapter does not go with --random")
    merged, ckpt, revision = open_adapter(adapter, ckpt, revision)
    hf, directory = read_shape(module, ckpt, revision, random)
    config = read_model_config(module, hf)
    weights_at = None if random else directory
    devices = jax.devices() if mesh is None else [*mesh.devices.flat]
    on_cpu = devices[0].platform == "cpu"
    kind = model_dtype(hf, weights_at, dtype, on_cpu)
    storage = storage_of(kind, on_cpu, quant)
    cache = cache_dtype(kind, on_cpu, kv_quant)
    if mesh is None:
        stored: Any = dict(dtype=kind, cache_dtype=cache, storage=storage)
        mesh = best_mesh(Plan(module, config, slots, capacity, **stored), devices)
    shards = model_shards(mesh)
    check_divides(declare(module, config, shards)[0], shards)
    tokenizer = load_tokenizer(directory) if directory and has_tokenizer(directory) else None
    sampling, notes = ({}, []) if directory is None else read_generation(directory)
    notes += tokenizer.notes if tokenizer else []
    if tokenizer and (unknown := [i for i in tokenizer.stop_ids if i >= config.vocab_size]):
        notes.append(f"token {unknown[0]} ends no reply: it is above the model's vocabulary")
    if not dtype and kind == jnp.bfloat16 and stored_dtype(hf) == "float16":
        notes.append("a file in float16 is computed in bfloat16; --dtype float32 is exact")
    if weights_at and not adapter and is_there(weights_at / ADAPTER):
        notes.append(f"{ADAPTER} in {weights_at} is not used: see --adapter")
    told = merged, sampling, tuple(notes)
    return Model(module, config, mesh, None, tokenizer, kind, storage, weights_at, *told)


def storage_of(dtype: jnp.dtype, on_cpu: bool, quant: str | None = None) -> Storage | None:
    """How matrices are stored: as `quant` says; transposed if float32 on CPU; else as published."""
    plain = TRANSPOSED if on_cpu and dtype == jnp.float32 else None
    return plain if quant is None else storage_named(f"{quant}", on_cpu)


def cache_dtype(dtype: jnp.dtype, on_cpu: bool, quant: str | None = None) -> jnp.dtype:
    """int8 if asked for; else float32 on CPU, where XLA rewrites bfloat16 caches; else `dtype`."""
    if quant not in (None, "int8"):
        raise ValueError(f"kv_quant {quant!r} is not int8")
    return jnp.dtype(quant or ("float32" if on_cpu else dtype))


def check_fits(model: Model, draft: Model) -> None:
    """ValueError if a model cannot draft for another one."""
    if model.mesh != draft.mesh:
        raise ValueError("the draft model must be on the mesh of the model")
    main, other = (m.tokenizer and m.tokenizer.backend.get_vocab() for m in (model, draft))
    same = main == other if main and other else model.config.vocab_size == draft.config.vocab_size
    if not same:
        raise ValueError("the draft model has another vocabulary than the model")


@partial(jax.jit, static_argnames=("module", "config", "slots", "capacity", "dtype", "mesh"))
def init_state(
    module: ModuleType, config: Any, slots: int, capacity: int, dtype: DTypeLike, mesh: Mesh
) -> Any:
    """`init_state` of a model file, on the mesh."""
    state = module.init_state(config, slots, capacity, dtype, model_shards(mesh))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), module.STATE_SPEC)
    return jax.lax.with_sharding_constraint(state, shardings)


def read_weights(
    model: Model, progress: Progress | None = None, seed: int = 0, allow_nonfinite: bool = False
) -> Model:
    """Puts the weights of `model` on its mesh: reads the checkpoint, or makes them from `seed`."""
    if model.directory is None:
        layout, _ = declare(model.module, model.config, model_shards(model.mesh))
        weights = random_weights(layout, model.mesh, model.dtype, seed, model.storage)
        return model._replace(weights=jax.block_until_ready(laid_out(weights)))
    options: Any = dict(storage=model.storage, progress=progress, allow_nonfinite=allow_nonfinite)
    where = model.directory, model.module, model.config, model.mesh, model.dtype
    weights = load_weights(*where, adapter=model.adapter, **options)
    return model._replace(weights=weights)

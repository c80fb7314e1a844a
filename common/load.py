"""A checkpoint as a model that runs: one call from a directory or a hub id.

from llama3 import model
llama = load(model, "meta-llama/Llama-3.2-1B-Instruct")
"""

import importlib
import math
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from common.checkpoint import Progress, load_weights, rows_together
from common.files import read_json
from common.hub import FILES, locate
from common.mesh_choice import best_mesh
from common.quant import INT8, TRANSPOSED, Storage
from common.random_weights import random_weights
from common.sharding import model_shards
from common.stored import open_tensors
from common.tokenizer import Tokenizer, load_tokenizer
from common.weights import check_divides


class Model(NamedTuple):
    """A model file, and all that one checkpoint gives it."""

    module: ModuleType  # the model file
    config: Any  # its Config
    mesh: Mesh
    weights: Any  # its Weights on the mesh; None before they are read
    tokenizer: Tokenizer | None  # None for random weights of a config alone
    dtype: jnp.dtype  # of activations and of what is not quantised
    storage: Storage | None  # that was chosen for the matrices
    directory: Path | None  # None for random weights

    @property
    def on_cpu(self) -> bool:
        return self.mesh.devices.flat[0].platform == "cpu"


def load(
    module: ModuleType, ckpt: str | None = None, allow_nonfinite: bool = False, **options: Any
) -> Model:
    """The model of a checkpoint, ready to run; `options` are those of `open_model`.

    Raises ValueError or OSError with a line for each thing that is wrong; for weights that are NaN
    or infinite, too, unless `allow_nonfinite`.
    """
    return read_weights(open_model(module, ckpt, **options), allow_nonfinite=allow_nonfinite)


def open_model(
    module: ModuleType,
    ckpt: str | None = None,
    *,
    revision: str | None = None,
    mesh: Mesh | None = None,
    dtype: DTypeLike | None = None,
    quant: str | None = None,
    random: bool = False,
    slots: int = 8,
    capacity: int = 2048,
) -> Model:
    """The model without its weights: everything that can be checked before they are read.

    Args:
      module: the model file, such as `llama3.model`.
      ckpt: a directory or a hub id; the model that the family's folder ships unless given. With
        `random` also a lone config.json, or the name of a published size.
      revision: branch, tag or commit of a hub repository.
      mesh: see `make_mesh`; the best one over all devices (see `common.mesh_choice`) unless given.
      dtype: float32 or bfloat16; that of the checkpoint unless given.
      quant: "int8" keeps the matrices in 8 bits, quantised as they are read.
      random: random weights in place of stored ones.
      slots, capacity: what the best mesh is best for: prompts at once, and positions of each.
    """
    hf, directory = read_shape(module, ckpt, revision, random)
    config = module.config_from_hf(hf)
    stored = hf.get("torch_dtype") or hf.get("dtype") or stored_dtype(directory, random)
    kind = jnp.dtype(dtype or ("float32" if stored == "float32" else "bfloat16"))
    if kind not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"dtype {kind} is neither float32 nor bfloat16")
    if quant not in (None, "int8"):
        raise ValueError(f"quant {quant!r} is not 'int8'")
    if mesh is None:
        use: Any = dict(slots=slots, capacity=capacity, dtype=kind)
        mesh = best_mesh(module, config, jax.devices(), storage=INT8 if quant else None, **use)
    shards = model_shards(mesh)
    check_divides(module.weight_layout(config, shards), shards)
    tokenizer = None if directory is None else load_tokenizer(directory)
    weights_at = None if random else directory
    opened = Model(module, config, mesh, None, tokenizer, kind, None, weights_at)
    if quant == "int8":
        return opened._replace(storage=INT8)
    return opened._replace(storage=TRANSPOSED if opened.on_cpu and kind == jnp.float32 else None)


def read_weights(
    model: Model,
    progress: Progress | None = None,
    seed: int = 0,
    allow_nonfinite: bool = False,
) -> Model:
    """`model` with its weights on the mesh: read from the checkpoint, or random ones of `seed`."""
    module, config, mesh, storage = model.module, model.config, model.mesh, model.storage
    if model.directory is None:
        layout = module.weight_layout(config, model_shards(mesh))
        weights = random_weights(layout, mesh, model.dtype, seed, storage)
        return model._replace(weights=jax.block_until_ready(rows_together(weights)))
    options: Any = dict(storage=storage, progress=progress, allow_nonfinite=allow_nonfinite)
    weights = load_weights(model.directory, module, config, mesh, model.dtype, **options)
    return model._replace(weights=weights)


def folder(module: ModuleType) -> Path:
    """The folder of a model file."""
    return Path(str(module.__file__)).parent


def published_sizes(module: ModuleType) -> dict[str, dict[str, Any]]:
    """The configs of the family's published sizes by name: `SHAPES` of its shapes.py."""
    return importlib.import_module(f"{module.__package__}.shapes").SHAPES


def read_shape(
    module: ModuleType,
    ckpt: str | None,
    revision: str | None = None,
    random: bool = False,
    config_only: bool = False,
) -> tuple[dict[str, Any], Path | None]:
    """The parsed config.json and the directory that it lies in; None for a config alone. Of a
    repository of the hub everything is downloaded, unless `config_only`."""
    if ckpt is None:
        ckpt = str(folder(module) / "embedded")
        if not Path(ckpt).is_dir():
            raise ValueError(f"{module.__package__} ships no model: give a checkpoint (--ckpt)")
    elif random:
        sizes = published_sizes(module)
        if revision is not None and (ckpt in sizes or Path(ckpt).is_file()):
            raise ValueError(f"{ckpt} is no repository of the hub and has no revision {revision!r}")
        if ckpt in sizes:
            return sizes[ckpt], None
        if Path(ckpt).is_file():
            return read_json(Path(ckpt)), None
        if "/" not in ckpt and not Path(ckpt).is_dir():
            names = ", ".join(sizes)
            raise ValueError(f"{ckpt!r} is neither a config.json, a directory, nor one of {names}")
    directory = locate(ckpt, revision, ["config.json"] if config_only else FILES)
    return read_json(directory / "config.json"), directory


def stored_dtype(directory: Path | None, random: bool) -> str:
    """float32 if the largest tensor is: for a config.json that does not say, as the oldest do."""
    if directory is None or random:
        return "bfloat16"
    tensors = open_tensors(directory).values()
    largest = max(tensors, key=lambda tensor: math.prod(tensor.shape), default=None)
    return "float32" if largest is not None and largest.dtype == "F32" else "bfloat16"

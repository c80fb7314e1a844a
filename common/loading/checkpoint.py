"""Loads a published Hugging Face checkpoint as sharded arrays, in bounded host memory.

A model file's table says which stored tensor becomes which weight. All that the headers of the
files show is checked before any data is read. Each process then reads the shards of its own
devices one after the other, in chunks, and casts each chunk before it reads the next. So it holds
one shard, in the dtype that goes to the device, and one chunk. A chunk has at least one row of the
first axis: a whole matrix, if the matrices of all experts are stored as one tensor. If a matrix is
to be quantised, its device holds it in both forms for a while.
"""

import math
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from common.kernels.ragged_dot import format_of
from common.loading.adapter import adapted
from common.loading.converting import convert
from common.loading.matching import Source, assign, by_expert
from common.loading.packed import declare, unpacked
from common.loading.reading import Part, limits_of, read_tensor
from common.loading.stored import FLOATS, open_tensors
from common.quant import Storage, is_stored
from common.sharding import model_shards
from common.weights import Weight, by_path, is_weight, published_arrays, storage_for

Progress = Callable[[int, int], None]  # bytes of the arrays loaded so far, and of all


def read_shard(source: Source, padded: tuple[int, ...], part: Part, dtype: np.dtype) -> np.ndarray:
    """Reads one part of the padded and reordered array, in `dtype`."""
    tensors, transform, stacked, limits = source
    out = zeros([stop - start for start, stop in part], dtype)
    if stacked:
        tensors, padded, part = tensors[slice(*part[0])], padded[1:], part[1:]
    for tensor, into in zip(tensors, out if stacked else [out], strict=True):
        read_tensor(tensor, transform, padded, part, into, limits)
    return out


def zeros(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns zeros in memory pages of their own, which are aligned, so JAX on CPU takes them over.

    Shards on the heap would leave holes: an int8 model then took a fifth more memory.
    """
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, access=mmap.ACCESS_COPY)  # private
    if hasattr(mmap, "MADV_HUGEPAGE"):  # filling 4 KB pages takes longer than reading the file
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype, math.prod(shape)).reshape(shape)


def load_array(source: Source, array: Weight, mesh: Mesh, dtype: np.dtype) -> jax.Array:
    """Reads, one after the other, the distinct parts that the devices of this process hold."""
    sharding, shards = NamedSharding(mesh, array.spec), list[jax.Array]()
    parts: dict[Part, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(array.shape).items():
        part = tuple(s.indices(n)[:2] for s, n in zip(index or (), array.shape, strict=True))
        parts.setdefault(part, []).append(device)
    for part, devices in parts.items():
        host = read_shard(source, array.shape, part, dtype)
        shards += jax.block_until_ready([jax.device_put(host, device) for device in devices])
        del host  # on CPU the array owns it now; elsewhere it is freed before the next read
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def laid_out(tree: Any) -> Any:
    """Lays weights out as `ragged_dot` and `embed_rows` read them: row by row but, on TPU, Mxfp4
    column by column. Otherwise, if the row length is not a multiple of 128, a TPU would store an
    array transposed, and would transpose all of it back at every step."""

    def place(form: type, x: Any) -> jax.Array:
        wanted: Any = format_of(form, x.sharding, x.ndim)
        if x.format.layout.major_to_minor == wanted.layout.major_to_minor:
            return x
        return jax.jit(lambda x: x, out_shardings=wanted)(x)

    return jax.tree.map(lambda w: jax.tree.map(partial(place, type(w)), w), tree, is_leaf=is_stored)


def load_weights(
    directory: str | Path,
    model: Any,
    config: Any,
    mesh: Mesh,
    dtype: DTypeLike,
    *,
    storage: Storage | None = None,
    progress: Progress | None = None,
    allow_nonfinite: bool = False,
    adapter: Path | None = None,
) -> Any:
    """Loads the weights in `directory` onto `mesh`, laid out as the model file declares them. The
    matrices get `storage`; other weights get `dtype`, unless they declare a dtype of their own.

    ValueError names unknown, missing and unfitting tensors, one a line, up to a number of lines; or
    the first tensor that holds NaN or infinity, unless `allow_nonfinite`.
    """
    layout, table = declare(model, config, model_shards(mesh))
    tensors = by_expert(open_tensors(directory), table)
    tensors = tensors if adapter is None else adapted(tensors, table, adapter)
    tensors = unpacked(tensors, table, getattr(config, "packing", None))
    sources = assign(tensors, table, by_path(stored_layout(declare(model, config)[0])))
    on_cpu = mesh.devices.flat[0].platform == "cpu"  # where int4 would take a byte anyway
    arrays = by_path(stored_layout(layout)).items()
    done, total = 0, sum(math.prod(x.shape) * sources[path].dtype.itemsize for path, x in arrays)

    def load(path: str, weight: Weight) -> Any:
        chosen = storage_for(weight, storage)

        def array(field: Any, declared: Weight) -> jax.Array:
            nonlocal done
            at = ".".join([path, *(key.name for key in field)])
            own, source = np.dtype(declared.dtype or dtype), sources[at]
            if chosen is not None and not any(tensor.added for tensor in source.tensors):
                own = source.dtype  # quantised from the stored numbers, not from those in `dtype`
            elif field and field[-1].name == "scale" and source.dtype in FLOATS.values():
                own = np.dtype(jnp.promote_types(own, source.dtype))  # so no scale is rounded
            elif own == jnp.int4:
                own = np.dtype(np.int8)
            if not allow_nonfinite:
                source = source._replace(limits=limits_of(at, source.tensors[0].dtype))
            loaded = load_array(source, declared, mesh, own)
            done += loaded.size * source.dtype.itemsize
            if progress is not None:
                progress(done, total)
            return loaded.astype(jnp.int4) if declared.dtype == jnp.int4 and not on_cpu else loaded

        loaded = jax.tree.map_with_path(array, published_arrays(weight), is_leaf=is_weight)
        if chosen is not None:
            loaded = convert(loaded, weight.spec, chosen, np.dtype(dtype), mesh)
        return jax.block_until_ready(laid_out(loaded))

    def place(path: str) -> tuple[Path, int]:
        first = sources[path if path in sources else f"{path}.values"].tensors[0]
        return first.file, first.offset

    declared = by_path(layout)
    weights = {path: load(path, declared[path]) for path in sorted(declared, key=place)}
    structure = jax.tree.structure(layout, is_leaf=is_weight)
    return jax.tree.unflatten(structure, [weights[path] for path in declared])


def stored_layout(layout: Any) -> Any:
    """Replaces each declared weight by the arrays in which a checkpoint stores it."""
    return jax.tree.map(published_arrays, layout, is_leaf=is_weight)


def progress_bar(stream: TextIO) -> Progress:
    """Returns a `Progress` that draws a bar if `stream` is a terminal, and nothing otherwise."""

    def draw(done: int, total: int) -> None:
        if stream.isatty():
            bar = "#" * (40 * done // max(total, 1))
            told = f"\rloading [{bar:<40}] {done / 1e9:.2f}/{total / 1e9:.2f} GB"
            print(told, end="\n" if done == total else "", file=stream, flush=True)

    return draw

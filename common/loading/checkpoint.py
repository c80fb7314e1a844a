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
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from common.kernels.ragged_dot import row_major
from common.loading.converting import convert
from common.loading.files import first_lines
from common.loading.finite import Limits, limits_of
from common.loading.matching import Source, assign, repeats
from common.loading.packed import declare, unpacked
from common.loading.reading import Part, read_tensor
from common.loading.stored import FLOATS, open_tensors
from common.quant import Grouped, Storage
from common.sharding import model_shards
from common.weights import Weight, by_path, is_weight, published_arrays, storage_for

Progress = Callable[[int, int], None]  # bytes read so far, bytes in total


class Placement(NamedTuple):
    """The stored source of a global array, and how the array is laid out."""

    source: Source
    shape: tuple[int, ...]  # padded
    sharding: NamedSharding
    limits: Limits = ()  # stored bits from these on are NaN or infinity


def read_shard(placement: Placement, part: Part, dtype: np.dtype) -> np.ndarray:
    """Reads one part of the padded and reordered array, in `dtype`."""
    (tensors, transform, stacked), padded, _, limits = placement
    out = zeros([stop - start for start, stop in part], dtype)
    if not stacked:
        read_tensor(tensors[0], transform, padded, part, out, limits)
        return out
    for tensor, into in zip(tensors[slice(*part[0])], out, strict=True):
        read_tensor(tensor, transform, padded[1:], part[1:], into, limits)
    return out


def zeros(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Returns zeros in memory pages of their own, which are aligned, so JAX on CPU takes them over.

    Shards on the heap would leave holes, which later arrays only half fill: an int8 model then took
    a fifth more memory.
    """
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, access=mmap.ACCESS_COPY)  # private
    if hasattr(mmap, "MADV_HUGEPAGE"):  # filling 4 KB pages takes longer than reading the file
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype, math.prod(shape)).reshape(shape)


def local_parts(placement: Placement) -> dict[Part, list[jax.Device]]:
    """Returns the distinct parts that this process holds, and the devices that hold each part."""
    parts: dict[Part, list[jax.Device]] = {}
    shape = placement.shape
    for device, index in placement.sharding.addressable_devices_indices_map(shape).items():
        part = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        parts.setdefault(part, []).append(device)
    return parts


def stored_bytes(placement: Placement, part: Part) -> int:
    return math.prod(stop - start for start, stop in part) * placement.source.dtype.itemsize


def load_array(placement: Placement, dtype: np.dtype, advance: Callable[[int], None]) -> jax.Array:
    shards = []
    for part, devices in local_parts(placement).items():
        host = read_shard(placement, part, dtype)
        shards += jax.block_until_ready([jax.device_put(host, device) for device in devices])
        del host  # on CPU the array owns it now; elsewhere it is freed before the next read
        advance(stored_bytes(placement, part))
    return jax.make_array_from_single_device_arrays(placement.shape, placement.sharding, shards)


def rows_together(tree: Any) -> Any:
    """Lays weights out row by row, as `ragged_dot` and `embed_rows` read them. Otherwise, if the
    row length is not a multiple of 128, a TPU would store an array transposed, and would transpose
    all of it back at every step."""

    def place(x: Any) -> jax.Array:
        if x.format.layout.major_to_minor == tuple(range(x.ndim)):
            return x
        return jax.jit(lambda x: x, out_shardings=row_major(x.sharding, x.ndim))(x)

    return jax.tree.map(place, tree)


def place_arrays(
    directory: str | Path, model: Any, config: Any, mesh: Mesh, allow_nonfinite: bool
) -> tuple[Any, dict[str, Placement]]:
    """Finds the tensors of all weights. Returns the layout, and by their paths the arrays in which
    the checkpoint stores it. ValueError names unknown, missing and unfitting tensors, one a line,
    up to a number of lines."""
    shards, packing = model_shards(mesh), getattr(config, "packing", None)
    layout, table = declare(model, config, shards)
    tensors = unpacked(open_tensors(directory), table, packing)
    published = stored_layout(declare(model, config)[0])
    sources, wrong = assign(tensors, table, by_path(published))
    if wrong or (wrong := repeats(tensors, table, sources)):
        raise ValueError(first_lines(wrong))
    placements = {
        path: Placement(
            sources[path],
            array.shape,
            NamedSharding(mesh, array.spec),
            () if allow_nonfinite else limits_of(path, sources[path].tensors[0].dtype),
        )
        for path, array in by_path(stored_layout(layout)).items()
    }
    return layout, placements


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
) -> Any:
    """Loads the weights in `directory` onto `mesh`, laid out as the model file declares them. The
    matrices get `storage`; other weights get `dtype`, unless they declare a dtype of their own.

    ValueError names tensors that do not fit, as in `place_arrays`; or the first one that holds NaN
    or infinity, unless `allow_nonfinite`.
    """
    layout, placements = place_arrays(directory, model, config, mesh, allow_nonfinite)
    on_cpu = mesh.devices.flat[0].platform == "cpu"  # where int4 would take a byte anyway
    total = sum(stored_bytes(x, part) for x in placements.values() for part in local_parts(x))
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    def load(path: str, weight: Weight) -> Any:
        chosen = storage_for(weight, storage)

        def array(path: str, declared: Weight) -> jax.Array:
            own, stored = np.dtype(declared.dtype or dtype), placements[path].source.dtype
            if chosen is not None:
                own = stored  # quantised from the stored numbers, not from those in `dtype`
            elif path.endswith(".scale") and stored in FLOATS.values():
                own = np.dtype(jnp.promote_types(own, stored))  # so no scale is rounded
            elif own == jnp.int4:
                own = np.dtype(np.int8)
            return load_array(placements[path], own, advance)

        fields = published_arrays(weight)
        if is_weight(fields):
            loaded = array(path, fields)
        else:
            named = zip(fields._fields, fields, strict=True)
            loaded = type(fields)(*(x and array(f"{path}.{name}", x) for name, x in named))
        if isinstance(loaded, Grouped) and fields.values.dtype == jnp.int4 and not on_cpu:
            loaded = loaded._replace(values=loaded.values.astype(jnp.int4))
        if chosen is not None:
            loaded = convert(loaded, weight.spec, chosen, np.dtype(dtype), mesh)
        return jax.block_until_ready(rows_together(loaded))

    def place(path: str) -> tuple[Path, int]:
        first = placements[path if path in placements else f"{path}.values"].source.tensors[0]
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
            end = "\n" if done == total else ""
            stream.write(f"\rloading [{bar:<40}] {done / 1e9:.2f}/{total / 1e9:.2f} GB{end}")
            stream.flush()

    return draw

"""A published Hugging Face checkpoint as sharded arrays: shard by shard, in bounded host memory.

A model file's table says which stored tensor becomes which weight. Everything is checked on the
headers of the files, and all that is wrong is reported together, before any data is read. Then each
process reads the shards of its own devices, one after the other, in chunks that are cast on the
way: it holds one shard, in the dtype in which it goes to the device, and a chunk (at least a row of
the first axis: of stacked experts, one expert's matrix). Files are read, not mapped: a mapped file
that is cut short kills the process. Columns are picked from whole rows, as storage reads past a gap
of some kilobytes in less time than it takes to seek over it.
"""

import enum
import itertools
import math
import mmap
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from common.files import first_lines
from common.finite import Limits, check_finite, limits_of
from common.kernels.ragged_dot import row_major
from common.quant import (
    FP8_BLOCK,
    SPECS,
    Fp8,
    Matrix,
    Storage,
    Transposed,
    dequantize_fp8,
    is_stored,
)
from common.sharding import Shards, model_shards
from common.stored import DTYPES, FLOATS, KEPT, StoredTensor, Tensors, open_tensors
from common.weights import Weight, by_path, is_weight, published_arrays, takes

READ_BYTES = 1 << 20  # at a time: stays in the CPU's cache between the read and the cast

Part = tuple[tuple[int, int], ...]  # of an array: (start, stop) along each axis
Progress = Callable[[int, int], None]  # bytes done, bytes in total


class Order(NamedTuple):
    """Blocks of `size` along `axis` as the devices want them: stored numbers, -1 for zeros."""

    axis: int
    size: int
    blocks: tuple[int, ...]
    stored: int | None = None  # blocks of the stored tensor; those of the published weight if None
    swapped: bool = False  # the last two axes are stored the other way round


class Axes(enum.Enum):
    """Other ways in which the axes of a weight are stored."""

    SWAPPED = "the last two the other way round"
    SPLIT = "the last one as two"


class Same(NamedTuple):
    """The stored tensor repeats the weight at `path`, byte for byte, and is dropped."""

    path: str


Transform = Order | Axes | None
Target = str | tuple[str, Transform] | Same | None  # None: known, and dropped
Table = dict[str, Target | list[Target]]  # by stored name; a list where it feeds several weights


class Span(NamedTuple):
    """`length` stored elements, from `start` on, that go to `to` and on."""

    to: int
    start: int
    length: int


class Source(NamedTuple):
    """The stored tensor that becomes an array, or those that are stacked to become one."""

    tensors: tuple[StoredTensor, ...]
    transform: Transform
    stacked: bool

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.tensors[0].dtype]


class Placement(NamedTuple):
    """What is stored and the global array that it becomes."""

    source: Source
    shape: tuple[int, ...]  # padded
    sharding: NamedSharding
    limits: Limits = ()  # beyond which stored bits are no number, and refused


# ---- which stored tensor becomes which weight


def starred(name: str) -> tuple[str, list[str]]:
    """A name with `*` for the numbers between its dots, and the numbers."""
    words = name.split(".")
    return ".".join("*" if w.isdecimal() else w for w in words), [w for w in words if w.isdecimal()]


def fill(pattern: str, numbers: list[str]) -> str:
    """The pattern with numbers in place of its `*`, from the left."""
    words = iter(numbers)
    return "".join(next(words) if c == "*" else c for c in pattern)


def targets_of(name: str, table: Table) -> tuple[list[Target], list[str]] | None:
    """What a stored tensor becomes, and the numbers that stand for the `*` of its row: found by its
    own name, by a row "prefix.**" that it begins with, by its name with `*` for all numbers but the
    first, or for all. None if the table does not know it."""
    pattern, numbers = starred(name)
    prefix = next((p for p in table if p.endswith(".**") and name.startswith(p[:-2])), None)
    one_layer = fill(pattern, [*numbers[:1], *"*" * len(numbers[1:])])
    rows: Any = ((name, []), (prefix, []), (one_layer, numbers[1:]), (pattern, numbers))
    for key, stars in rows:
        if key is not None and key in table:
            found = table[key]
            return found if isinstance(found, list) else [found], stars
    return None


def assign(
    tensors: Tensors, table: Table, arrays: dict[str, Weight]
) -> tuple[dict[str, Source], list[str]]:
    """The source of each array, and all that is wrong, a line each."""
    found: dict[str, dict[int, StoredTensor]] = {path: {} for path in arrays}
    wrong: list[str] = []
    for name, tensor in tensors.items():
        targets, numbers = targets_of(name, table) or ([""], starred(name)[1])
        for target in targets:
            if target is None or isinstance(target, Same):
                continue
            pattern, transform = (target, None) if isinstance(target, str) else target
            if transform is Axes.SPLIT:
                *lead, a, b = tensor.shape
                tensor = tensor._replace(shape=(*lead, a * b))
            path, expert = fill(pattern, numbers), [int(n) for n in numbers[pattern.count("*") :]]
            if path in arrays:
                problems = misfits(tensor, transform, arrays[path], expert, found[path])
                found[path].setdefault(expert[0] if expert else 0, tensor)
            else:
                problems = ["is not a weight of this model" + f": it has no {path}" * bool(path)]
            wrong += [f"{tensor.file.name}: {name} {problem}" for problem in problems]
    rows = rows_by_path(table)
    sources = {}
    for path, array in arrays.items():
        pattern, numbers = starred(path)
        if pattern not in rows:
            raise ValueError(f"the checkpoint table of the model file has no row for {pattern}")
        name, transform = rows[pattern]
        stacked = name.count("*") > pattern.count("*")
        shape = array.shape[1:] if stacked else array.shape
        for i in sorted(set(range(array.shape[0] if stacked else 1)) - set(found[path])):
            wrong.append(f"no file has {fill(name, [*numbers, str(i)])}, of shape {list(shape)}")
        sources[path] = Source(
            tuple(found[path][i] for i in sorted(found[path])), transform, stacked
        )
    return sources, wrong


def rows_by_path(table: Table) -> dict[str, tuple[str, Transform]]:
    """The table the other way round: of each path the stored name and the transform."""
    rows: dict[str, tuple[str, Transform]] = {}
    for name, found in table.items():
        for target in found if isinstance(found, list) else [found]:
            if isinstance(target, str):
                rows[target] = name, None
            elif isinstance(target, tuple) and not isinstance(target, Same):
                rows[target[0]] = name, target[1]
    return rows


def fp8_table(table: Table, projections: Collection[str], shards: Shards) -> Table:
    """The table of a checkpoint in which the matrices with these last names are stored as 8-bit
    floats, and their scales beside them."""
    fp8: Table = {}
    for name, target in table.items():
        if name.removesuffix(".weight").split(".")[-1] not in projections:
            fp8[name] = target
        elif isinstance(target, str):
            fp8[name], fp8[f"{name}_scale_inv"] = f"{target}.values", f"{target}.scale"
        elif isinstance(target, tuple) and not isinstance(target, Same):
            path, order = target
            in_blocks = None  # the published order, on one device
            if isinstance(order, Order) and shards.model > 1:
                in_blocks = order._replace(size=order.size // FP8_BLOCK)
            fp8[name] = f"{path}.values", order
            fp8[f"{name}_scale_inv"] = f"{path}.scale", in_blocks
    return fp8


def misfits(
    tensor: StoredTensor,
    transform: Transform,
    array: Weight,
    expert: list[int],
    others: dict[int, StoredTensor],
) -> list[str]:
    """Why a tensor is not what belongs into an array, or at place `expert` of a stack, which holds
    `others` so far."""
    shape = array.shape
    if expert and expert[0] >= shape[0]:
        return [f"is not a weight of this model: it has {shape[0]} of them"]
    if (other := others.get(expert[0] if expert else 0)) is not None:
        return [f"is the same weight as {other.name}; which one is meant?"]
    want, problems = stored_shape(shape[1:] if expert else shape, transform), list[str]()
    if tensor.shape != want:
        problems.append(f"has shape {list(tensor.shape)}, but the config says {list(want)}")
    kept = None if array.dtype is None else np.dtype(array.dtype)
    allowed = [name for name, dtype in KEPT.items() if dtype == kept] or list(FLOATS)
    if tensor.dtype not in allowed:
        problems.append(f"has dtype {tensor.dtype}, but only {', '.join(allowed)} can be read")
    elif others and tensor.dtype != (first := next(iter(others.values()))).dtype:
        problems.append(f"has dtype {tensor.dtype}, but {first.name} has {first.dtype}")
    return problems


def stored_shape(shape: tuple[int, ...], transform: Transform) -> tuple[int, ...]:
    """The shape that the stored tensor of an array must have."""
    if isinstance(transform, Order) and transform.stored is not None:
        extent = transform.stored * transform.size
        shape = (*shape[: transform.axis], extent, *shape[transform.axis + 1 :])
    return swapped(shape) if is_swapped(transform) else shape


def is_swapped(transform: Transform) -> bool:
    return transform is Axes.SWAPPED or (isinstance(transform, Order) and transform.swapped)


def swapped(axes: tuple[Any, ...]) -> tuple[Any, ...]:
    """The last two the other way round."""
    return (*axes[:-2], axes[-1], axes[-2])


def repeats(tensors: Tensors, table: Table, sources: dict[str, Source]) -> list[str]:
    """What is wrong with the stored tensors that should repeat another one, a line each."""
    wrong = []
    for name, tensor in tensors.items():
        for target in (targets_of(name, table) or ([], []))[0]:
            if isinstance(target, Same):
                original = sources[target.path].tensors[0]
                if not same_bytes(tensor, original):
                    wrong.append(
                        f"{tensor.file.name}: {name} differs from {original.name}, although "
                        "config.json ties them: set tie_word_embeddings to false to use it"
                    )
    return wrong


def same_bytes(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two stored tensors hold the same numbers."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    size = math.prod(a.shape) * DTYPES[a.dtype].itemsize
    with open(a.file, "rb") as f, open(b.file, "rb") as g:
        for at in range(0, size, READ_BYTES):
            chunks = np.empty((2, min(READ_BYTES, size - at)), np.uint8)
            read_into(f, a.offset + at, chunks[0])
            read_into(g, b.offset + at, chunks[1])
            if not np.array_equal(*chunks):
                return False
    return True


# ---- reading


def spans(stored: int, padded: int, part: tuple[int, int], order: Order | None) -> list[Span]:
    """What fills a part of one padded axis; the rest is zeros."""
    source = np.arange(max(stored, padded))
    source[stored:] = -2  # zeros; not -1, which 0 would seem to continue
    if order is not None:
        blocks = np.array(order.blocks)[:, None]
        source = np.where(blocks < 0, -2, blocks * order.size + np.arange(order.size)).ravel()
    if len(source) != padded or source.max() >= stored:
        raise ValueError(f"{order} cannot lay {stored} stored elements out as {padded}")
    source = source[slice(*part)]
    starts = np.flatnonzero(np.diff(source, prepend=-2) != 1)
    lengths = np.diff(starts, append=len(source))
    found = (Span(int(i), int(source[i]), int(n)) for i, n in zip(starts, lengths, strict=True))
    return [span for span in found if span.start >= 0]


def read_shard(placement: Placement, part: Part, dtype: np.dtype) -> np.ndarray:
    """One part of the padded and reordered array, in `dtype`."""
    (tensors, transform, stacked), padded, _, limits = placement
    out = zeros([stop - start for start, stop in part], dtype)
    if not stacked:
        read_tensor(tensors[0], transform, padded, part, out, limits)
        return out
    for tensor, into in zip(tensors[slice(*part[0])], out, strict=True):
        read_tensor(tensor, transform, padded[1:], part[1:], into, limits)
    return out


def read_tensor(
    tensor: StoredTensor,
    transform: Transform,
    padded: tuple[int, ...],
    part: Part,
    out: np.ndarray,
    limits: Limits = (),
) -> None:
    """Fills `out` with one part of a padded and reordered tensor; ValueError for numbers past
    `limits`."""
    axes = tuple(range(len(padded)))
    if is_swapped(transform):
        out, padded, part, axes = out.swapaxes(-1, -2), *map(swapped, (padded, part, axes))
    order = transform if isinstance(transform, Order) else None
    rows, *columns = (
        spans(n, m, p, order if order is not None and order.axis == axis else None)
        for n, m, p, axis in zip(tensor.shape, padded, part, axes, strict=True)
    )
    dtype = DTYPES[tensor.dtype]
    row_bytes = math.prod(tensor.shape[1:]) * dtype.itemsize
    is_whole = columns == [[Span(0, 0, n)] for n in tensor.shape[1:]]
    same_rows = (out.shape[1:], out.dtype) == (tensor.shape[1:], dtype)
    if is_whole and same_rows and out.flags.c_contiguous:  # straight into their place
        for piece in read_rows(tensor, rows, row_bytes, out):
            check_finite(tensor, piece, limits)  # while the CPU's cache holds it
        return
    step = max(1, READ_BYTES // row_bytes)
    scratch = np.empty((step, *tensor.shape[1:]), dtype)
    with open(tensor.file, "rb") as f:
        for to, start, length in rows:
            for i in range(0, length, step):
                chunk = scratch[: min(step, length - i)]
                read_into(f, tensor.offset + (start + i) * row_bytes, chunk)
                check_finite(tensor, chunk, limits)
                into = out[to + i : to + i + len(chunk)]
                for pieces in itertools.product(*columns):
                    there = (slice(p.to, p.to + p.length) for p in pieces)
                    here = (slice(p.start, p.start + p.length) for p in pieces)
                    into[:, *there] = chunk[:, *here]


def read_rows(
    tensor: StoredTensor, rows: Sequence[Span], row_bytes: int, out: np.ndarray
) -> Iterator[np.ndarray]:
    """Reads whole rows into their places in `out`; yields the pieces that it has read."""
    step = max(1, READ_BYTES // out.itemsize)
    with open(tensor.file, "rb", buffering=0) as f:
        for to, start, length in rows:
            numbers, offset = out[to : to + length].reshape(-1), tensor.offset + start * row_bytes
            for i in range(0, numbers.size, step):
                piece = numbers[i : i + step]
                read_into(f, offset + i * out.itemsize, piece)
                yield piece


def read_into(file: Any, offset: int, out: np.ndarray) -> None:
    file.seek(offset)
    buffer = out.reshape(-1).view(np.uint8).data
    while buffer.nbytes:  # one call reads 2 GB at most
        if not (count := file.readinto(buffer)):
            raise ValueError(f"{file.name} became shorter while it was read")
        buffer = buffer[count:]


def zeros(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Zeros in pages of their own, which jax on CPU takes over, as they are aligned.

    Shards on the heap leave holes that later arrays half fill: an int8 model took a fifth more.
    """
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, access=mmap.ACCESS_COPY)  # private
    if hasattr(mmap, "MADV_HUGEPAGE"):  # to fill pages of 4 KB takes longer than to read the file
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, dtype, math.prod(shape)).reshape(shape)


def local_parts(placement: Placement) -> dict[Part, list[jax.Device]]:
    """The distinct parts that this process holds, and the devices that hold each."""
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
        del host  # on CPU the device's memory by now, elsewhere free before the next shard is read
        advance(stored_bytes(placement, part))
    return jax.make_array_from_single_device_arrays(placement.shape, placement.sharding, shards)


# ---- from files to weights


@partial(jax.jit, static_argnames=("spec", "storage", "dtype", "mesh"))
def convert(
    w: Matrix, spec: PartitionSpec, storage: Storage, dtype: np.dtype, mesh: Mesh
) -> Matrix:
    """Every device stores its own part of a matrix, plain, Transposed or Fp8, in another way."""

    def run(w: Any) -> Matrix:
        if isinstance(w, Transposed):
            w = w.values.swapaxes(-1, -2)
        return storage.convert(dequantize_fp8(w) if isinstance(w, Fp8) else w, dtype)

    in_specs = SPECS[type(w)](spec) if is_stored(w) else spec
    run = jax.shard_map(run, mesh=mesh, in_specs=(in_specs,), out_specs=storage.specs(spec))
    return run(w)


def rows_together(tree: Any) -> Any:
    """Weights laid out row by row, as `ragged_dot` and `embed_rows` read them: a TPU would else
    turn an array whose rows are no multiple of 128, and turn all of it back at every step."""

    def place(x: Any) -> jax.Array:
        if x.format.layout.major_to_minor == tuple(range(x.ndim)):
            return x
        return jax.jit(lambda x: x, out_shardings=row_major(x.sharding, x.ndim))(x)

    return jax.tree.map(place, tree)


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
    """The weights in `directory` on `mesh`, as the model file lays them out: in `dtype`, but for
    what has its own; and the matrices in `storage`.

    ValueError names the unknown, missing and unfitting tensors, a line each, up to a number of
    lines; or, unless `allow_nonfinite`, the first that holds NaN or infinity.
    """
    shards, tensors = model_shards(mesh), open_tensors(directory)
    table, layout = model.checkpoint_table(config, shards), model.weight_layout(config, shards)
    published = stored_layout(model.weight_layout(config))
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
    total = sum(stored_bytes(x, part) for x in placements.values() for part in local_parts(x))
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    def load(path: str, weight: Weight) -> Any:
        chosen = takes(weight, storage)

        def array(path: str, declared: Weight) -> jax.Array:
            own = np.dtype(dtype if declared.dtype is None else declared.dtype)
            # What is quantised is what was stored, not what that is after rounding to `dtype`.
            return load_array(placements[path], sources[path].dtype if chosen else own, advance)

        fields = published_arrays(weight)
        if is_weight(fields):
            loaded = array(path, fields)
        else:
            named = zip(fields._fields, fields, strict=True)
            loaded = type(fields)(*(array(f"{path}.{name}", x) for name, x in named))
        if chosen and storage is not None:
            loaded = convert(loaded, weight.spec, storage, np.dtype(dtype), mesh)
        return jax.block_until_ready(rows_together(loaded))

    def place(path: str) -> tuple[Path, int]:
        first = sources[path if path in sources else f"{path}.values"].tensors[0]
        return first.file, first.offset

    declared = by_path(layout)
    weights = {path: load(path, declared[path]) for path in sorted(declared, key=place)}
    structure = jax.tree.structure(layout, is_leaf=is_weight)
    return jax.tree.unflatten(structure, [weights[path] for path in declared])


def stored_layout(layout: Any) -> Any:
    """The declared weights as the arrays in which a checkpoint holds them."""
    return jax.tree.map(published_arrays, layout, is_leaf=is_weight)


def progress_bar(stream: TextIO) -> Progress:
    """A `progress` that draws a bar on a terminal, and nothing on anything else."""

    def draw(done: int, total: int) -> None:
        if stream.isatty():
            bar = "#" * (40 * done // max(total, 1))
            end = "\n" if done == total else ""
            stream.write(f"\rloading [{bar:<40}] {done / 1e9:.2f}/{total / 1e9:.2f} GB{end}")
            stream.flush()

    return draw

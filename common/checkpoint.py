"""A published Hugging Face checkpoint as sharded arrays: shard by shard, in bounded host memory.

Everything is checked on the headers of the files, and all that is wrong is reported together,
before any data is read. Then each process reads the shards of its own devices, one after the
other, in chunks that are cast on the way: it holds one shard, in the dtype in which it goes to the
device, and a chunk (at least a row of the first axis: of stacked experts, one expert's matrix).
Files are read, not mapped: a mapped file that is cut short kills the process.
Columns are picked from whole rows, as storage reads past a gap of some kilobytes in less time than
it takes to seek over it.
"""

import enum
import itertools
import json
import math
import mmap
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from common.kernels.ragged_dot import row_major
from common.quant import INT8, Form, Fp8, Int8, Mxfp4, Transposed, is_leaf, is_stored, specs_like

FILES = [
    *("config.json", "generation_config.json", "*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
    *("vocab.json", "merges.txt", "tiktoken.model"),
]
OTHER_LAYOUTS = ["*/*", "consolidated*"]  # the same weights, as the authors' own code names them
INDEX = "model.safetensors.index.json"
FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(jnp.bfloat16)}
STORED = {"F8_E4M3": np.dtype(jnp.float8_e4m3fn), "U8": np.dtype(np.uint8)}  # kept as they are
DTYPES = FLOATS | STORED
CHUNK = 1 << 20  # bytes: stays in the CPU's cache between the read and the cast
RANDOM_STD = 0.02

Part = tuple[tuple[int, int], ...]  # of an array: (start, stop) along each axis
Progress = Callable[[int, int], None]  # bytes done, bytes in total


class Order(NamedTuple):
    """Blocks of `size` along `axis` as the devices want them: stored numbers, -1 for zeros."""

    axis: int
    size: int
    blocks: tuple[int, ...]


class Axes(enum.Enum):
    """Other ways in which the axes of a weight are stored."""

    SWAPPED = "the last two the other way round"
    SPLIT = "the last one as two"


class StoredTensor(NamedTuple):
    """Where a tensor lies."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # as the file spells it: "BF16"
    offset: int  # bytes from the start of the file


class Run(NamedTuple):
    """`length` stored elements, from `start` on, that go to `to` and on."""

    to: int
    start: int
    length: int


class Stored(NamedTuple):
    """The stored tensor that becomes a weight, or those that are stacked to become one."""

    tensors: tuple[StoredTensor, ...]
    order: Order | Axes | None
    stacked: bool

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.tensors[0].dtype]


class Placement(NamedTuple):
    """What is stored and the global array that it becomes."""

    stored: Stored
    shape: tuple[int, ...]  # padded
    sharding: NamedSharding


Table = dict[str, tuple[str | None, Order | Axes | None]]


def locate(ckpt: str, revision: str | None = None) -> Path:
    """`ckpt` itself if it is a directory, else where the hub's repository is downloaded to.

    Raises an OSError or a ValueError of one line.
    """
    path = Path(os.path.expanduser(ckpt))
    if ckpt and path.is_dir():
        if revision is not None:
            raise ValueError(f"{ckpt} is a local directory and has no revision {revision!r}")
        return path
    if path.is_file():
        raise NotADirectoryError(f"{ckpt} is a file; a checkpoint is the directory it lies in")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", ckpt, re.ASCII):
        raise FileNotFoundError(f"{ckpt!r} is neither a directory nor a hub id like org/name")
    return _download(ckpt, revision)


def _download(repo: str, revision: str | None) -> Path:
    # Imported here because it takes a third of a second, which a local checkpoint saves.
    from huggingface_hub import errors, snapshot_download

    wanted: dict[str, Any] = {"allow_patterns": FILES, "ignore_patterns": OTHER_LAYOUTS}
    try:
        return Path(snapshot_download(repo, revision=revision, **wanted))
    except errors.GatedRepoError:
        what = f"accept the licence at https://huggingface.co/{repo} and set HF_TOKEN to your token"
        raise PermissionError(f"{repo} is gated: {what}") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        what = "neither a directory here nor a repository on the hub (a private one needs HF_TOKEN)"
        raise FileNotFoundError(f"{repo} is {what}") from None
    except errors.RevisionNotFoundError:
        raise FileNotFoundError(f"{repo} has no revision {revision!r} on the hub") from None
    except errors.LocalEntryNotFoundError:
        what = "neither a directory here nor complete in the hub's cache"
        raise ConnectionError(
            f"{repo} is {what}, and the hub cannot be reached; is HF_HUB_OFFLINE set?"
        ) from None
    except Exception as error:  # the HTTP library's, another in each version of the hub's
        raise OSError(f"{repo}: the download failed: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def read_config(directory: str | Path) -> dict[str, Any]:
    return _read_json(Path(directory) / "config.json")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{file.name} is missing in {file.parent}") from None
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {_first_line(error)}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} does not hold a JSON object")
    return content


def open_tensors(directory: str | Path) -> dict[str, StoredTensor]:
    """The stored tensors by published name, from the headers alone.

    Follows the index where there is one, else opens model.safetensors, else every *.safetensors.
    """
    directory = Path(directory)
    if (directory / INDEX).exists():
        return _open_indexed(directory)
    single = directory / "model.safetensors"
    files = [single] if single.exists() else sorted(directory.glob("*.safetensors"))
    if not files:
        pickles = sorted(f.name for f in directory.glob("*") if f.suffix in (".bin", ".pth", ".pt"))
        only = f", only {pickles[0]}: pickles can run code and are never opened" if pickles else ""
        raise FileNotFoundError(f"{directory} has no *.safetensors{only}")
    tensors: dict[str, StoredTensor] = {}
    for tensor in itertools.chain.from_iterable(read_header(file).values() for file in files):
        if (other := tensors.setdefault(tensor.name, tensor)) is not tensor:
            raise ValueError(f"{tensor.file}: {tensor.name} is stored in {other.file.name} as well")
    return tensors


def _open_indexed(directory: Path) -> dict[str, StoredTensor]:
    weight_map = _read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or {type(file) for file in weight_map.values()} != {str}:
        raise ValueError(f"{directory / INDEX} has no weight_map from tensor names to file names")
    example = {file: name for name, file in weight_map.items()}
    missing = [file for file in example if not (directory / file).is_file()]
    if missing:
        lines = (f"{directory / file} is missing; it holds {example[file]}" for file in missing)
        raise FileNotFoundError("\n".join(lines))
    headers = {file: read_header(directory / file) for file in example}
    absent = [f"{directory / f} lacks {n}" for n, f in weight_map.items() if n not in headers[f]]
    if absent:
        raise ValueError("\n".join(f"{line}, which {INDEX} says it holds" for line in absent))
    return {name: headers[file][name] for name, file in weight_map.items()}


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file; ValueError when it is damaged or cut short."""
    size = file.stat().st_size
    with open(file, "rb") as f:
        start = 8 + int.from_bytes(f.read(8), "little")
        if not 8 < start <= size:
            raise ValueError(f"{file} is not a safetensors file, or is cut short at {size} bytes")
        header = f.read(start - 8)
    tensors, end = {}, start
    try:
        for name, entry in json.loads(header).items():
            if name == "__metadata__":
                continue
            first, last = (start + int(n) for n in entry["data_offsets"])
            shape, dtype = tuple(int(n) for n in entry["shape"]), entry["dtype"]
            wanted = math.prod(shape) * DTYPES[dtype].itemsize if dtype in DTYPES else last - first
            if min(shape, default=0) < 0 or not start <= first <= last or last - first != wanted:
                raise ValueError(f"shape {list(shape)} and place of {name} disagree")
            tensors[name] = StoredTensor(file, name, shape, dtype, first)
            end = max(end, last)
    except Exception as error:  # a damaged header can hold anything
        raise ValueError(f"{file} has a damaged header: {_first_line(error)}") from None
    if end != size:
        raise ValueError(f"{file} has {size} bytes, its header says {end}: an incomplete download?")
    return tensors


def _is_shape(x: Any) -> bool:
    return is_leaf(x) and not is_stored(x)


def _by_path(tree: Any, leaf: Callable[[Any], bool] = _is_shape) -> dict[str, Any]:
    """The leaves, shapes or specs, by a path like "layers.0.wq"."""
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: leaf(x) or isinstance(x, P))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _starred(name: str) -> tuple[str, list[str]]:
    """A name with `*` for the numbers between its dots, and the numbers."""
    words = name.split(".")
    return ".".join("*" if w.isdecimal() else w for w in words), [w for w in words if w.isdecimal()]


def _fill(pattern: str, numbers: list[str]) -> str:
    return pattern.replace("*", "{}").format(*numbers)


def assign(
    tensors: dict[str, StoredTensor], table: Table, shapes: dict[str, Any]
) -> tuple[dict[str, Stored], list[str]]:
    """What is stored of each weight, and all that is wrong, a line each."""
    found: dict[str, dict[int, StoredTensor]] = {path: {} for path in shapes}
    wrong: list[str] = []
    for name, tensor in tensors.items():
        pattern, numbers = _starred(name)
        target, order = table.get(pattern, ("", None))
        if target is None:
            continue
        path, place = _fill(target, numbers), [int(n) for n in numbers[target.count("*") :]]
        if order is Axes.SPLIT:
            tensor = tensor._replace(shape=(*tensor.shape[:-2], math.prod(tensor.shape[-2:])))
        if path in shapes:
            problems = _misfits(tensor, order, shapes[path], place, found[path])
            found[path].setdefault(sum(place), tensor)
        else:
            problems = ["is not a weight of this model" + f": it has no {path}" * bool(path)]
        wrong += [f"{tensor.file.name}: {name} {problem}" for problem in problems]
    names = {target: (name, order) for name, (target, order) in table.items()}
    stored = {}
    for path, leaf in shapes.items():
        pattern, numbers = _starred(path)
        name, order = names[pattern]
        stacked, (shape, _) = name.count("*") > pattern.count("*"), _shape_and_dtype(leaf)
        for i in sorted(set(range(shape[0] if stacked else 1)) - set(found[path])):
            missing, want = _fill(name, [*numbers, str(i)]), list(shape[stacked:])
            wrong.append(f"no file has {missing}, of shape {want}")
        stored[path] = Stored(tuple(found[path][i] for i in sorted(found[path])), order, stacked)
    return stored, wrong


def _misfits(
    tensor: StoredTensor,
    order: Order | Axes | None,
    leaf: Any,
    place: list[int],
    others: dict[int, StoredTensor],
) -> list[str]:
    """Why a tensor is not what belongs into a weight, or at `place` of a stack, which holds
    `others` so far."""
    (shape, dtype), problems = _shape_and_dtype(leaf), list[str]()
    if place and place[0] >= shape[0]:
        return [f"is not a weight of this model: it has {shape[0]} of them"]
    if sum(place) in others:
        return [f"is the same weight as {others[sum(place)].name}; which one is meant?"]
    want = shape[len(place) :]
    if order is Axes.SWAPPED:
        want = (*want[:-2], want[-1], want[-2])
    if tensor.shape != want:
        problems.append(f"has shape {list(tensor.shape)}, but the config says {list(want)}")
    allowed = [name for name, kept in STORED.items() if kept == dtype] or list(FLOATS)
    if tensor.dtype not in allowed:
        problems.append(f"has dtype {tensor.dtype}, but only {', '.join(allowed)} can be read")
    elif others and tensor.dtype != (first := next(iter(others.values()))).dtype:
        problems.append(f"has dtype {tensor.dtype}, but {first.name} has {first.dtype}")
    return problems


def _shape_and_dtype(leaf: Any) -> tuple[tuple[int, ...], np.dtype | None]:
    """Of a leaf of a tree of shapes; None where the dtype is the model's."""
    return (leaf, None) if isinstance(leaf, tuple) else (leaf.shape, np.dtype(leaf.dtype))


def runs(stored: int, padded: int, part: tuple[int, int], order: Order | None) -> list[Run]:
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
    found = (Run(int(i), int(source[i]), int(n)) for i, n in zip(starts, lengths, strict=True))
    return [run for run in found if run.start >= 0]


def read_shard(placement: Placement, part: Part, dtype: np.dtype) -> np.ndarray:
    """One part of the padded and reordered array, in `dtype`."""
    (tensors, order, stacked), padded, _ = placement
    out = _zeros([stop - start for start, stop in part], dtype)
    if not stacked:
        _read(tensors[0], order, padded, part, out)
        return out
    for tensor, into in zip(tensors[slice(*part[0])], out, strict=True):
        _read(tensor, order, padded[1:], part[1:], into)
    return out


def _read(
    tensor: StoredTensor,
    order: Order | Axes | None,
    padded: tuple[int, ...],
    part: Part,
    out: np.ndarray,
) -> None:
    """Fills `out` with one part of a padded and reordered tensor."""
    if order is Axes.SWAPPED:
        out, padded = out.swapaxes(-1, -2), (*padded[:-2], padded[-1], padded[-2])
        part = (*part[:-2], part[-1], part[-2])
    rows, *columns = (
        runs(n, m, p, order if isinstance(order, Order) and order.axis == axis else None)
        for axis, (n, m, p) in enumerate(zip(tensor.shape, padded, part, strict=True))
    )
    row_bytes = math.prod(tensor.shape[1:]) * DTYPES[tensor.dtype].itemsize
    step = max(1, CHUNK // row_bytes)
    scratch = np.empty((step, *tensor.shape[1:]), DTYPES[tensor.dtype])
    with open(tensor.file, "rb") as f:
        for to, start, length in rows:
            for i in range(0, length, step):
                chunk = scratch[: min(step, length - i)]
                read_into(f, tensor.offset + (start + i) * row_bytes, chunk)
                into = out[to + i : to + i + len(chunk)]
                for pieces in itertools.product(*columns):
                    there = (slice(p.to, p.to + p.length) for p in pieces)
                    here = (slice(p.start, p.start + p.length) for p in pieces)
                    into[:, *there] = chunk[:, *here]


def read_into(file: BinaryIO, offset: int, out: np.ndarray) -> None:
    file.seek(offset)
    if file.readinto(out.view(np.uint8)) != out.nbytes:  # type: ignore[attr-defined]
        raise ValueError(f"{file.name} became shorter while it was read")


def _zeros(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Zeros in pages of their own, which jax on CPU takes over, as they are aligned.

    Shards on the heap leave holes that later arrays half fill: an int8 model took a fifth more.
    """
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, access=mmap.ACCESS_COPY)  # private
    return np.frombuffer(pages, dtype, math.prod(shape)).reshape(shape)


def local_parts(placement: Placement) -> dict[Part, list[jax.Device]]:
    """The distinct parts that this process holds, and the devices that hold each."""
    parts: dict[Part, list[jax.Device]] = {}
    shape = placement.shape
    for device, index in placement.sharding.addressable_devices_indices_map(shape).items():
        part = tuple(s.indices(n)[:2] for s, n in zip(index or (), shape, strict=True))
        parts.setdefault(part, []).append(device)
    return parts


def _stored_bytes(placement: Placement, part: Part) -> int:
    return math.prod(stop - start for start, stop in part) * placement.stored.dtype.itemsize


def load_array(placement: Placement, dtype: np.dtype, advance: Callable[[int], None]) -> jax.Array:
    shards = []
    for part, devices in local_parts(placement).items():
        host = read_shard(placement, part, dtype)
        shards += jax.block_until_ready([jax.device_put(host, device) for device in devices])
        del host  # on CPU the device's memory by now, elsewhere free before the next shard is read
        advance(_stored_bytes(placement, part))
    return jax.make_array_from_single_device_arrays(placement.shape, placement.sharding, shards)


@partial(jax.jit, static_argnames=("form", "dtype", "mesh", "spec"))
def convert(w: Any, form: Form, dtype: Any, mesh: Mesh, spec: P) -> Any:
    """Every device converts its own part of a matrix, plain or Transposed."""

    def run(w: Any) -> Any:
        return form.convert(w.values.swapaxes(-1, -2) if isinstance(w, Transposed) else w, dtype)

    in_specs = specs_like(w, spec)
    return jax.shard_map(run, mesh=mesh, in_specs=(in_specs,), out_specs=form.spec(spec))(w)


def rows_together(tree: Any) -> Any:
    """Weights laid out row by row, as `ragged_dot` and `embed_rows` read them: a TPU would else
    turn an array whose rows are no multiple of 128, and turn all of it back at every step."""

    def place(x: Any) -> jax.Array:
        if x.format.layout.major_to_minor == tuple(range(x.ndim)):
            return x
        return jax.jit(lambda x: x, out_shardings=row_major(x.sharding, x.ndim))(x)

    return jax.tree.map(place, tree)


def _takes(form: Form | None, shape: Any, spec: P) -> bool:
    """Whether a weight is stored in `form`: matrices are, and stacks of matrices if it is INT8;
    unless they are quantised already or, as routers are, so small that every device has all."""
    dense = shape.values if isinstance(shape, Transposed) else shape
    axes = len(dense) if type(dense) is tuple else 0  # not of what has a form already
    return form is not None and any(spec) and (axes == 2 or (axes == 3 and form is INT8))


def load_weights(
    directory: str | Path,
    table: Table,
    shapes: Any,
    padded_shapes: Any,
    specs: Any,
    mesh: Mesh,
    dtype: Any,
    *,
    form: Form | None = None,
    progress: Progress | None = None,
) -> Any:
    """The weights in `directory`, on `mesh` as `specs` say, in `dtype`, the matrices in `form`.

    `table`: published name, `*` for its numbers -> (path in the weights, None to drop it; Order).
    `shapes` are what is stored, `padded_shapes` what the devices hold: zeros at the end, or where
    the Order says. A name with one `*` more than its path is that of one of a stack of matrices.
    What has a dtype of its own among the shapes keeps it.

    ValueError names every unknown, missing and unfitting tensor, a line each.
    """
    stored, padded = _by_path(shapes), _by_path(padded_shapes)
    spec = _by_path(specs_like(padded_shapes, specs))
    found, wrong = assign(open_tensors(directory), table, stored)
    if wrong:
        raise ValueError("\n".join(wrong))
    placements = {
        p: Placement(found[p], _shape_and_dtype(padded[p])[0], NamedSharding(mesh, spec[p]))
        for p in stored
    }
    total = sum(_stored_bytes(x, part) for x in placements.values() for part in local_parts(x))
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    def load(path: str, shape: Any, spec: P) -> Any:
        formed = _takes(form, shape, spec)

        def array(path: str) -> jax.Array:
            own = _shape_and_dtype(stored[path])[1] or np.dtype(dtype)
            # What is quantised is what was stored, not what that is after rounding to `dtype`.
            return load_array(placements[path], found[path].dtype if formed else own, advance)

        if is_stored(shape):
            weight = type(shape)(*(array(f"{path}.{field}") for field in shape._fields))
        else:
            weight = array(path)
        if formed:
            weight = convert(weight, form, np.dtype(dtype), mesh, spec)
        return jax.block_until_ready(rows_together(weight))

    def place(path: str) -> tuple[Path, int]:
        first = found[path if path in found else f"{path}.values"].tensors[0]
        return first.file, first.offset

    shape_of, spec_of = _by_path(shapes, is_leaf), _by_path(specs)
    order = sorted(shape_of, key=place)
    weights = {path: load(path, shape_of[path], spec_of[path]) for path in order}
    structure = jax.tree.structure(shapes, is_leaf=is_leaf)
    return jax.tree.unflatten(structure, [weights[path] for path in shape_of])


def progress_bar(stream: TextIO) -> Progress:
    """A `progress` that draws a bar on a terminal, and nothing on anything else."""

    def draw(done: int, total: int) -> None:
        if stream.isatty():
            bar = "#" * (40 * done // max(total, 1))
            end = "\n" if done == total else ""
            stream.write(f"\rloading [{bar:<40}] {done / 1e9:.2f}/{total / 1e9:.2f} GB{end}")
            stream.flush()

    return draw


def _noise(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Any int32 numbers: a hash of their place (Wellons' lowbias32). jax.random is 15 times slower
    on CPU, and needs 16 bytes of temporary memory a number."""
    x = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape) + jax.random.bits(key)
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return lax.bitcast_convert_type(x ^ (x >> 16), jnp.int32)


@partial(jax.jit, static_argnames=("shape", "spec", "mesh", "dtype", "form"))
def random_weight(key: Any, shape: Any, spec: P, mesh: Mesh, dtype: Any, form: Form | None) -> Any:
    """One weight: ones for a vector, else uniform numbers of standard deviation RANDOM_STD."""
    form = form if _takes(form, shape, spec) else None
    specs = specs_like(shape, spec)
    out_specs = form.spec(spec) if form else specs

    def local(leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        whole, own = _shape_and_dtype(leaf)
        part = NamedSharding(mesh, spec).shard_shape(whole)
        return jax.ShapeDtypeStruct(part, own or dtype)

    part = jax.tree.map(local, shape, specs, is_leaf=_is_shape)

    def make(key: jax.Array) -> Any:
        for axis in jax.tree.leaves(tuple(spec)):
            key = jax.random.fold_in(key, lax.axis_index(axis))
        if isinstance(part, Mxfp4):
            values = (_noise(key, part.values.shape) >> 24).astype(jnp.uint8)
            return Mxfp4(values, jnp.full(part.scale.shape, 120, jnp.uint8))  # 2 ** -7 * 2.9
        dense = part.values if is_stored(part) else part
        if dense.ndim == 1:
            return jnp.ones(dense.shape, dense.dtype)
        if form is INT8:
            *lead, out, into = dense.shape[::-1] if isinstance(part, Transposed) else dense.shape
            # Odd, so that they balance around zero.
            values = ((_noise(key, (*lead, out, into)) >> 25) * 2 + 1).astype(jnp.int8)
            step = RANDOM_STD * math.sqrt(3 / (128**2 - 1))
            return Int8(values, jnp.full((*lead, 1, out), step, jnp.float32))
        w = _noise(key, dense.shape).astype(jnp.float32) * (RANDOM_STD * math.sqrt(3) / 2**31)
        if isinstance(part, Fp8):
            largest = RANDOM_STD * math.sqrt(3)
            scale = jnp.full(part.scale.shape, largest / 448, jnp.float32)
            return Fp8((w * (448 / largest)).astype(dense.dtype), scale)
        w = w.astype(dense.dtype)
        if isinstance(part, Transposed):
            return Transposed(w) if form is None else form.convert(w.T, dtype)
        return form.convert(w, dtype) if form else w

    return jax.shard_map(make, mesh=mesh, in_specs=P(), out_specs=out_specs)(key)


def random_weights(
    padded_shapes: Any, specs: Any, mesh: Mesh, dtype: Any, seed: int, form: Form | None = None
) -> Any:
    """Weights laid out as by `load_weights`, but random; each device makes its own part."""
    key, spec = jax.random.key(seed), _by_path(specs)
    weights = []
    for i, (path, shape) in enumerate(_by_path(padded_shapes, is_leaf).items()):
        leaf_key = jax.random.fold_in(key, i)
        weights.append(random_weight(leaf_key, shape, spec[path], mesh, np.dtype(dtype), form))
    return jax.tree.unflatten(jax.tree.structure(padded_shapes, is_leaf=is_leaf), weights)

"""Decides which stored tensor becomes which weight, by a model file's table of names.

All problems that the headers of the files show are reported together. Only if there are none, data
is read: that of tensors that should repeat a weight, or hold known numbers.
"""

import math
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from common.config import show
from common.loading.files import first_lines
from common.loading.reading import Limits, Span, chunks, read_tensor, stored_shape
from common.loading.stored import DTYPES, FLOATS, KEPT, StoredTensor, Tensors
from common.names import Axes, Dropped, Holds, Same, Table, Target, Transform, weight_of
from common.sharding import round_up
from common.weights import Weight


class Source(NamedTuple):
    """The stored tensor that becomes an array, or the tensors that are stacked into one."""

    tensors: tuple[StoredTensor, ...]
    transform: Transform
    stacked: bool
    limits: Limits | None = None  # None: all numbers are accepted

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.tensors[0].dtype]


def starred(name: str) -> tuple[str, list[str]]:
    """Returns a name with `*` in place of each number between its dots, and those numbers."""
    words = name.split(".")
    return ".".join("*" if w.isdecimal() else w for w in words), [w for w in words if w.isdecimal()]


def fill(pattern: str, numbers: list[str]) -> str:
    """Replaces each `*` of a pattern by a number, from the left, as long as there are numbers."""
    words = iter(numbers)
    return "".join(next(words, c) if c == "*" else c for c in pattern)


def target_of(name: str, table: Table) -> tuple[Target, list[str]]:
    """Returns what a stored tensor becomes, and the numbers that the `*` in its row stand for. The
    target is "" if the table does not know the name. Tries rows in the order that `Table` gives."""
    words = name.split(".")
    for key in (name, *(".".join([*words[:i], "**"]) for i in range(1, len(words)))):
        if key in table:
            return table[key], []
    pattern, numbers = starred(name)
    if (one_layer := fill(pattern, numbers[:1])) in table:
        return table[one_layer], numbers[1:]
    return table.get(pattern, ""), numbers


def rows_by_path(table: Table) -> dict[str, tuple[str, Transform]]:
    """Inverts the table: from each path to its stored name and transform. ValueError if two rows
    of a path say different things, because a layer of either kind would be read by the last."""
    rows = dict[str, tuple[str, Transform]]()
    for name, target in table.items():
        if (row := weight_of(target)) is not None:
            other, transform = rows.get(row[0], row)
            if transform != row[1]:
                raise ValueError(f"{other} and {name} become {row[0]} in two ways: use two names")
            rows[row[0]] = name, row[1]
    return rows


def row_of(path: str, rows: dict[str, tuple[str, Transform]]) -> tuple[str, Transform]:
    """The stored name of an array, with `*` for the number of an expert, and the transform."""
    pattern, numbers = (path, list[str]()) if path in rows else starred(path)
    if pattern not in rows:
        raise ValueError(f"the checkpoint table of the model file has no row for {pattern}")
    name, transform = rows[pattern]
    return fill(name, numbers), transform


def by_expert(tensors: Tensors, table: Table) -> Tensors:
    """Cuts tensors of all experts, [E, 2 * F, D] with gate before up and [E, D, F], as transformers
    5 may save them, into those of one expert each, if the table has rows for these."""
    found = dict(tensors)
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj(|_scale_inv)", name)
        if match is None or len(tensor.shape) != 3 or tensor.dtype not in DTYPES:
            continue
        at, kinds, end = match.groups()
        kinds = [f"{kind}_proj.weight{end}" for kind in kinds.split("_")]
        parts = [f"{at}.{e}.{kind}" for e in range(tensor.shape[0]) for kind in kinds]
        if not parts or target_of(parts[0], table)[0] == "" or found.keys() & parts:
            continue
        shape = (math.prod(tensor.shape[:2]) // len(parts), tensor.shape[2])
        size = math.prod(shape) * DTYPES[tensor.dtype].itemsize
        for i, part in enumerate(parts):
            found[part] = tensor._replace(name=part, shape=shape, offset=tensor.offset + i * size)
        del found[name]
    return found


def assign(tensors: Tensors, table: Table, arrays: dict[str, Weight]) -> dict[str, Source]:
    """The source of each array. ValueError names what is wrong, by `first_lines`."""
    found: dict[str, dict[int, StoredTensor]] = {path: {} for path in arrays}
    wrong, checked = list[str](), list[tuple[StoredTensor, Same | Holds]]()
    for name, tensor in tensors.items():
        target, numbers = target_of(name, table)
        if isinstance(target, Same) and target.path not in map(table.get, table.keys() & tensors):
            target = target.path  # nothing to repeat: the files hold this one alone
        if isinstance(target, Same | Holds):
            checked.append((tensor, target))
        if isinstance(target, Dropped) and target.beside not in tensors:
            target = ""
        if (row := weight_of(target)) is None:
            continue
        path, expert = fill(row[0], numbers), numbers[row[0].count("*") :]
        place = int(expert[0]) if expert else 0
        if path not in arrays:
            problems = ["is not a weight of this model" + (path and f": it has no {path}")]
        elif expert and place >= (n := arrays[path].shape[0]):
            problems = [f"is not a weight of this model: it has only {n} experts"]
        elif (other := found[path].get(place)) is not None:
            problems = [f"is the same weight as {other.name}; which one is meant?"]
        else:
            first = next(iter(found[path].values()), tensor)
            tensor, problems = fit(tensor, row[1], arrays[path], bool(expert), first)
            found[path][place] = tensor
        wrong += [f"{tensor.file.name}: {name} {problem}" for problem in problems]
    rows, sources = rows_by_path(table), {}
    for path, array in arrays.items():
        name, transform = row_of(path, rows)
        stacked, stored = "*" in name, found[path]
        count, *shape = array.shape if stacked else (1, *array.shape)
        missing = (fill(name, [str(i)]) for i in range(count) if i not in stored)
        wrong += [f"no file has {each}, of shape {shape}" for each in missing]
        sources[path] = Source(tuple(stored[i] for i in sorted(stored)), transform, stacked)
    if not wrong:
        problem_of = ((x, differs(x, target, sources)) for x, target in checked)
        wrong = [f"{x.file.name}: {x.name} {problem}" for x, problem in problem_of if problem]
    if wrong:
        raise ValueError(without_head(tensors, table, found) or first_lines(wrong))
    return sources


def without_head(tensors: Tensors, table: Table, found: dict[str, Any]) -> str | None:
    """Says so if there is no head, which may also change how all names begin."""
    bare = not any(found.values()) and any(target_of(f"model.{x}", table)[0] for x in tensors)
    if not bare and [path for path, stored in found.items() if not stored] != ["head"]:
        return None
    what = "this is an embedding model, or config.json should say tie_word_embeddings=true"
    return f"{next(iter(tensors.values())).file.parent} holds no head (lm_head.weight): {what}"


def fit(
    tensor: StoredTensor, transform: Transform, array: Weight, stacked: bool, first: StoredTensor
) -> tuple[StoredTensor, list[str]]:
    """Returns a tensor in the shape that an array, or each matrix of a stack, must have, and why it
    does not fit. `first` is the first tensor of the stack."""
    want = stored_shape(array.shape[1:] if stacked else array.shape, transform)
    shape = tensor.shape
    if transform is Axes.SPLIT:
        shape = (*shape[:-2], math.prod(shape[-2:]))
    if (words := tensor.words) is not None:  # the last word of a row or column may be partly filled
        n = len(words.places)
        full = tuple(round_up(m, n) if i == words.axis else m for i, m in enumerate(want))
        shape = want if shape == full else shape
    problems = []
    if shape != want:
        problems.append(f"has shape {show(list(shape))}, but the config says {list(want)}")
    kept = jnp.int8 if array.dtype == jnp.int4 else array.dtype or jnp.float32
    allowed = [name for name, dtype in KEPT.items() if dtype == kept] or list(FLOATS)
    if tensor.dtype not in allowed:
        problems.append(f"has dtype {tensor.dtype}, but only {', '.join(allowed)} can be read")
    elif tensor.dtype != first.dtype:
        problems.append(f"has dtype {tensor.dtype}, but {first.name} has {first.dtype}")
    return tensor._replace(shape=shape), problems


def differs(tensor: StoredTensor, target: Same | Holds, sources: dict[str, Source]) -> str | None:
    """How a tensor differs from the weight or the numbers that it should repeat; None if not."""
    if isinstance(target, Same):
        original, rows = sources[target.path].tensors[0], [Span(0, 0, tensor.shape[0])]
        both = zip(chunks(tensor, rows), chunks(original, rows), strict=True)
        alike = (tensor.shape, tensor.dtype) == (original.shape, original.dtype)
        if alike and all(x.tobytes() == y.tobytes() for (_, x), (_, y) in both):
            return None
        return f"differs from {original.name}, although config.json ties them (tie_word_embeddings)"
    want = target.numbers
    if tensor.dtype not in ("I8", "I32", "I64") and not (want == (0,) and tensor.dtype in FLOATS):
        return f"has dtype {tensor.dtype}, but only whole numbers can be read"
    if len(want) > 1 and tensor.shape != (len(want),):
        return f"has shape {show(list(tensor.shape))}, but the config says [{len(want)}]"
    found = np.empty(tensor.shape, DTYPES[tensor.dtype])
    read_tensor(tensor, None, tensor.shape, tuple((0, n) for n in tensor.shape), found)
    different = np.flatnonzero(found.reshape(-1) != np.array(want))
    if not different.size:
        return None
    i = int(different[0])
    return f"holds {found.flat[i]} at {i}, but the config says {want[i % len(want)]}"

"""Decides which stored tensor becomes which weight, by a model file's table of names.

`assign` needs only the headers of the files, and reports all problems together. `repeats` then
compares the data of tensors that should be equal.
"""

from typing import Any, NamedTuple

import numpy as np

from common.config import show
from common.loading.reading import read_numbers, same_bytes, stored_shape
from common.loading.stored import DTYPES, FLOATS, KEPT, StoredTensor, Tensors
from common.names import Axes, Dropped, Holds, Same, Table, Target, Transform
from common.weights import Weight


class Source(NamedTuple):
    """The stored tensor that becomes an array, or the tensors that are stacked into one."""

    tensors: tuple[StoredTensor, ...]
    transform: Transform
    stacked: bool

    @property
    def dtype(self) -> np.dtype:
        return DTYPES[self.tensors[0].dtype]


def starred(name: str) -> tuple[str, list[str]]:
    """Returns a name with `*` in place of each number between its dots, and those numbers."""
    words = name.split(".")
    return ".".join("*" if w.isdecimal() else w for w in words), [w for w in words if w.isdecimal()]


def fill(pattern: str, numbers: list[str]) -> str:
    """Replaces each `*` of a pattern by a number, from the left."""
    words = iter(numbers)
    return "".join(next(words) if c == "*" else c for c in pattern)


def targets_of(name: str, table: Table) -> tuple[list[Target], list[str]] | None:
    """Returns what a stored tensor becomes, and the numbers that the `*` in its row stand for. None
    if the table does not know the name. Tries four rows in this order: the name itself; "prefix.**"
    for a prefix of it; `*` for every number but the first; `*` for every number."""
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
    """Returns the source of each array, and everything that is wrong, one problem a line."""
    found: dict[str, dict[int, StoredTensor]] = {path: {} for path in arrays}
    wrong: list[str] = []
    for name, tensor in tensors.items():
        targets, numbers = targets_of(name, table) or ([""], starred(name)[1])
        for target in targets:
            if isinstance(target, Dropped) and target.beside not in tensors:
                target = ""
            if target is None or isinstance(target, Same | Dropped | Holds):
                continue
            pattern, transform = (target, None) if isinstance(target, str) else target
            if transform is Axes.SPLIT:
                *lead, a, b = tensor.shape
                tensor = tensor._replace(shape=(*lead, a * b))
            path, expert = fill(pattern, numbers), [int(n) for n in numbers[pattern.count("*") :]]
            if path in arrays:
                tensor = cropped(tensor, transform, arrays[path], bool(expert))
                problems = misfits(tensor, transform, arrays[path], expert, found[path])
                found[path].setdefault(expert[0] if expert else 0, tensor)
            else:
                problems = ["is not a weight of this model" + f": it has no {path}" * bool(path)]
            wrong += [f"{tensor.file.name}: {name} {problem}" for problem in problems]
    rows = rows_by_path(table)
    sources = {}
    for path, array in arrays.items():
        pattern, numbers = (path, list[str]()) if path in rows else starred(path)
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
    """Inverts the table: from each path to its stored name and transform."""
    rows: dict[str, tuple[str, Transform]] = {}
    for name, found in table.items():
        for target in found if isinstance(found, list) else [found]:
            if isinstance(target, str):
                rows[target] = name, None
            elif isinstance(target, tuple) and not isinstance(target, Same | Dropped | Holds):
                rows[target[0]] = name, target[1]
    return rows


def cropped(
    tensor: StoredTensor, transform: Transform, array: Weight, stacked: bool
) -> StoredTensor:
    """Returns a packed tensor with the shape of its weight, which drops the numbers that only fill
    up the last words. Returns any other tensor as it is."""
    words, want = tensor.words, stored_shape(array.shape[stacked:], transform)
    if words is None or len(want) != 2 or tensor.shape != words.filled(want):
        return tensor
    return tensor._replace(shape=want)


def misfits(
    tensor: StoredTensor,
    transform: Transform,
    array: Weight,
    expert: list[int],
    others: dict[int, StoredTensor],
) -> list[str]:
    """Says why a tensor cannot fill an array, or place `expert` of a stack. `others` are the
    array's tensors that were found so far."""
    shape = array.shape
    if expert and expert[0] >= shape[0]:
        return [f"is not a weight of this model: it has only {shape[0]} experts"]
    if (other := others.get(expert[0] if expert else 0)) is not None:
        return [f"is the same weight as {other.name}; which one is meant?"]
    want, problems = stored_shape(shape[1:] if expert else shape, transform), list[str]()
    if tensor.shape != want:
        problems.append(f"has shape {show(list(tensor.shape))}, but the config says {list(want)}")
    kept = None if array.dtype is None else np.dtype(array.dtype)
    allowed = [name for name, dtype in KEPT.items() if dtype == kept] or list(FLOATS)
    if tensor.dtype not in allowed:
        problems.append(f"has dtype {tensor.dtype}, but only {', '.join(allowed)} can be read")
    elif others and tensor.dtype != (first := next(iter(others.values()))).dtype:
        problems.append(f"has dtype {tensor.dtype}, but {first.name} has {first.dtype}")
    return problems


def differs(tensor: StoredTensor, want: tuple[int, ...]) -> str | None:
    """Says how a tensor differs from the whole numbers that it should hold."""
    if tensor.dtype not in ("I8", "I32", "I64") and not (want == (0,) and tensor.dtype in FLOATS):
        return f"has dtype {tensor.dtype}, but only whole numbers can be read"
    if len(want) > 1 and tensor.shape != (len(want),):
        return f"has shape {show(list(tensor.shape))}, but the config says [{len(want)}]"
    found = read_numbers(tensor)
    different = np.flatnonzero(found.reshape(-1) != np.array(want))
    if not different.size:
        return None
    i = int(different[0])
    return f"holds {found.flat[i]} at {i}, but the config says {want[i % len(want)]}"


def repeats(tensors: Tensors, table: Table, sources: dict[str, Source]) -> list[str]:
    """Compares the stored tensors that should repeat another one, or hold known numbers; says which
    differ, one a line."""
    wrong = []
    for name, tensor in tensors.items():
        for target in (targets_of(name, table) or ([], []))[0]:
            if isinstance(target, Holds) and (problem := differs(tensor, target.numbers)):
                wrong.append(f"{tensor.file.name}: {name} {problem}")
            if isinstance(target, Same):
                original = sources[target.path].tensors[0]
                if not same_bytes(tensor, original):
                    wrong.append(
                        f"{tensor.file.name}: {name} differs from {original.name}, although "
                        "config.json ties them (tie_word_embeddings)"
                    )
    return wrong

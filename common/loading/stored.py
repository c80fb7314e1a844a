"""Lists the tensors in the safetensors files of a directory, by reading only their headers."""

import math
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from common.config import show
from common.loading.files import (
    check_regular,
    first_line,
    first_lines,
    is_there,
    parse_json,
    read_json,
)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LONGEST_NAME = 255  # characters, in the name of a tensor or of a file
LARGEST_HEADER = 100_000_000  # bytes, by the format's own rule
Dtypes = dict[str, np.dtype]  # by the name that a file has for each
FLOATS: Dtypes = dict(F32=np.dtype("float32"), F16=np.dtype("float16"), BF16=jnp.dtype("bfloat16"))
KEPT: Dtypes = dict(F8_E4M3=jnp.dtype("float8_e4m3fn"), U8=np.dtype("uint8"))  # never cast
# 4-bit integers are read as int8. Files hold them only packed, several in a 32-bit word.
KEPT |= dict(I8=np.dtype("int8"), I4=jnp.dtype("int4"))
WHOLE: Dtypes = dict(I32=np.dtype("int32"), I64=np.dtype("int64"))
DTYPES = FLOATS | KEPT | WHOLE


class Words(NamedTuple):
    """How integers of a few bits are packed in words of 32 bits, which a file holds as int32. They
    are stored unsigned: to read one, half of the range, 2**(bits - 1), is subtracted."""

    bits: int  # of one integer
    axis: int  # neighbours along this axis share a word
    places: tuple[int, ...]  # of neighbours 0, 1, ...: place p begins at bit p * bits of the word
    plus: int  # added to each stored integer first, modulo 2**bits

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the words that hold so many numbers."""
        return tuple(
            -(-n // len(self.places)) if i == self.axis else n for i, n in enumerate(shape)
        )

    def filled(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of all numbers in these words."""
        words = self.of(shape)
        return tuple(n * len(self.places) if i == self.axis else n for i, n in enumerate(words))


class StoredTensor(NamedTuple):
    """Where a stored tensor lies, its shape and its dtype."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # as the file spells it: "BF16"
    offset: int  # bytes from the start of the file
    words: Words | None = None  # if numbers are packed; shape and dtype are of the unpacked ones
    below: "StoredTensor | None" = None  # the tensor with the last rows, if rows are in two tensors


Tensors = dict[str, StoredTensor]  # by published name


def is_name(text: str) -> bool:
    """Whether a message can show the name of a tensor or file on one line, and a table match it."""
    return len(text) <= LONGEST_NAME and text.isprintable() and "*" not in text


def open_tensors(directory: str | Path) -> Tensors:
    """Returns the stored tensors by published name.

    Follows the index if there is one; else opens model.safetensors; else every *.safetensors.
    """
    directory = Path(directory)
    single = directory / SINGLE
    if is_there(directory / INDEX):
        return _indexed_or_single(directory)
    if is_there(single):
        return read_header(single)
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        pickles = sorted(f.name for f in directory.glob("*") if f.suffix in (".bin", ".pth", ".pt"))
        only = f", only {pickles[0]}: pickles can run code and are never opened" if pickles else ""
        raise FileNotFoundError(f"{directory} has no *.safetensors{only}")
    tensors: Tensors = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if (other := tensors.setdefault(name, tensor)) is not tensor:
                raise ValueError(f"{file}: {name} is stored in {other.file.name} as well")
    return tensors


def _indexed_or_single(directory: Path) -> Tensors:
    """Returns the tensors that the index names. A model.safetensors that the index does not name is
    another checkpoint. Then the one that is complete counts; ValueError if both are complete."""
    files = _weight_map(directory)
    if SINGLE in files.values() or not (directory / SINGLE).exists():
        return _open_indexed(directory, files)
    try:
        single = read_header(directory / SINGLE)
    except (ValueError, OSError):
        return _open_indexed(directory, files)
    try:
        indexed = _open_indexed(directory, files)
    except (ValueError, OSError):
        return single
    if files.keys() <= single.keys():
        raise ValueError(
            f"{directory} holds two checkpoints, {SINGLE} and the files of {INDEX}: move one away"
        )
    return indexed


def _weight_map(directory: Path) -> dict[str, str]:
    """Returns the index's file names by tensor name."""
    files = read_json(directory / INDEX).get("weight_map")
    if not isinstance(files, dict) or {type(file) for file in files.values()} != {str}:
        raise ValueError(f"{directory / INDEX} has no weight_map from tensor names to file names")
    if wrong := [name for name in files if not is_name(name)]:
        raise ValueError(f"{directory / INDEX} names {wrong[0][:60]!r}, which is no tensor")
    for file in files.values():
        if Path(file).name != file or file in ("", "..") or not is_name(file):
            what = f"{file[:60]!r}, which is not a file beside it"
            raise ValueError(f"{directory / INDEX} names {what}")
    return files


def _open_indexed(directory: Path, files: dict[str, str]) -> Tensors:
    example = {file: name for name, file in files.items()}
    missing = [file for file in example if not (directory / file).exists()]
    if missing:
        says = f"is missing; {INDEX} says it holds"
        lines = [f"{directory / file} {says} {example[file]}" for file in missing]
        raise FileNotFoundError(first_lines(lines))
    headers = {file: read_header(directory / file) for file in example}
    absent = [
        f"{directory / f} lacks {name}, which {INDEX} says it holds"
        for name, f in files.items()
        if name not in headers[f]
    ]
    if absent:
        raise ValueError(first_lines(absent))
    return {name: headers[file][name] for name, file in files.items()}


def read_header(file: Path) -> Tensors:
    """Returns the tensors of one safetensors file. ValueError if it is damaged or cut short."""
    size = check_regular(file)
    with open(file, "rb") as f:
        start = 8 + int.from_bytes(f.read(8), "little")
        if not 8 < start <= size:
            raise ValueError(f"{file} is not a safetensors file, or is cut short at {size} bytes")
        if start > LARGEST_HEADER:
            raise ValueError(f"{file} has a damaged header: it claims {start} bytes")
        header = f.read(start - 8)
    try:
        # Decoded first, because json would also accept bytes in UTF-16.
        entries = parse_json(header.decode(), object_pairs_hook=_once, parse_constant=_refuse)
        _check_metadata(entries.pop("__metadata__", None))
        if wrong := [name for name in entries if not is_name(name)]:
            raise ValueError(f"{wrong[0][:60]!r} is not the name of a tensor")
        tensors = {name: _tensor(file, name, entry, start) for name, entry in entries.items()}
        places = sorted(entry["data_offsets"] for entry in entries.values())
        ends = [0, *(last for _, last in places)]
        if any(first != end for (first, _), end in zip(places, ends, strict=False)):
            raise ValueError("tensors overlap or leave a hole")
    except Exception as error:  # a damaged header can hold anything
        raise ValueError(f"{file} has a damaged header: {first_line(error)}") from None
    if (end := start + ends[-1]) != size:
        raise ValueError(f"{file} has {size} bytes, its header says {end}: an incomplete download?")
    return tensors


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Makes a JSON object from its pairs. ValueError if a name occurs twice."""
    names = Counter(name for name, _ in pairs)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"{twice[0]} occurs twice in it")
    return dict(pairs)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _check_metadata(values: Any) -> None:
    if values is not None and any(type(value) is not str for value in values.values()):
        raise ValueError("__metadata__ holds a value that is not text")


def _tensor(file: Path, name: str, entry: dict[str, Any], start: int) -> StoredTensor:
    shape, dtype, (first, last) = entry["shape"], entry["dtype"], entry["data_offsets"]
    if any(type(n) is not int or n < 0 for n in (*shape, first, last)) or first > last:
        raise ValueError(f"shape or offsets of {name} are not whole numbers")
    if dtype == "I4":
        raise ValueError(f"dtype I4 of {name} is unknown: a file packs such numbers in I32")
    if dtype in DTYPES and last - first != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"shape {show(shape)} and offsets of {name} disagree")
    return StoredTensor(file, name, tuple(shape), dtype, start + first)

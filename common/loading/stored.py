"""Lists the tensors in the safetensors files of a directory, by reading only their headers."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from common.loading.files import is_there, read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Dtypes = dict[str, np.dtype]  # by the name that a file has for each
FLOATS: Dtypes = dict(F32=np.dtype("float32"), F16=np.dtype("float16"), BF16=jnp.dtype("bfloat16"))
# These are never cast.
KEPT: Dtypes = dict(F8_E4M3=jnp.dtype("float8_e4m3fn"), U8=np.dtype("uint8"), I8=np.dtype("int8"))
DTYPES = FLOATS | KEPT | dict(I32=np.dtype("int32"), I64=np.dtype("int64"))


class Words(NamedTuple):
    """How integers of a few bits are packed in words of 32 bits, which a file holds as int32. They
    are stored unsigned: to read one, half of the range, 2**(bits - 1), is subtracted."""

    bits: int  # of one integer
    axis: int  # neighbours along this axis share a word
    places: tuple[int, ...]  # of neighbours 0, 1, ...: place p begins at bit p * bits of the word
    plus: int  # added to each stored integer first, modulo 2**bits
    columns: int  # words in a row of the file


class StoredTensor(NamedTuple):
    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str  # as the file spells it: "BF16"
    offset: int  # bytes from the start of the file
    words: Words | None = None  # if integers are packed; shape and dtype (I8) are of the integers
    parts: "tuple[StoredTensor, ...]" = ()  # the tensors in the files, if its rows are in several
    added: Any = None  # what an adapter adds to its rows: a function of the first and the last


Tensors = dict[str, StoredTensor]  # by published name


def open_tensors(directory: str | Path) -> Tensors:
    """Returns the stored tensors by published name, of the files that the index names if there is
    one; else of model.safetensors; else of every *.safetensors."""
    directory = Path(directory)
    index = _read_index(directory) if is_there(directory / INDEX) else {}
    if not index and is_there(directory / SINGLE):
        return read_header(directory / SINGLE)
    files = sorted(directory.glob("*.safetensors"))
    files = [f for f in files if not f.name.startswith("consolidated")]  # for the authors' own code
    if not (files := [directory / file for file in dict.fromkeys(index.values())] or files):
        pickles = sorted(f.name for f in directory.glob("*") if f.suffix in (".bin", ".pth", ".pt"))
        only = f", only {pickles[0]} (pickles can run code and are never opened)" if pickles else ""
        raise FileNotFoundError(f"{directory} has no model*.safetensors{only}; download these")
    tensors: Tensors = {}
    for file in files:
        for name, tensor in read_header(file).items():
            if (other := tensors.setdefault(name, tensor)) is not tensor:
                raise ValueError(f"{file}: {name} is stored in {other.file.name} as well")
    for name, file_name in index.items():
        if name not in tensors or tensors[name].file != directory / file_name:
            what = f"lacks {name}, which {INDEX} says it holds; download both again"
            raise ValueError(f"{directory / file_name} {what}")
    return tensors


def _read_index(directory: Path) -> dict[str, str]:
    """Returns the file of each tensor. ValueError if a model.safetensors that the index does not
    name, which is another checkpoint, is beside it."""
    files = read_json(directory / INDEX).get("weight_map")
    if not isinstance(files, dict) or {type(file) for file in files.values()} != {str}:
        raise ValueError(f"{directory / INDEX} has no weight_map from tensor names to file names")
    if SINGLE not in files.values() and is_there(directory / SINGLE):
        what = f"two checkpoints, {SINGLE} and the files of {INDEX}: move one away"
        raise ValueError(f"{directory} holds {what}")
    example = {file: name for name, file in files.items()}
    missing = [file for file in example if not (directory / file).exists()]
    if missing:
        more = f", like {len(missing) - 1} other files" * (len(missing) > 1)
        what = f"is missing{more}; {INDEX} says it holds {example[missing[0]]}"
        raise FileNotFoundError(f"{directory / missing[0]} {what}")
    return files


def read_header(file: Path) -> Tensors:
    """Returns the tensors of one safetensors file. ValueError if it is damaged or cut short."""
    with open(file, "rb") as f:
        if (length := f.read(8)) == b"version ":
            raise ValueError(f"{file} is not here, only Git LFS's note of it: run git lfs pull")
        try:
            with safe_open(file, "np"):  # checks the whole header, and the size of the file
                entries = json.loads(f.read(int.from_bytes(length, "little")))
        except SafetensorError as error:
            what = f"is damaged or cut short ({error}); download it again"
            raise ValueError(f"{file} {what}") from None
        start = f.tell()  # of the data, behind the header
    entries.pop("__metadata__", None)
    return {
        name: StoredTensor(file, name, (*x["shape"],), x["dtype"], start + x["data_offsets"][0])
        for name, x in entries.items()
    }

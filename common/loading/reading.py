"""Reads parts of stored tensors, in chunks of whole rows. Checks that the numbers of each chunk are
finite, reorders and casts them.

Files are read, not memory-mapped: if a mapped file is cut short, the process is killed. Rows are
read whole even if only some columns are needed, because storage reads through a gap of a few
kilobytes faster than it seeks over it.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from common.loading.stored import DTYPES, StoredTensor, Words
from common.names import Axes, Order, Transform

READ_BYTES = 1 << 20  # per read; a chunk of this size is still in the CPU's cache when it is cast

Part = tuple[tuple[int, int], ...]  # (start, stop) along each axis of an array
Limits = tuple[int, int]  # the least bits that are not finite, read as signed and unsigned integers

# NaN and infinity have the largest bits: positive ones as signed integers, negative ones as
# unsigned integers. So two maxima find them, as fast as memory is read. F8_E4M3 has no infinity.
LIMITS: dict[str, Limits] = dict(
    F32=(0x7F800000, 0xFF800000), BF16=(0x7F80, 0xFF80), F16=(0x7C00, 0xFC00), F8_E4M3=(0x7F, 0xFF)
)
EXPONENTS: Limits = (256, 255)  # for the scales of 4-bit weights, which are unsigned


class Span(NamedTuple):
    """`length` stored elements: those from `start` on go to the positions from `to` on."""

    to: int
    start: int
    length: int


def limits_of(path: str, dtype: str) -> Limits | None:
    """Returns the limits of a weight that is stored in `dtype`; None if all bits are finite."""
    return EXPONENTS if dtype == "U8" and path.endswith(".scale") else LIMITS.get(dtype)


def check_finite(tensor: StoredTensor, numbers: np.ndarray, limits: Limits) -> None:
    """ValueError if `numbers`, a contiguous part of a stored tensor, hold NaN or infinity."""
    signed, unsigned = (numbers.view(f"{kind}{numbers.itemsize}").max() for kind in "iu")
    if signed >= limits[0] or unsigned >= limits[1]:
        what = "NaN or infinity; download it again, or run it as it is with --allow-nonfinite"
        raise ValueError(f"{tensor.file}: {tensor.name} holds {what}")


def is_swapped(transform: Transform) -> bool:
    return transform is Axes.SWAPPED or (isinstance(transform, Order) and transform.swapped)


def stored_shape(shape: tuple[int, ...], transform: Transform) -> tuple[int, ...]:
    """Returns the shape that the stored tensor of an array must have."""
    return (*shape[:-2], shape[-1], shape[-2]) if is_swapped(transform) else shape


def positions(stored: int, padded: int, order: Order | None) -> np.ndarray:
    """Returns the stored position of each element of a padded axis; -2 where it is zero."""
    if order is None:
        source = np.arange(max(stored, padded))
        return np.where(source < stored, source, -2)
    blocks = np.array(order.blocks)[:, None]
    return np.where(blocks < 0, -2, blocks * order.size + np.arange(order.size)).ravel()


def spans(stored: int, padded: int, part: tuple[int, int], order: Order | None) -> list[Span]:
    """Returns the stored elements that fill a part of one padded axis; the rest is zeros."""
    source = positions(stored, padded, order)
    if len(source) != padded or source.max() >= stored:
        raise ValueError(f"{order} cannot lay {stored} stored elements out as {padded}")
    source = source[slice(*part)]
    starts = np.flatnonzero(np.diff(source, prepend=-2) != 1)
    lengths = np.diff(starts, append=len(source))
    found = (Span(int(i), int(source[i]), int(n)) for i, n in zip(starts, lengths, strict=True))
    return [span for span in found if span.start >= 0]


def read_tensor(
    tensor: StoredTensor,
    transform: Transform,
    padded: tuple[int, ...],
    part: Part,
    out: np.ndarray,
    limits: Limits | None = None,
) -> None:
    """Fills `out` with part of a padded, reordered tensor. ValueError if `limits` are reached."""
    axes = stored_shape(tuple(range(len(padded))), transform)  # of the array, in stored order
    out = out.transpose(axes)
    orders = {transform.axis: transform} if isinstance(transform, Order) else {}
    rows, *columns = (
        spans(n, padded[axis], part[axis], orders.get(axis))
        for n, axis in zip(tensor.shape, axes, strict=True)
    )
    kind = DTYPES["F32" if tensor.added else tensor.dtype]  # an adapter adds in float32
    same_rows = (out.shape[1:], out.dtype) == (tensor.shape[1:], kind)
    is_whole = columns == [[Span(0, 0, n)] for n in tensor.shape[1:]]
    in_place = same_rows and is_whole and out.flags.c_contiguous  # no cast needed
    for stored, some in stored_rows(tensor, rows):
        for to, chunk in chunks(stored, some, out if in_place else None):
            if limits is not None:
                check_finite(stored, chunk, LIMITS["F32"] if stored.added else limits)
            if in_place:
                continue
            for pieces in itertools.product(*columns):
                there = (slice(p.to, p.to + p.length) for p in pieces)
                here = (slice(p.start, p.start + p.length) for p in pieces)
                out[to : to + len(chunk), *there] = chunk[:, *here]


def stored_rows(
    tensor: StoredTensor, rows: Sequence[Span]
) -> Iterator[tuple[StoredTensor, Sequence[Span]]]:
    """Yields the tensors that hold the rows, each with the spans that it fills."""
    first = 0
    for part in tensor.parts or (tensor,):
        last = first + part.shape[0]
        cut = [(to - start, max(start, first), min(start + n, last)) for to, start, n in rows]
        found = [Span(by + i, i - first, stop - i) for by, i, stop in cut if i < stop]
        yield part._replace(shape=(part.shape[0], *tensor.shape[1:])), found
        first = last


def chunks(
    tensor: StoredTensor, rows: Sequence[Span], out: np.ndarray | None = None
) -> Iterator[tuple[int, np.ndarray]]:
    """Reads rows, about READ_BYTES at a time. Yields each chunk and the position that it goes to.
    Each is read into its place in `out`, or into an array that the next one overwrites."""
    shape, dtype = tensor.shape[1:], DTYPES["F32" if tensor.added else tensor.dtype]
    step = max(1, READ_BYTES // (math.prod(shape) * dtype.itemsize))
    scratch = np.empty((step, *shape), dtype)
    with open(tensor.file, "rb", buffering=0) as f:
        for to, start, length in rows:
            for i in range(0, length, step):
                chunk = (scratch if out is None else out[to + i :])[: min(step, length - i)]
                read_rows(f, tensor, start + i, chunk)
                yield to + i, chunk


def read_rows(file: Any, tensor: StoredTensor, start: int, out: np.ndarray) -> None:
    """Fills `out` with rows of a tensor, from `start` on."""
    if (words := tensor.words) is None:
        stored = np.empty(out.shape, DTYPES[tensor.dtype]) if tensor.added else out
        read_into(file, tensor.offset + start * (stored.nbytes // len(stored)), stored)
        if tensor.added:
            with np.errstate(all="ignore"):  # `check_finite` comes later
                np.add(stored, tensor.added(start, start + len(out)), out=out)
        return
    per_word = len(words.places) if words.axis == 0 else 1  # rows
    first, last = start // per_word, -(-(start + len(out)) // per_word)
    stored = np.empty((last - first, words.columns), np.int32)
    read_into(file, tensor.offset + first * words.columns * stored.itemsize, stored)
    numbers = unpack(stored, words)[start - first * per_word :]
    out[:] = numbers[: len(out), : out.shape[1]]


def unpack(stored: np.ndarray, words: Words) -> np.ndarray:
    """Returns the int8 numbers that are packed in words [rows, columns]."""
    rows, columns = stored.shape
    octets = stored.astype("<i4", copy=False).view(np.uint8).reshape(rows, columns, 4)
    n, mask, half = len(words.places), (1 << words.bits) - 1, 1 << (words.bits - 1)
    numbers = np.empty((rows, n, columns) if words.axis == 0 else (rows, columns, n), np.uint8)
    for into, place in zip(np.moveaxis(numbers, words.axis + 1, 0), words.places, strict=True):
        octet, shift = divmod(place * words.bits, 8)
        number = ((octets[..., octet] >> shift) + np.uint8(words.plus)) & np.uint8(mask)
        np.subtract(number, np.uint8(half), out=into)  # wraps around, to the bits of an int8
    return numbers.reshape((-1, columns) if words.axis == 0 else (rows, -1)).view(np.int8)


def read_into(file: Any, offset: int, out: np.ndarray) -> None:
    file.seek(offset)
    buffer = out.reshape(-1).view(np.uint8).data
    while buffer.nbytes:  # one call reads 2 GB at most
        if not (count := file.readinto(buffer)):
            raise ValueError(f"{file.name} became shorter while it was read")
        buffer = buffer[count:]

"""Reads parts of stored tensors, in chunks of whole rows, and reorders and casts each chunk.

Files are read, not memory-mapped: if a mapped file is cut short, the process is killed. Rows are
read whole even if only some columns are needed, because storage reads through a gap of a few
kilobytes faster than it seeks over it.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from common.loading.finite import Limits, check_finite
from common.loading.stored import DTYPES, StoredTensor, Words
from common.names import Axes, Order, Transform

READ_BYTES = 1 << 20  # per read; a chunk of this size is still in the CPU's cache when it is cast

Part = tuple[tuple[int, int], ...]  # (start, stop) along each axis of an array


class Span(NamedTuple):
    """`length` stored elements: those from `start` on go to the positions from `to` on."""

    to: int
    start: int
    length: int


def is_swapped(transform: Transform) -> bool:
    return transform is Axes.SWAPPED or (isinstance(transform, Order) and transform.swapped)


def swapped(axes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Swaps the last two entries."""
    return (*axes[:-2], axes[-1], axes[-2])


def stored_shape(shape: tuple[int, ...], transform: Transform) -> tuple[int, ...]:
    """Returns the shape that the stored tensor of an array must have."""
    if isinstance(transform, Order) and transform.stored is not None:
        extent = transform.stored * transform.size
        shape = (*shape[: transform.axis], extent, *shape[transform.axis + 1 :])
    return swapped(shape) if is_swapped(transform) else shape


def spans(stored: int, padded: int, part: tuple[int, int], order: Order | None) -> list[Span]:
    """Returns the stored elements that fill a part of one padded axis; the rest is zeros."""
    source = np.arange(max(stored, padded))
    source[stored:] = -2  # zeros; not -1, because 0 would seem to continue it
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


def read_tensor(
    tensor: StoredTensor,
    transform: Transform,
    padded: tuple[int, ...],
    part: Part,
    out: np.ndarray,
    limits: Limits = (),
) -> None:
    """Fills `out` with one part of a padded and reordered tensor. ValueError if numbers are NaN or
    infinite, by `limits`."""
    axes = tuple(range(len(padded)))
    if is_swapped(transform):
        out, padded, part, axes = out.swapaxes(-1, -2), *map(swapped, (padded, part, axes))
    order = transform if isinstance(transform, Order) else None
    rows, *columns = (
        spans(n, m, p, order if order is not None and order.axis == axis else None)
        for n, m, p, axis in zip(tensor.shape, padded, part, axes, strict=True)
    )
    for piece, some in pieces(tensor, rows):
        read_spans(piece, some, columns, out, limits)


def pieces(
    tensor: StoredTensor, rows: Sequence[Span]
) -> Iterator[tuple[StoredTensor, Sequence[Span]]]:
    """Yields the one or two tensors that hold the rows, each with the spans that it fills. (The
    gate and up halves of a fused matrix may be two tensors: see `StoredTensor.below`.)"""
    if tensor.below is None:
        yield tensor, rows
        return
    first = tensor.shape[0] - tensor.below.shape[0]
    for part, start, stop in ((tensor, 0, first), (tensor.below, first, tensor.shape[0])):
        found = []
        for to, at, length in rows:
            low, high = max(at, start), min(at + length, stop)
            if low < high:
                found.append(Span(to + low - at, low - start, high - low))
        yield part._replace(shape=(stop - start, *tensor.shape[1:]), below=None), found


def read_spans(
    tensor: StoredTensor,
    rows: Sequence[Span],
    columns: Sequence[list[Span]],
    out: np.ndarray,
    limits: Limits,
) -> None:
    """Reads some rows of a tensor, and fills `out` with some of their columns."""
    dtype = DTYPES[tensor.dtype]
    row_bytes = math.prod(tensor.shape[1:]) * dtype.itemsize
    is_whole = list(columns) == [[Span(0, 0, n)] for n in tensor.shape[1:]] and tensor.words is None
    same_rows = (out.shape[1:], out.dtype) == (tensor.shape[1:], dtype)
    if is_whole and same_rows and out.flags.c_contiguous:  # no chunk and no cast needed
        for piece in read_rows(tensor, rows, row_bytes, out):
            check_finite(tensor, piece, limits)  # while it is in the CPU's cache
        return
    step = max(1, READ_BYTES // row_bytes)
    scratch = np.empty((step, *tensor.shape[1:]), dtype)
    with open(tensor.file, "rb") as f:
        for to, start, length in rows:
            for i in range(0, length, step):
                chunk = scratch[: min(step, length - i)]
                if tensor.words is not None:
                    chunk = read_words(f, tensor, tensor.words, start + i, len(chunk))
                else:
                    read_into(f, tensor.offset + (start + i) * row_bytes, chunk)
                check_finite(tensor, chunk, limits)
                into = out[to + i : to + i + len(chunk)]
                for pieces in itertools.product(*columns):
                    there = (slice(p.to, p.to + p.length) for p in pieces)
                    here = (slice(p.start, p.start + p.length) for p in pieces)
                    into[:, *there] = chunk[:, *here]


def read_words(
    file: Any, tensor: StoredTensor, words: Words, start: int, length: int
) -> np.ndarray:
    """Reads rows of a tensor whose numbers are packed: int8 [length, columns]."""
    per_row = len(words.places) if words.axis == 0 else 1
    first, last = start // per_row, -(-(start + length) // per_row)
    shape = (last - first, *words.of(tensor.shape)[1:])
    stored = np.empty(shape, np.int32)
    read_into(file, tensor.offset + first * math.prod(shape[1:]) * stored.itemsize, stored)
    start -= first * per_row
    return unpack(stored, words)[start : start + length, : tensor.shape[1]]


def unpack(stored: np.ndarray, words: Words) -> np.ndarray:
    """Returns the int8 numbers that are packed in words [rows, columns]."""
    rows, columns = stored.shape
    octets = stored.astype("<i4", copy=False).view(np.uint8).reshape(rows, columns, 4)
    n, mask = len(words.places), (1 << words.bits) - 1
    numbers = np.empty((rows, n, columns) if words.axis == 0 else (rows, columns, n), np.int8)
    for i, place in enumerate(words.places):
        octet, shift = divmod(place * words.bits, 8)
        number = ((octets[..., octet] >> shift) + np.uint8(words.plus)) & np.uint8(mask)
        number = number.view(np.int8) if words.bits == 8 else number.astype(np.int8)
        # In 8 bits this wraps around, as it should.
        into = numbers[:, i] if words.axis == 0 else numbers[..., i]
        np.subtract(number, np.int8(-128 if words.bits == 8 else 8), out=into)
    return numbers.reshape(-1, columns) if words.axis == 0 else numbers.reshape(rows, -1)


def read_numbers(tensor: StoredTensor) -> np.ndarray:
    """Reads a whole tensor of whole numbers."""
    with open(tensor.file, "rb") as f:
        if tensor.words is not None:
            return read_words(f, tensor, tensor.words, 0, tensor.shape[0])
        numbers = np.empty(tensor.shape, DTYPES[tensor.dtype])
        read_into(f, tensor.offset, numbers)
    return numbers


def read_rows(
    tensor: StoredTensor, rows: Sequence[Span], row_bytes: int, out: np.ndarray
) -> Iterator[np.ndarray]:
    """Reads whole rows into their places in `out`, and yields each piece that it has read."""
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

"""The forms in which a matrix is stored: plain, transposed, in 8 or in 4 bits.

Only the functions of `common.products` and, for stacks of expert matrices, `ragged_dot` ask how a
matrix is stored. Models call them and never branch. Matrices are [out, in], as published.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from common.sharding import P

FP8_BLOCK = 128  # rows and columns of a published fp8 matrix that share a scale
MXFP4_GROUP = 32  # neighbours in a row that share a scale
# The scales that are tried map the largest number of a group to -9, -8.75, ..., -6. These are the
# first value, the step, and how many.
STEPS = (-9.0, 0.25, 13)


class Rowwise(NamedTuple):
    """values * scale. There is one scale for each output channel and each shard of the input, so
    each device can quantise its own part of a matrix; it sees scale [1, out]."""

    values: Array  # int8 or float8_e4m3fn [.., out, in]
    scale: Array  # float32 [.., shards of in, out]


class Transposed(NamedTuple):
    """A matrix [out, in] that is stored as [in, out]."""

    values: Array


class Fp8(NamedTuple):
    """Matrices in 8-bit floats. Each block of 128 by 128, counted from the top left, has a scale;
    the last block of a row or column may be partial."""

    values: Array  # float8_e4m3fn [.., out, in]
    scale: Array  # float32 [.., ceil(out / 128), ceil(in / 128)], which multiplies


class Mxfp4(NamedTuple):
    """Matrices in 4-bit floats, of which 32 neighbours in a row share a scale.

    A 4-bit code has a sign, two bits of exponent and one of mantissa. A byte holds two neighbours,
    the first one in its low bits. A scale is the exponent of a power of two, plus 127.
    """

    values: Array  # uint8 [.., out, in / 2]
    scale: Array  # uint8 [.., out, in / 32]


class Grouped(NamedTuple):
    """(values - zero) * scale. Neighbours in a row share a scale and a zero point, in groups of
    equal size. A matrix [out, in] is stored as [in, out], so a scale is multiplied by whole vectors
    of a TPU."""

    values: Array  # int4 or int8 [.., in, out]
    scale: Array  # a float [.., groups of in, out]
    zero: Array | None = None  # int8 [.., groups of in, out]; None: all are 0


class Packed(NamedTuple):
    """How others quantised a matrix that a file holds: a form, and what its arrays depend on."""

    form: type  # Rowwise or Grouped
    dtype: DTypeLike  # of the values
    scales: int  # in a row
    zero: bool = False  # whether there are zero points
    scale_dtype: DTypeLike = jnp.float32


# A matrix, or a stack of matrices, in one of these forms.
Matrix = Array | Rowwise | Transposed | Fp8 | Mxfp4 | Grouped


class Storage(NamedTuple):
    """A way to store matrices that a user chooses when they are loaded."""

    name: str
    # From one device's part of [.., out, in], and the dtype of the model.
    convert: Callable[[Array, DTypeLike], Matrix]
    specs: Callable[[PartitionSpec], Any]  # of the arrays, from the spec of [.., out, in]
    kinds: tuple[str, ...]  # the kinds of weights that it applies to; see `Weight`
    bytes: float | None = None  # of one number, without scales; None: those of the model's dtype
    requantizes: tuple[type, ...] = ()  # published forms that it replaces
    rest: Any = None  # the Storage of the other kinds; None: they stay as they are


def quantize_rows(x: Array) -> tuple[Array, Array]:
    """Symmetric int8 along the last axis: values of x's shape, float32 scales without that axis."""
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / 127.0
    # A row of zeros stays a row of zeros.
    inverse = jnp.where(scale > 0, 1.0 / jnp.where(scale > 0, scale, 1.0), 0.0)
    return jnp.round(x * inverse[..., None]).astype(jnp.int8), scale


def quantize_weight(w: Array, dtype: DTypeLike | None = None) -> Rowwise:
    """One device's part of matrices [.., out, in] as int8 with a scale per output channel."""
    values, scale = quantize_rows(w)
    return Rowwise(values, scale[..., None, :])


def quantize_groups(
    w: Array, dtype: DTypeLike | None = None, group: int = 64, kept: DTypeLike = jnp.int4
) -> Grouped:
    """One device's part of matrices [.., out, in] as 4-bit integers, whose dtype is `kept`, with a
    bfloat16 scale for each group of at most `group` neighbours in a row. The groups are equal.

    A scale that cuts off the largest number of a group a little makes all others finer. So several
    scales are tried, and the one with the smallest sum of squared errors is kept. An error of a
    large number counts more, because large weights tend to multiply large activations. The integers
    go from -8 to 7, so a scale is negative if the largest number is positive.
    """
    *lead, n_out, n_in = w.shape
    groups = next(n for n in range(-(-n_in // group), n_in + 1) if n_in % n == 0)

    def matrix(w: Array) -> Grouped:
        w = w.astype(jnp.float32).swapaxes(-1, -2).reshape(groups, n_in // groups, n_out)
        largest = jnp.take_along_axis(w, jnp.argmax(jnp.abs(w), 1, keepdims=True), 1)
        square = jnp.square(w)
        counts = jnp.sqrt(square + square.mean(1, keepdims=True))  # what an error counts

        def rounded(scale: Array) -> Array:
            safe = jnp.where(scale == 0, 1, scale)
            return jnp.where(scale == 0, 0, jnp.clip(jnp.round(w / safe), -8, 7))

        def attempt(i: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
            q = rounded(largest / (STEPS[0] + i * STEPS[1]))
            # The best scale for these integers, as it will be stored.
            norm = (counts * q * q).sum(1, keepdims=True)
            scale = (counts * w * q).sum(1, keepdims=True) / jnp.where(norm == 0, 1, norm)
            scale = scale.astype(jnp.bfloat16).astype(jnp.float32)
            error = jnp.square(rounded(scale) * scale - w)
            error = (counts * error).sum(1, keepdims=True)
            return jnp.minimum(error, best[0]), jnp.where(error < best[0], scale, best[1])

        worst = jnp.full_like(largest, jnp.inf), jnp.zeros_like(largest)
        scale = lax.fori_loop(0, STEPS[2], attempt, worst)[1]
        values = rounded(scale).reshape(n_in, n_out).astype(kept)
        return Grouped(values, scale[:, 0].astype(jnp.bfloat16))

    # One matrix after the other, so the temporary arrays are those of one.
    parts = lax.map(matrix, w.reshape(-1, n_out, n_in))
    return jax.tree.map(lambda a: a.reshape(*lead, *a.shape[1:]), parts)


def swapped(spec: PartitionSpec) -> Any:
    """The spec of [.., in, out], from that of [.., out, in]."""
    *lead, out_axis, in_axis = spec
    return P(*lead, in_axis, out_axis)


Shape = tuple[int, ...]


def published_shapes(form: type | Packed, shape: Shape) -> tuple[tuple[Shape, Any] | None, ...]:
    """The arrays of published matrices [.., out, in]: shape and dtype (None: the model's)."""
    *lead, rows, columns = shape
    if form is Transposed:
        return (((*lead, columns, rows), None),)
    if form is Fp8:
        blocks = (*lead, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        return (shape, jnp.float8_e4m3fn), (blocks, jnp.float32)
    if form is Mxfp4:
        if columns % MXFP4_GROUP:
            what = f"rows of {columns} are not whole groups of {MXFP4_GROUP} 4-bit weights"
            raise ValueError(f"config.json: {what}")
        values, scale = ((*lead, rows, columns // n) for n in (2, MXFP4_GROUP))
        return (values, jnp.uint8), (scale, jnp.uint8)
    assert isinstance(form, Packed)
    scale = (*lead, form.scales, rows)
    if form.form is Rowwise:
        return (shape, form.dtype), (scale, form.scale_dtype)
    values = (*lead, columns, rows)
    zero = (scale, jnp.int8) if form.zero else None
    return (values, form.dtype), (scale, form.scale_dtype), zero


# Rows and columns of a published matrix that share a scale.
BLOCKS: dict[type | None, tuple[int, int]] = {Fp8: (FP8_BLOCK, FP8_BLOCK), Mxfp4: (1, MXFP4_GROUP)}
# The specs of a stored matrix's arrays, from the spec of the matrix [.., out, in].
SPECS: dict[type, Callable[[PartitionSpec], Any]] = {
    Rowwise: lambda spec: Rowwise(P(*spec), swapped(spec)),  # a scale is [.., in, out]
    Transposed: lambda spec: Transposed(swapped(spec)),
    Fp8: lambda spec: Fp8(P(*spec), P(*spec)),
    Mxfp4: lambda spec: Mxfp4(P(*spec), P(*spec)),
    Grouped: lambda spec: Grouped(*[swapped(spec)] * 3),
}


def bits_of(dtype: DTypeLike) -> int:
    """How many bits a number takes in memory. `itemsize` is a whole byte even for int4."""
    return 4 if dtype == jnp.int4 else 8 * jnp.dtype(dtype).itemsize


def is_stored(w: Any) -> bool:
    """Whether a matrix has one of these forms, and is not a plain array."""
    return type(w) in SPECS


KINDS = ("matrix", "table", "headwise", "stack")
INT8 = Storage("int8", quantize_weight, SPECS[Rowwise], KINDS, 1, (Fp8, Rowwise))
# XLA on CPU multiplies a few rows of float32 by a transposed matrix 1.4 times as fast.
turn: Any = lambda w, dtype: Transposed(w.astype(dtype).swapaxes(-1, -2))
TRANSPOSED = Storage("transposed", turn, SPECS[Transposed], ("matrix", "table"))
INT4_GROUP = 64


@cache
def int4(group: int, on_cpu: bool) -> Storage:
    """4 bits for matrices and stacks, int8 for the rest. On CPU the integers are kept in int8,
    because XLA there takes a byte for each anyway."""
    kept = jnp.int8 if on_cpu else jnp.int4
    convert = partial(quantize_groups, group=group, kept=kept)
    kinds, size = ("matrix", "stack"), 1 if on_cpu else 0.5
    return Storage("int4", convert, SPECS[Grouped], kinds, size, (Fp8, Rowwise), INT8)


def storage_named(name: str | None, on_cpu: bool = False) -> Storage | None:
    """The storage that `--quant` names: "int8", "int4" with groups of 64, or "int4:32" with groups
    of another size. ValueError for any other name."""
    if name is None:
        return None
    if name == "int8":
        return INT8
    kind, colon, group = name.partition(":")
    group = group if colon else str(INT4_GROUP)
    if kind != "int4" or not group.isdecimal() or int(group) < 2:
        raise ValueError(f"quant {name!r} is not one of int8, int4 and int4:GROUP")
    return int4(int(group), on_cpu)


def out_features(w: Matrix) -> int:
    """The number of rows of a matrix [out, in], or of each of a stack."""
    return int(jax.tree.leaves(w)[0].shape[-1 if isinstance(w, Transposed | Grouped) else -2])


def dequantize_fp8(w: Fp8) -> Array:
    """The float32 matrices [.., out, in]."""
    *lead, rows, columns = w.values.shape
    # Scales are repeated along columns alone, and blocks of rows get an axis of their own, so a TPU
    # multiplies while it reads. If they were repeated along both, they would become an array in
    # memory of four times the size of the matrix.
    scale = w.scale.repeat(FP8_BLOCK, -1)[..., :columns]
    values = jnp.pad(w.values, (*[(0, 0)] * len(lead), (0, -rows % FP8_BLOCK), (0, 0)))
    blocks = values.reshape(*lead, -1, FP8_BLOCK, columns).astype(jnp.float32)
    return (blocks * scale[..., None, :]).reshape(*lead, -1, columns)[..., :rows, :]


def dequantize_mxfp4(w: Mxfp4) -> Array:
    """The float32 matrices [.., out, in]."""
    *lead, groups = w.scale.shape
    byte = w.values.astype(jnp.int32).reshape(*lead, groups, MXFP4_GROUP // 2, 1)
    codes = (byte >> jnp.array([0, 4])) & 15
    return (e2m1(codes) * e8m0(w.scale)[..., None, None]).reshape(*lead, -1)


def dequantize_groups(w: Grouped) -> Array:
    """The float32 matrices, transposed: [.., in, out]."""
    *lead, groups, n_out = w.scale.shape
    values = w.values.astype(jnp.float32).reshape(*lead, groups, -1, n_out)
    if w.zero is not None:
        values = values - w.zero[..., None, :]
    return (values * w.scale[..., None, :]).reshape(w.values.shape)


def dequantize(w: Array | Transposed | Fp8 | Rowwise) -> Array:
    """The matrices [.., out, in] of one device's part: in float32, or plain ones as they are."""
    if isinstance(w, Transposed):
        return w.values.swapaxes(-1, -2)
    if isinstance(w, Fp8):
        return dequantize_fp8(w)
    if isinstance(w, Rowwise):
        return w.values.astype(jnp.float32) * w.scale.swapaxes(-1, -2)
    return w


def zero_sums(x: Array, scale: Array, zero: Array) -> tuple[Array, Array]:
    """What zero points subtract from x [rows, in] times a matrix is the product of two small
    arrays: the sums of x over each group [rows, groups], and zero * scale [.., groups, out]."""
    groups = scale.shape[-2]
    # A product with ones and zeros, because sums along parts of rows are slow on TPU: compiled for
    # v5e, 100,000 cycles for 512 rows of 5,120 bfloat16 numbers, and the product 5,400.
    mine = jnp.arange(x.shape[1])[:, None] // (x.shape[1] // groups) == jnp.arange(groups)
    exact: Any = dict(precision="highest", preferred_element_type=jnp.float32)
    return jnp.dot(x, mine.astype(x.dtype), **exact), zero * scale.astype(jnp.float32)


def e2m1(code: Array) -> Array:
    """float32 of 4-bit floats, given as int32 in 0 .. 15."""
    # The eight magnitudes are 0, 1/2, 1, 3/2, 2, 3, 4 and 6: half of these hexadecimal digits.
    doubled = (jnp.uint32(0xC8643210) >> (4 * (code & 7)).astype(jnp.uint32)) & 15
    return jnp.where(code < 8, 0.5, -0.5) * doubled.astype(jnp.int32).astype(jnp.float32)


def e8m0(exponent: Array) -> Array:
    """float32 powers of two of uint8 exponents in 1 .. 254; 0 gives 0 and 255 infinity."""
    return lax.bitcast_convert_type(exponent.astype(jnp.int32) << 23, jnp.float32)

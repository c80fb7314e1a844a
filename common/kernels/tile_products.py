"""x [rows, I] times a tile [columns, I] of a matrix, on TPU, in each form that `ragged_dot` takes.

Narrow weights are widened where they are multiplied, never in memory: while a matrix unit takes in
weights, the other units have time. What is cheapest depends on the form and on the chip:

- Rowwise: the integers are converted. With few rows, a tpu7x transposes them while they are narrow.
- Fp8: matrix units multiply bfloat16 by 8-bit floats, and the scales multiply the products. With
  many rows, where a matrix unit is wider than a block, the scales multiply the weights.
- Grouped is stored as [I, O], so a scale is a row of vectors. With few rows, the integers are
  multiplied as they are, and the scales multiply the sums of the groups. A product takes 128
  columns of x, which may be several groups: then they are repeated, each time with zeros in all
  groups but one. With more rows, the scales multiply the weights.
- Mxfp4 holds two neighbours of a row in a byte. A tpu7x transposes the bytes, of which its 4-bit
  floats then are rows. For other chips, x is split into even and odd columns, and shifts make 8-bit
  floats of the 4-bit ones. With few rows, the scales multiply the sums of 8 groups, as in Grouped.
  With more rows, they multiply the weights.
"""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from common.quant import FP8_BLOCK, MXFP4_GROUP, Fp8, Grouped, Mxfp4, e8m0

LANES = 128
E5M2_BIAS = 14  # how much larger it is than that of 4-bit floats
AT_ONCE = 1024  # numbers of a column, or bytes of two, that are widened at a time
MXU = 256  # rows and columns of the widest matrix unit
FEW_ROWS = 64  # of x: with more, loading weights into a matrix unit is not what takes the time


def generation_of_chip() -> int:
    """Returns the generation of the TPU that a program is compiled for, such as 5; 0 if unknown."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    found = re.match(r"TPU ?v?(\d+)", device.device_kind)
    return int(found[1]) if found else 0


def multiply_tile(
    x: Any,
    w: Any,
    scale: Any,
    form: type,
    *,
    rows: int,
    repeats: int,
    block: Array,
    generation: int,
) -> Array:
    """Multiplies x by a tile: float32 [rows, columns]. Scales of Rowwise multiply it later.

    Args:
      x, w, scale: what a step sees; see `Operands`.
      form: how w is stored.
      rows: of x, without those that fill up 8.
      repeats: how often x is repeated, for Grouped; 0 if the scales multiply the weights.
      block: the number of the first block of rows of the matrix that w has, for Fp8.
      generation: that of the chip.
    """
    x_0, w_0, exact = x.at[0], w.at[0], scale is not None and scale.dtype != jnp.float32
    # TPUs multiply bfloat16 since the sixth generation. The product is that of float32, rounded.
    bfloat16 = exact and x.dtype == jnp.bfloat16 and generation > 5
    dtype = jnp.bfloat16 if bfloat16 else jnp.float32
    if form is Grouped and repeats:
        return _multiply_groups(x_0, w_0, scale.at[0], rows)
    if form is Grouped:
        return _multiply_widened(x_0, _parts_of_groups(w_0, scale.at[0]), dtype)
    if form is Mxfp4 and repeats and generation > 6:
        return _multiply_groups_of_fp4(x_0, w_0, scale.at[0], rows)
    if form is Mxfp4 and repeats:
        return _multiply_groups_of_planes(x, w_0, scale.at[0], rows)
    if form is Mxfp4 and generation > 6:
        return _multiply_widened(x_0, _parts_of_fp4(w_0, scale.at[0], AT_ONCE), dtype)
    if form is Mxfp4:
        return _multiply_mxfp4(x, w_0, scale.at[0], dtype)
    if form is Fp8 and generation > 5 and rows > FEW_ROWS:
        return multiply(x[0], _widened_fp8(w_0, scale.at[0], block, x.dtype, generation))
    if form is Fp8:
        return _multiply_fp8(x_0, w_0, scale.at[0], block)
    if jnp.issubdtype(w.dtype, jnp.floating):
        return multiply(x[0], _narrow(w[0], x.dtype))
    if generation > 6 and rows <= FEW_ROWS:
        return multiply(x[0], w[0].T.astype(x.dtype), 0)
    return multiply(x[0], w[0].astype(x.dtype))


def multiply(x: Array, w: Array, contract: int = 1) -> Array:
    """Multiplies x by w, whose axis `contract` is summed over, in float32. Matrix units multiply
    bfloat16 by 8-bit floats as they are."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dimensions = (((1,), (contract,)), ((), ()))
    return lax.dot_general(
        x, w, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def _narrow(w: Array, dtype: Any) -> Array:
    """Returns w as it is if matrix units multiply `dtype` by it, else in `dtype`."""
    return w if dtype == jnp.bfloat16 else w.astype(dtype)


def _multiply_fp8(x: Any, w: Any, scale: Any, first: Array) -> Array:
    """Multiplies x [rows, I] by w [columns, I], which begins with block `first` of a matrix. Each
    block has one of the scales [blocks, blocks], which multiplies the block's products. A product
    takes 128 columns of x, and so half of a wide matrix unit is idle."""
    products, (columns, n_in) = list[Array](), w.shape
    for n in range(0, columns, MXU):
        part, y = slice(n, min(n + MXU, columns)), jnp.zeros((), jnp.float32)
        rows = range(n // FP8_BLOCK, pl.cdiv(part.stop, FP8_BLOCK))
        # A last tile may reach past the end.
        blocks = [jnp.minimum(first + j, scale.shape[0] - 1) for j in rows]
        for k in range(0, n_in, FP8_BLOCK):
            at = slice(k, min(k + FP8_BLOCK, n_in))
            own = [jnp.full((1, FP8_BLOCK), scale[block, k // FP8_BLOCK]) for block in blocks]
            factor = jnp.concatenate(own, 1)[:, : part.stop - n]
            y = y + multiply(x[:, at], _narrow(w[part, at], x.dtype)) * factor
        products.append(y)
    return jnp.concatenate(products, 1)


def _widened_fp8(w: Any, scale: Any, first: Array, dtype: Any, generation: int) -> Array:
    """Multiplies w [columns, I] by its scales, in `dtype`."""
    widened, (columns, n_in) = list[Array](), w.shape
    for n in range(0, columns, FP8_BLOCK):
        block = jnp.minimum(first + n // FP8_BLOCK, scale.shape[0] - 1)
        parts = list[Array]()
        for k in range(0, n_in, FP8_BLOCK):
            part = w[n : min(n + FP8_BLOCK, columns), k : min(k + FP8_BLOCK, n_in)]
            factor = scale[block, k // FP8_BLOCK]
            if generation == 6:
                part, factor = _biased_by_11(part), factor * 16
            parts.append((part.astype(jnp.float32) * factor).astype(dtype))
        widened.append(jnp.concatenate(parts, 1))
    return jnp.concatenate(widened)


def _biased_by_11(w: Array) -> Array:
    """Returns w, of float8_e4m3fn, divided by 16: the same codes stand for that if the bias of the
    exponents is 11 and not 7. A v6e widens such floats by one instruction. The code of -0 is their
    NaN, so -0 becomes 0. The NaN of w becomes a number."""
    codes = pltpu.bitcast(w, jnp.uint8)
    codes = jnp.where(codes == 0x80, jnp.zeros_like(codes), codes)
    return pltpu.bitcast(codes, jnp.float8_e4m3b11fnuz)


def _multiply_groups(x: Any, w: Any, scale: Any, rows: int) -> Array:
    """Multiplies x [rows, I] by w [I, columns]: float32 [rows, columns]. The scales multiply sums
    of groups, and x has a multiple of 8 rows."""
    y = jnp.zeros((rows, w.shape[1]), jnp.float32)
    for at, some_scales in _steps(w, scale, LANES):
        x_at = _repeated(x[:, at], len(some_scales))
        y = _add_groups(y, x_at, w[at], some_scales.astype(jnp.float32), 0)
    return y


def _multiply_groups_of_fp4(x: Any, w: Any, scale: Any, rows: int) -> Array:
    """The same for w [columns, I / 2], on a tpu7x."""
    y = jnp.zeros((rows, w.shape[0]), jnp.float32)
    for at, codes, power in _parts_of_fp4(w, scale, LANES):
        x_at = _repeated(x[:, at], len(power))
        y = _add_groups(y, x_at, codes.astype(jnp.float8_e4m3fn), power, 0)
    return y


def _multiply_groups_of_planes(x: Any, w: Any, scale: Any, rows: int) -> Array:
    """The same for x [2, rows, I / 2] and w [columns, I / 2], on other chips."""
    (columns, n_bytes), group = w.shape, MXFP4_GROUP // 2
    parts = [slice(n, min(n + MXU, columns)) for n in range(0, columns, MXU)]
    power = [_e5m2_scales(scale[part]).T for part in parts]
    y = [jnp.zeros((rows, part.stop - part.start), jnp.float32) for part in parts]
    for k in range(0, n_bytes, LANES):
        at = slice(k, min(k + LANES, n_bytes))
        own = slice(at.start // group, at.stop // group)
        x_at = _repeated(jnp.concatenate([x[0, :, at], x[1, :, at]], 1), own.stop - own.start, 2)
        for i, part in enumerate(parts):
            wide = jnp.concatenate(_e5m2_planes(w[part, at]), 1)
            y[i] = _add_groups(y[i], x_at, wide, power[i][own], 1)
    return jnp.concatenate(y, 1)


def _add_groups(y: Array, x: Array, w: Array, scale: Array, contract: int) -> Array:
    """Adds x times w to y [rows, columns]. x is repeated for each group, so each has a row of sums,
    which its scale of [groups, columns] multiplies. The axis `contract` of w is summed over."""
    sums, n = multiply(x, _narrow(w, x.dtype), contract), len(x) // len(scale)
    for j in range(len(scale)):
        y = y + sums[j * n : j * n + len(y)] * scale[j : j + 1]
    return y


def _multiply_widened(x: Any, parts: Iterator[tuple[slice, Array, Array]], dtype: Any) -> Array:
    """Multiplies x [rows, I] by a matrix in float32, of which each part has some columns of x, a
    narrow matrix [these, columns], and the scales [groups, columns] that multiply it in `dtype`."""
    y = jnp.zeros((), jnp.float32)
    for at, w, scale in parts:
        wide = w.astype(dtype).reshape(scale.shape[0], -1, w.shape[1])
        wide = wide * scale.astype(dtype)[:, None]
        y = y + multiply(x[:, at], wide.reshape(w.shape).astype(x.dtype), 0)
    return y


def _parts_of_groups(w: Any, scale: Any) -> Iterator[tuple[slice, Array, Array]]:
    return ((at, w[at], some_scales) for at, some_scales in _steps(w, scale, AT_ONCE))


def _parts_of_fp4(w: Any, scale: Any, step: int) -> Iterator[tuple[slice, Array, Array]]:
    """Transposes w [columns, I / 2], `step` bytes of a row at a time, while a byte still holds two
    neighbours: they become rows."""
    power = e8m0(scale[...].astype(jnp.int32)).T
    for k in range(0, w.shape[1], step):
        end = min(k + step, w.shape[1])
        codes = pltpu.bitcast(w[:, k:end].T, jnp.float4_e2m1fn)
        some_powers = power[2 * k // MXFP4_GROUP : 2 * end // MXFP4_GROUP]
        yield slice(2 * k, 2 * end), codes, some_powers


def _repeated(x: Array, groups: int, planes: int = 1) -> Array:
    """Repeats x [n, columns] once for each group of columns, with zeros in all other groups. A
    group has as many columns of each plane."""
    if groups == 1:
        return x
    width = x.shape[1] // planes
    group = lax.broadcasted_iota(jnp.int32, x.shape, 1) % width // (width // groups)
    wide = x.astype(jnp.float32)
    repeats = [jnp.where(group == j, wide, 0) for j in range(groups)]
    return jnp.concatenate(repeats).astype(x.dtype)


def _steps(w: Any, scale: Any, least: int) -> Iterator[tuple[slice, Array]]:
    """Yields slices of I, of whole groups and about `least` numbers, with their scales [groups,
    columns]."""
    n_in, group = w.shape[0], w.shape[0] // scale.shape[0]
    step = pl.cdiv(least, group) * group
    for k in range(0, n_in, step):
        end = min(k + step, n_in)
        yield slice(k, end), scale[k // group : end // group]


def _multiply_mxfp4(x: Any, w: Any, scale: Any, dtype: Any) -> Array:
    """Multiplies x [2, rows, I / 2] by w [columns, I / 2]: float32 [rows, columns]. 16 bytes share
    one of the scales [columns, I / 32], which multiply in `dtype`."""
    products, (columns, n_bytes) = [], w.shape
    few = x.shape[1] <= FEW_ROWS or dtype == jnp.float32
    step = LANES if few else 2 * LANES
    for n in range(0, columns, MXU):
        rows_of_w = slice(n, min(n + MXU, columns))
        power = _e5m2_scales(scale[rows_of_w]).astype(jnp.bfloat16)
        y = jnp.zeros((x.shape[1], rows_of_w.stop - n), jnp.float32)
        for k in range(0, n_bytes, step):
            planes: tuple[list[Array], list[Array]] = [], []
            for i in range(k, min(k + step, n_bytes), LANES):
                bytes_at = w[rows_of_w, i : min(i + LANES, n_bytes)]
                spread = _spread(power, i // (MXFP4_GROUP // 2), bytes_at.shape).astype(dtype)
                for wide, plane in zip(planes, _e5m2_planes(bytes_at), strict=True):
                    wide.append((plane.astype(dtype) * spread).astype(x.dtype))
            for p, wide in enumerate(planes):
                at = slice(k, min(k + step, n_bytes))
                y = y + multiply(x[p, :, at], jnp.concatenate(wide, 1))
        products.append(y)
    return jnp.concatenate(products, 1)


def _e5m2_scales(exponents: Array) -> Array:
    """The scales that go with `_e5m2_planes`, in float32."""
    return e8m0(jnp.minimum(exponents.astype(jnp.int32) + E5M2_BIAS, 255))


def _e5m2_planes(codes: Array) -> tuple[Array, Array]:
    """Converts bytes of two 4-bit floats each to 8-bit floats, which are 2 ** -E5M2_BIAS times as
    large: the ones in the low bits, and those in the high bits. Both kinds have a sign, then the
    exponent, then the mantissa. Four bytes are shifted at a time. To add 0x70 carries a sign from
    bit 4 to bit 7."""
    word = pltpu.bitcast(codes, jnp.int32)
    low, high = (x & 0x1E1E1E1E for x in (word << 1, lax.shift_right_logical(word, 3)))
    planes = ((x + 0x70707070) & jnp.int32(-0x71717172) for x in (low, high))  # 0x8E in each byte
    even, odd = (pltpu.bitcast(x, jnp.float8_e5m2) for x in planes)
    return even, odd


def _spread(power: Array, first: int, shape: tuple[int, int]) -> Array:
    """Repeats columns first, first + 1, ... of power, each MXFP4_GROUP / 2 times. Two bfloat16
    numbers are moved as one word."""
    words = pltpu.bitcast(power, jnp.int32)
    lane = lax.broadcasted_iota(jnp.int32, (len(words), shape[1]), 1) // (MXFP4_GROUP // 2)
    vector = first // LANES * LANES
    source = words[:, vector : vector + LANES]
    index = lane + (first - vector)
    moved = jnp.take_along_axis(source, index, axis=1, mode="promise_in_bounds")
    return pltpu.bitcast(moved, power.dtype)

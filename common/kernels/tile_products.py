"""x [rows, I] times a tile [columns, I] of a matrix, on TPU, in each form that `ragged_dot` takes.

Narrow weights are widened where they are multiplied, never in memory: while a matrix unit takes in
weights, the other units have time. What is cheapest depends on the form and on the chip:

- Rowwise: the integers are converted. With few rows, a tpu7x transposes them while they are narrow.
- Fp8: matrix units multiply bfloat16 by 8-bit floats, and the scales multiply the products. With
  many rows, where a matrix unit is wider than a block, the scales multiply the weights.
- Grouped is stored as [I, O], so a scale is a row of vectors. A TPU repeats such a row while it
  loads it. With few rows, the integers are multiplied as they are, and the scales multiply the sums
  of the groups. A product takes 128 columns of x, which may be several groups: then they are
  repeated, each time with zeros in all groups but one. With more rows, the scales multiply the
  weights.
- Mxfp4 is in memory as [I, O], too, and is multiplied as Grouped is. A byte holds two neighbours of
  a column. A tpu7x has 4-bit floats, and with 16 rows it widens half of the columns. For other
  chips, x is split into even and odd columns, and shifts make 8-bit floats of the 4-bit ones.
"""

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from common.quant import FP8_BLOCK, Fp8, Grouped, Mxfp4, e8m0

LANES, SUBLANES = 128, 8
E5M2_BIAS = 14  # how much larger it is than that of 4-bit floats
AT_ONCE = 1024  # numbers of a column that are widened at a time
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
    interpret: bool,
) -> Array:
    """Multiplies x by a tile: float32 [rows, columns]. Scales of Rowwise multiply it later.

    Args:
      x, w, scale: what a step sees; see `Operands`. For groups, the scales are factors.
      form: how w is stored.
      rows: of x, without those that fill up 8.
      repeats: how often x is repeated, for groups; 0 if the scales multiply the weights.
      block: the number of the first block of rows of the matrix that w has, for Fp8.
      generation: that of the chip.
      interpret: whether there is no chip.
    """
    x_0, w_0 = x.at[0], w.at[0]
    if form in (Grouped, Mxfp4):
        summed, least = (w_0.shape[1], LANES) if repeats else (0, AT_ONCE)
        if repeats and form is Mxfp4 and generation == 6:
            least = MXU
        elif repeats and form is Mxfp4 and generation > 6 and rows > SUBLANES:
            # A matrix unit takes in wide weights while it multiplies many rows by narrow ones.
            summed = summed // (2 * MXU) * MXU or summed
        parts = _parts(x, w_0, scale.shape[0], least, generation)
        return _multiply_groups(parts, scale, rows, x.shape[0], summed, interpret)
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


def factor_dtype(x_dtype: Any, scale_dtype: Any, group: int, repeats: int, generation: int) -> Any:
    """Returns the dtype of factors: float32, or int32 if each is there twice, in bfloat16. TPUs
    multiply weights in bfloat16 since the sixth generation: the products of float32, rounded."""
    exact = scale_dtype != jnp.float32 and x_dtype == jnp.bfloat16
    twice = exact and not repeats and group % (2 * SUBLANES) == 0 and generation > 5
    return jnp.int32 if twice else jnp.float32


def store_factors(scale: Any, factors: Any, generation: int) -> None:
    """Writes the scales [groups, columns] in the form in which they multiply."""
    value = scale[...]
    if value.dtype == jnp.uint8:
        value = value.astype(jnp.int32)
        value = e8m0(value if generation > 6 else jnp.minimum(value + E5M2_BIAS, 255))
    value = value.astype(jnp.float32)
    if factors.dtype == jnp.int32:
        bits = pltpu.bitcast(value, jnp.int32)
        value = bits | lax.shift_right_logical(bits, 16)
    factors[...] = value


def _factor(factors: Any, group: int, interpret: bool) -> Array:
    """Returns the factors of a group: [8, columns] in float32 or [16, columns] in bfloat16, whose
    rows are the same. A TPU repeats a row while it loads it; interpreters know no such load."""
    row = factors[pl.ds(group, 1)] if interpret else factors[pl.ds(group, SUBLANES, stride=0)]
    row = jnp.broadcast_to(row, (SUBLANES, row.shape[1]))
    return row if row.dtype == jnp.float32 else pltpu.bitcast(row, jnp.bfloat16)


def _parts(
    x: Any, w: Any, groups: int, least: int, generation: int
) -> Iterator[tuple[Array, Array, range]]:
    """Yields parts of about `least` numbers of I: columns of x, a narrow matrix [these, columns],
    and the numbers of its groups. x is [P, rows, I / P], and w [I, columns], packed or not."""
    packed, group = w.dtype == jnp.uint8, w.shape[0] // groups
    step = pl.cdiv(least, group * (1 + packed)) * group
    for k in range(0, w.shape[0], step):
        end = min(k + step, w.shape[0])
        own, numbers = w[k:end], range(k // group, end // group)
        if not packed:
            yield x[0, :, k:end], own, numbers
        elif generation > 6:
            codes = pltpu.bitcast(own, jnp.float4_e2m1fn)
            yield x[0, :, 2 * k : 2 * end], codes.astype(jnp.float8_e4m3fn), numbers
        else:
            x_at = jnp.concatenate([x[0, :, k:end], x[1, :, k:end]], 1)
            yield x_at, jnp.concatenate(_e5m2_planes(own)), numbers


def _multiply_groups(
    parts: Any, factors: Any, rows: int, planes: int, summed: int, interpret: bool
) -> Array:
    """Multiplies x by each part: float32 [rows, columns]. In the first `summed` columns, x is a
    multiple of 8 rows and repeated for each group, so each has its own sums, which its factors
    multiply. In the others, they multiply the weights."""
    y = y_rest = jnp.zeros((), jnp.float32)
    for x, w, groups in parts:
        own = [_factor(factors, group, interpret) for group in groups]
        if summed:
            sums = multiply(_repeated(x, len(groups), planes), _narrow(w[:, :summed], x.dtype), 0)
            for of_group, factor in zip(jnp.split(sums, len(groups)), own, strict=True):
                times = len(of_group) // SUBLANES
                y = y + of_group * jnp.concatenate([factor[:, :summed]] * times)
        if summed < w.shape[1]:
            rest, factor = w[:, summed:], jnp.stack(own)[:, None, :, summed:]
            if summed:  # these are powers of two, which are exact in bfloat16
                factor = jnp.concatenate([factor, factor], 2).astype(x.dtype)
            wide = rest.astype(factor.dtype).reshape(planes, len(groups), -1, *factor.shape[2:])
            wide = (wide * factor).reshape(rest.shape).astype(x.dtype)
            y_rest = y_rest + multiply(x, wide, 0)
    return jnp.concatenate([half for half in (y, y_rest) if half.ndim], 1)[:rows]


def _repeated(x: Array, groups: int, planes: int = 1) -> Array:
    """Repeats x [n, columns] once for each group of columns, with zeros in all other groups. A
    group has as many columns of each plane."""
    if groups == 1:
        return x
    width = x.shape[1] // planes
    column = lax.rem(lax.broadcasted_iota(jnp.int32, x.shape, 1), width)
    group = lax.div(column, width // groups)
    wide = x.astype(jnp.float32)
    repeats = [jnp.where(group == j, wide, 0) for j in range(groups)]
    return jnp.concatenate(repeats).astype(x.dtype)


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

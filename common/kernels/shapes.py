"""Checks the shapes of attention's arrays, and groups the query rows that share a cache head."""

from numbers import Real
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array


def check_shapes(
    q_BTNH: Any,
    k_BKSH: Any,
    v_BKSH: Any,
    v_dim: int | None,
    lengths_B: Any,
    k_scale_BKS: Any = None,
    v_scale_BKS: Any = None,
    sinks_N: Any = None,
) -> None:
    """Raises ValueError for arrays (or their shapes) that no implementation of attention takes."""
    if (v_BKSH is None) == (v_dim is None):
        raise ValueError("give either v_BKSH or v_dim (how many columns of k_BKSH are the values)")
    for name, x in dict(q_BTNH=q_BTNH, k_BKSH=k_BKSH).items():
        if len(x.shape) != 4:
            raise ValueError(f"{name} has {len(x.shape)} axes, not 4")
    if 0 in (*q_BTNH.shape, *k_BKSH.shape):
        raise ValueError(f"q_BTNH {q_BTNH.shape} or k_BKSH {k_BKSH.shape} has an axis of length 0")
    (B, _, N, H), (K, S, W) = q_BTNH.shape, k_BKSH.shape[1:]
    if N % K:
        raise ValueError(f"{N} query heads cannot share {K} cache heads evenly")
    if v_dim is None and W != H:
        raise ValueError(f"queries have {H} columns and keys have {W}: these must be equal")
    if v_dim is not None and not (is_whole(v_dim) and 0 < v_dim <= W and H <= W):
        raise ValueError(f"cache rows of {W} columns cannot hold keys of {H} and values of {v_dim}")
    rows = B, K, S
    check_shape("k_BKSH", k_BKSH, (*rows, W))
    if v_BKSH is not None:
        check_shape("v_BKSH", v_BKSH, (*rows, v_BKSH.shape[-1]))
    check_shape("lengths_B", lengths_B, (B,))
    check_kind("lengths_B", lengths_B, jnp.integer)
    check_kind("q_BTNH", q_BTNH, jnp.floating)
    check_shape("k_scale_BKS", k_scale_BKS, rows)
    check_shape("v_scale_BKS", v_scale_BKS, rows)
    check_shape("sinks_N", sinks_N, (N,))


def check_shape(name: str, array: Any, *shapes: tuple[int, ...]) -> None:
    """Raises ValueError unless the array is None or has one of these shapes."""
    if array is not None and array.shape not in shapes:
        raise ValueError(f"{name} has shape {array.shape}, not {' or '.join(map(str, shapes))}")


def check_kind(name: str, array: Any, kind: Any) -> None:
    """Raises ValueError unless the array is of this kind, `jnp.integer` or `jnp.floating`."""
    if not jnp.issubdtype(array.dtype, kind):
        raise ValueError(f"{name} has dtype {array.dtype}, which is not {kind.__name__}")


def check_number(name: str, number: Any) -> None:
    """Raises ValueError for an array: a kernel is compiled with the number in it."""
    if not isinstance(number, Real):
        raise ValueError(f"{name} must be a Python number, not {type(number).__name__}")


def is_whole(number: Any) -> bool:
    return isinstance(number, int | np.integer) and not isinstance(number, bool)


def value_width(v_BKSH: Any, v_dim: int | None) -> int:
    """Returns how many columns the values have: those of v_BKSH or, without it, v_dim."""
    return int(v_dim or 0) if v_BKSH is None else v_BKSH.shape[-1]


def rows_by_head(x_BTNH: Array, K: int) -> Array:
    """[B, T, N, H] -> [B, K, R, H]: groups the R = T * G query rows that share each cache head."""
    B, T, N, H = x_BTNH.shape
    return x_BTNH.reshape(B, T, K, N // K, H).swapaxes(1, 2).reshape(B, K, T * (N // K), H)


def heads_of_rows(x_BKRH: Array, T: int) -> Array:
    """[B, K, T * G, H] -> [B, T, N, H]: undoes `rows_by_head`."""
    B, K, R, H = x_BKRH.shape
    return x_BKRH.reshape(B, K, T, R // T, H).swapaxes(1, 2).reshape(B, T, K * (R // T), H)

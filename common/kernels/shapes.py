"""The shapes of attention: what fits together, and the rows of queries that share a cache head."""

from typing import Any

import jax

Array = jax.Array


def check_shapes(q_BTNH: Any, k_BKSH: Any, v_BKSH: Any, v_dim: int | None) -> None:
    """ValueError for arrays (or shapes) that no implementation of attention takes."""
    N, H = q_BTNH.shape[2:]
    K, _, W = k_BKSH.shape[1:]
    if (v_BKSH is None) == (v_dim is None):
        raise ValueError("attention takes v_BKSH or v_dim (the columns of k that are the values)")
    if N % K:
        raise ValueError(f"{N} query heads cannot share {K} cache heads evenly")
    if v_dim is None and W != H:
        raise ValueError(f"queries of {H} columns do not fit keys of {W}")
    if v_dim is not None and not (0 < v_dim <= W and H <= W):
        raise ValueError(f"a cache row of {W} columns holds no keys of {H} and values of {v_dim}")


def value_width(v_BKSH: Any, v_dim: int | None) -> int:
    """Columns of the values, which are an array, or v_dim columns of each cache row."""
    return int(v_dim or 0) if v_BKSH is None else v_BKSH.shape[-1]


def rows_by_head(x_BTNH: Array, K: int) -> Array:
    """[B, T, N, H] -> [B, K, R, H]: the R = T * G rows of queries that share each cache head."""
    B, T, N, H = x_BTNH.shape
    return x_BTNH.reshape(B, T, K, N // K, H).swapaxes(1, 2).reshape(B, K, T * (N // K), H)


def heads_of_rows(x_BKRH: Array, T: int) -> Array:
    """And back: [B, K, T * G, H] -> [B, T, N, H]."""
    B, K, R, H = x_BKRH.shape
    return x_BKRH.reshape(B, K, T, R // T, H).swapaxes(1, 2).reshape(B, T, K * (R // T), H)

"""The gated delta rule: linear attention, with a state of fixed size in place of keys and values.

Gated Delta Networks, arXiv 2412.06464. Letters: B slots, T tokens, K heads of keys, which have G
heads of values each, H numbers in a key, V in a value. `delta_step` of qwen3_5/model.py is the
definition. A chunk takes few products. Token t adds outer(k_t, u_t) to the state, and u solves

    u_t = strength_t * (v_t - left_t S.T @ k_t - sum_(s < t) left_ts (k_t . k_s) u_s)

left_ts = exp(decay_(s+1) + ... + decay_t) is what is left of token s, and left_t of the state S.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from common.kernels.dispatch import AUTO, Kernel, choose

CHUNK = 64  # tokens of a prompt that are computed at once
dot = partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class Tokens(NamedTuple):
    """What the delta rule takes of T tokens, in float32. A token whose decay and strength are 0
    leaves the state as it is. A decay of -inf makes it 0, even if it was NaN."""

    q: Array  # [B, T, K, H], of length H**-0.5
    k: Array  # [B, T, K, H], of length 1
    v: Array  # [B, T, K, G, V]
    decay: Array  # [B, T, K, G]: its logarithm, at most 0
    strength: Array  # [B, T, K, G]: from 0 to 1


def delta_rule(
    S: Array, x: Tokens, kept: int, implementation: str = AUTO, definition: Any = None
) -> tuple[Array, Array]:
    """Lets T tokens read the states S, float32 [B, K, G, H, V], in turn, and change them.

    Args:
      kept: the states after this many tokens are returned. This is T, or less if T <= CHUNK.
      implementation: an `Impl`. "gpu" is "blocked". Other platforms interpret the kernel of "tpu".
      definition: what "reference" does with each token, such as `delta_step` of qwen3_5/model.py.

    Returns the states, and what each token reads, float32 [B, T, K, G, V]. ValueError if the named
    kernel does not take these arrays.
    """
    T = x.q.shape[1]
    if not 0 < kept <= T or (kept < T and T > CHUNK):
        raise ValueError(f"kept={kept} is not {T}, nor a part of at most {CHUNK} tokens")
    blocked = partial(delta_rule_blocked, kept=kept)
    reference = partial(delta_rule_reference, kept=kept, definition=definition)
    plain = dict(reference=reference, blocked=blocked, gpu=blocked)

    def kernels() -> dict[str, Kernel]:
        from common.kernels import delta_rule_tpu as tpu

        return dict(tpu=Kernel("tpu", partial(tpu.delta_rule_tpu, kept=kept), tpu.unsupported(S)))

    return choose(implementation, plain, kernels)(S, x)


@jax.default_matmul_precision("highest")
def delta_rule_reference(S: Array, x: Tokens, kept: int, definition: Any) -> tuple[Array, Array]:
    def token(S: Array, x: Tokens) -> tuple[Array, Array]:
        S = jnp.where(jnp.isneginf(x.decay)[..., None, None], 0, S)  # forgets even NaN
        return jax.vmap(definition)(S, x)

    x = jax.tree.map(lambda a: a.swapaxes(0, 1), x)
    S, o = lax.scan(token, S, jax.tree.map(lambda a: a[:kept], x))
    _, later = lax.scan(token, S, jax.tree.map(lambda a: a[kept:], x))
    return S, jnp.concatenate([o, later]).swapaxes(0, 1)


def delta_rule_blocked(S: Array, x: Tokens, kept: int) -> tuple[Array, Array]:
    """Computes a chunk after the other, in plain jnp."""
    B, T = x.q.shape[:2]
    if T <= CHUNK:
        return delta_chunk(S, x, kept)
    cut = lambda a: jnp.pad(a, [(0, 0), (0, -T % CHUNK), *[(0, 0)] * (a.ndim - 2)])
    chunks = jax.tree.map(lambda a: cut(a).reshape(B, -1, CHUNK, *a.shape[2:]).swapaxes(0, 1), x)
    S, o = lax.scan(partial(delta_chunk, kept=CHUNK), S, chunks)
    return S, o.swapaxes(0, 1).reshape(B, -1, *o.shape[3:])[:, :T]


def delta_chunk(S: Array, x: Tokens, kept: int) -> tuple[Array, Array]:
    """Computes one chunk, in products. The decays between two tokens are summed: differences of
    sums from the first token on would be rough after a strong decay."""
    T = x.q.shape[1]
    seen_TS, before_TS = (jnp.tri(T, k=k, dtype=bool) for k in (0, -1))
    decay_BKGT, b_BKGT = (jnp.moveaxis(a, 1, -1) for a in (x.decay, x.strength))
    log_BKGTS = jnp.cumsum(jnp.where(before_TS, decay_BKGT[..., None], 0), axis=-2)
    left_BKGTS = jnp.exp(jnp.where(seen_TS, log_BKGTS, -jnp.inf))
    left_BKGT = jnp.exp(jnp.cumsum(decay_BKGT, axis=-1))
    S = jnp.where(left_BKGT[..., :1, None] == 0, 0, S)
    k_BKTS, q_BKTS = (dot("btkh,bskh->bkts", a, x.k) for a in (x.k, x.q))
    A_BKGTS = jnp.where(before_TS, k_BKTS[:, :, None] * left_BKGTS, 0) * b_BKGT[..., None]
    read = lambda a: dot("bkghv,btkh->bkgtv", S, a) * left_BKGT[..., None]
    error_BKGTV = (jnp.moveaxis(x.v, 1, 3) - read(x.k)) * b_BKGT[..., None]
    u_BKGTV = dot("bkgts,bkgsv->bkgtv", inverse(A_BKGTS), error_BKGTV)
    o = read(x.q) + dot("bkgts,bkgsv->bkgtv", q_BKTS[:, :, None] * left_BKGTS, u_BKGTV)
    u_BKGTV = u_BKGTV * left_BKGTS[..., kept - 1, :, None]  # 0 for later tokens
    S = S * left_BKGT[..., kept - 1, None, None] + dot("btkh,bkgtv->bkghv", x.k, u_BKGTV)
    return S, jnp.moveaxis(o, 3, 1)


def inverse(A: Array) -> Array:
    """Inverts I + A [.., T, T] by halves, where A is 0 on the diagonal and above it."""
    T = A.shape[-1]
    if T == 1:
        return jnp.ones_like(A)
    if T % 2:
        return inverse(jnp.pad(A, [(0, 0)] * (A.ndim - 2) + [(0, 1)] * 2))[..., :T, :T]
    h = T // 2
    first, second = inverse(jnp.stack([A[..., :h, :h], A[..., h:, h:]]))
    corner = -dot("...ij,...jk,...kl->...il", second, A[..., h:, :h], first)
    return jnp.block([[first, jnp.zeros_like(first)], [corner, second]])

"""The gated delta rule on TPU, in Pallas: a chunk of tokens at a time, with the state on the chip.

Grid: slots, groups of key heads, chunks. A step has some 8 value heads, and each stage is written
for all of them before the next, so that they hide each other's latency. The matrix unit takes
bfloat16. A float32 number is cut into three pieces, and of the nine products of two numbers the six
largest are summed, in one product of the pieces side by side. The triangular system is solved
forward: powers of its matrix would cancel each other if keys are alike.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from common.kernels.delta_rule import CHUNK, Tokens
from common.kernels.varying import vary_like

LANES, SUBLANES, ROWS = 128, 8, 16  # bfloat16 is stored in tiles of 16 rows
STEP_BYTES = 512 << 10  # of the states in a step, unless those of one key head are larger
MOST_BYTES = 2 << 20  # of those; a step holds them four times
PAIRS = ((0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0))  # the pieces that are multiplied


def unsupported(S: Any) -> str | None:
    """Says in one sentence why the kernel does not take these states; None if it does."""
    G, H, V = S.shape[2:]
    fits = not H % LANES and not V % LANES and 4 * G * H * V <= MOST_BYTES
    sizes = "multiples of 128 numbers, and at most 2 MiB of them for a key head"
    return None if fits else f"the TPU kernel takes states of {sizes}, not {G} of {H} x {V}"


def pieces(x: Array) -> list[Array]:
    """Returns three bfloat16 arrays that sum to x: its first 8 bits, the next 8, the last 8."""
    view = lax.bitcast_convert_type
    top = lambda x: view(view(x, jnp.int32) & -(1 << 16), jnp.float32)
    a, b = top(x), top(x - top(x))
    return [part.astype(jnp.bfloat16) for part in (a, b, x - a - b)]


def line_up(cut: list[Array], side: int, axis: int) -> Array:
    return jnp.concatenate([cut[pair[side]] for pair in PAIRS], axis=axis)


def multiply(x: Array, y: Array, axis: int = 0) -> Array:
    return lax.dot_general(x, y, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def exact(x: list[Array], y: list[Array], axis: int = 0) -> Array:
    """Sums over the columns of x and `axis` of y, which are given in pieces."""
    return multiply(line_up(x, 0, 1), line_up(y, 1, axis), axis)


def solve(A: list[Array], e: list[Array]) -> list[Array]:
    """Returns u with u + A u = e, for each head. A is 0 on the diagonal and above it."""
    u: list[Any] = [None for _ in e]
    for t in range(0, len(e[0]), ROWS):
        for n, a in enumerate(A):
            rest = e[n][t : t + ROWS]
            if t:
                rest -= exact(pieces(a[t : t + ROWS, :t]), pieces(jnp.concatenate(u[n])))
            u[n] = [*(u[n] or ()), rest[:SUBLANES], rest[SUBLANES:]]
        for j in range(t, t + ROWS - 1):
            for a, x in zip(A, u, strict=True):
                tile, own = j // SUBLANES, x[j // SUBLANES][j % SUBLANES][None]
                for i in range(tile, len(x)):
                    x[i] -= a[i * SUBLANES : (i + 1) * SUBLANES, j : j + 1] * own
    return [jnp.concatenate(x) for x in u]


def _kernel(*refs: Any, kept: int, chunks: int) -> None:
    """Computes a chunk of N = K * G heads. Inputs: q and k [1, C, K * H], v [1, C, N * V], gates
    [1, 1, C, 4 * N], states [1, K, G, H, V]. Outputs: o like v, and the states."""
    q, k, v, gates, before, o, S = refs
    (_, K, G, H, V), C = S.shape, q.shape[1]
    if chunks > 1:
        pl.when(pl.program_id(2) == 0)(lambda: S.__setitem__(..., before[...]))
        before = S
    heads = [(n, n // G, n % G) for n in range(K * G)]
    row, column = (lax.broadcasted_iota(jnp.int32, (C, C), axis) for axis in (0, 1))
    earlier, seen = row > column, jnp.where(row >= column, 1.0, 0.0)
    sums = jnp.concatenate([seen.astype(jnp.bfloat16)] * 3, axis=1)
    each = [gates[0, 0, :, i : i + 1] for i in range(4 * K * G)]
    decay, strength, begin, end = (each[i : i + K * G] for i in range(0, 4 * K * G, K * G))
    part = lambda i: jnp.concatenate([a[0, :, i : i + H] for a in (k, q)])
    both = [pieces(part(i)) for i in range(0, K * H, H)]
    keys = [[a[:C] for a in x] for x in both]
    turned = [line_up(x, 0, 0).T for x in keys]
    alike = [exact(x, y, 1) for x, y in zip(both, keys, strict=True)]  # k @ k.T, then q @ k.T
    between = [jnp.concatenate(pieces(jnp.where(earlier, d, 0.0))) for d in decay]
    left = [seen * jnp.exp(multiply(sums, d)) for d in between]
    states = [jnp.where(begin[n][:1] == 0, 0.0, before[0, h, g]) for n, h, g in heads]
    read = [exact(both[h], pieces(states[n])) for n, h, _ in heads]
    A = [jnp.where(earlier, alike[h][:C] * left[n], 0.0) * strength[n] for n, h, _ in heads]
    error = [v[0, :, n * V : n * V + V] - read[n][:C] * begin[n] for n, _, _ in heads]
    u = solve(A, [x * b for x, b in zip(error, strength, strict=True)])
    for n, h, g in heads:
        own = exact(pieces(alike[h][C:] * left[n]), pieces(u[n]))
        o[0, :, n * V : n * V + V] = read[n][C:] * begin[n] + own
        added = multiply(turned[h], line_up(pieces(u[n] * end[n]), 1, 0))
        S[0, h, g] = states[n] * begin[n][kept - 1 : kept] + added


def delta_rule_tpu(S: Array, x: Tokens, kept: int, interpret: Any = False) -> tuple[Array, Array]:
    """Computes `delta_rule`. The caller has checked `unsupported`."""
    (B, K, G, H, V), T = S.shape, x.q.shape[1]
    C = min(-(-T // ROWS) * ROWS, CHUNK)
    chunks, kept, most = -(-T // C), min(kept, C), max(STEP_BYTES // (4 * G * H * V), 1)
    each = next(n for n in range(min(most, K), 0, -1) if K % n == 0)  # key heads of a step
    x = jax.tree.map(lambda a: jnp.pad(a, [(0, 0), (0, -T % C), *[(0, 0)] * (a.ndim - 2)]), x)
    q, k, v = (a.reshape(B, chunks * C, -1) for a in x[:3])
    decay, strength = (a.reshape(B, chunks, C, K // each, -1) for a in x[3:])
    # what is left of the state before the chunk, and of each token after those kept
    begin, at = jnp.exp(jnp.cumsum(decay, axis=2)), jnp.arange(C)[:, None, None]
    later = jnp.where(at < kept - 1, jnp.roll(decay, -1, axis=2), 0)
    end = jnp.where(at < kept, jnp.exp(lax.cumsum(later, axis=2, reverse=True)), 0)
    gates = jnp.concatenate([decay, strength, begin, end], axis=-1)
    gates = gates.transpose(0, 3, 1, 2, 4).reshape(B, K // each, chunks * C, -1)
    if not interpret:  # otherwise the compiler may copy all states into VMEM first
        S = pltpu.with_memory_space_constraint(S, pltpu.HBM)
    varies = jax.typeof(vary_like(S, q, k, v, gates)).manual_axis_type
    out = partial(jax.ShapeDtypeStruct, dtype=jnp.float32, manual_axis_type=varies)
    order: Any = ("parallel", "parallel", "arbitrary")  # chunks follow one another
    own = lambda a: pl.BlockSpec((1, C, a.shape[2] * each // K), lambda b, h, i: (b, i, h))
    column = pl.BlockSpec((1, 1, C, gates.shape[3]), lambda b, h, i: (b, h, i, 0))
    states = pl.BlockSpec((1, each, G, H, V), lambda b, h, i: (b, h, 0, 0, 0))
    o, S = pl.pallas_call(
        partial(_kernel, kept=kept, chunks=chunks),
        out_shape=[out(v.shape), out(S.shape)],
        grid=(B, K // each, chunks),
        in_specs=[own(q), own(k), own(v), column, states],
        out_specs=[own(v), states],
        input_output_aliases={4: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=order),
        cost_estimate=pl.CostEstimate(6 * T * S.size, v.size // V * C, 8 * S.size),
        interpret=interpret,
        name="delta_rule",
    )(q, k, v, gates, S)
    return S, o[:, :T].reshape(B, T, K, G, V)

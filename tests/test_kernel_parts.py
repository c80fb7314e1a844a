"""What the implementations of attention share: the step of the online softmax, the merge of parts,
and the first position that a query sees."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close
from hypothesis import given
from hypothesis import strategies as st

from common.kernels.softmax import NEG_INF, merge_parts, normalized, online_softmax
from common.kernels.visible import first_seen

ATOL = 2e-6  # for numbers up to 4; measured: 5e-7


def attention(scores, values):
    """Computes attention in float64, over all positions at once. A masked score is -inf."""
    seen = np.isfinite(scores).any(1)
    lse = np.full(len(scores), -np.inf)
    lse[seen] = np.log(np.exp(scores[seen]).sum(1))
    o = np.zeros((len(scores), values.shape[1]))
    o[seen] = np.exp(scores[seen] - lse[seen, None]) @ values
    return o, lse


def random_scores(rows=9, positions=24):
    """Returns scores and values. Row 0 sees nothing, row 1 only the last position, row 2 only the
    first; other rows see half."""
    rng = np.random.default_rng(0)
    scores = rng.normal(0, 3, (rows, positions))
    masked = rng.random(scores.shape) < 0.5
    masked[:3], masked[1, -1], masked[2, 0] = True, False, False
    return np.where(masked, -np.inf, scores), rng.standard_normal((positions, 5))


@pytest.mark.parametrize("keepdims", [True, False])
@pytest.mark.parametrize("block", [1, 5, 24])
def test_blocks_of_scores_give_the_softmax_of_all(block, keepdims):
    """Maxima and sums are [rows, 1], which broadcasts, or [rows], which `spread` broadcasts."""
    scores, values = random_scores()
    finite = jnp.asarray(np.maximum(scores, NEG_INF), jnp.float32)
    spread = {} if keepdims else dict(spread=lambda x: x[:, None])
    shape = (len(scores), 1) if keepdims else (len(scores),)
    m, total = jnp.full(shape, NEG_INF), jnp.zeros(shape)
    acc = jnp.zeros((len(scores), values.shape[1]))
    for at in range(0, scores.shape[1], block):
        part = slice(at, at + block)
        m, total, keep, p = online_softmax(m, total, finite[:, part], **spread)
        acc = acc * keep.reshape(-1, 1) + p @ jnp.asarray(values[part], jnp.float32)
    o, lse = normalized(m.reshape(-1, 1), total.reshape(-1, 1), acc)
    want_o, want_lse = attention(scores, values)
    assert_close(o, want_o, atol=ATOL)
    assert np.isneginf(lse[0]).all()
    assert_close(lse[1:, 0], want_lse[1:], atol=ATOL)


def test_workers_on_other_positions_of_the_same_rows_agree_on_the_maximum():
    scores, values = random_scores()
    finite = jnp.asarray(np.maximum(scores, NEG_INF), jnp.float32)
    m, total = jnp.full((len(scores), 1), NEG_INF), jnp.zeros((len(scores), 1))
    top = finite.max(1, keepdims=True)
    sums = []
    for part in (slice(0, 10), slice(10, None)):
        agree = functools.partial(jnp.maximum, top)
        m_new, own, _, p = online_softmax(m, total, finite[:, part], agree=agree)
        assert (m_new == top).all()
        sums.append((own, p @ jnp.asarray(values[part], jnp.float32)))
    (total, acc), other = sums
    o, _ = normalized(top, total + other[0], acc + other[1])
    assert_close(o, attention(scores, values)[0], atol=ATOL)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_parts_merge_to_the_attention_over_all_and_nothing_to_nothing(parts):
    """They do for any log-sum-exps. In row 3 they differ by 400, in row 4 they are near -500: plain
    sums would overflow or vanish."""
    scores, values = random_scores()
    scores[3] += np.where(np.arange(scores.shape[1]) < 12, 200, -200)
    scores[4] -= 500
    owner = np.random.default_rng(1).integers(0, parts, scores.shape[1])
    each = [attention(np.where(owner == d, scores, -np.inf), values) for d in range(parts)]
    o, lse = (jnp.asarray(np.stack(x), jnp.float32) for x in zip(*each, strict=True))
    o, lse = jax.jit(merge_parts)(o, lse)
    want_o, want_lse = attention(scores, values)
    assert_close(o, want_o, atol=1e-5)  # measured: 2e-6; float32 resolves 500 to 3e-5
    assert np.isneginf(lse[0]) and not np.asarray(o[0]).any()
    assert_close(lse[1:], want_lse[1:], rtol=2e-7)


def test_a_sink_is_a_part_without_a_value():
    scores, values = random_scores()
    o, lse = attention(scores, values)
    sinks = np.full(len(o), 0.7)
    scores, values = np.column_stack([scores, sinks]), np.append(values, np.zeros((1, 5)), axis=0)
    want, _ = attention(scores, values)
    got, _ = merge_parts(np.stack([o, 0 * o]), np.stack([lse, sinks]))
    assert_close(got, want, atol=ATOL)


SIZES = st.one_of(st.none(), st.integers(1, 40))


@given(SIZES, SIZES)
def test_first_seen_is_the_first_position_that_window_and_chunk_allow(window, chunk):
    def allowed(p, s):
        return (window is None or s > p - window) and (chunk is None or s // chunk == p // chunk)

    position = np.arange(-50, 100, dtype=np.int32)
    want = [next(s for s in range(p + 1) if allowed(p, s)) for p in position if p >= 0]
    got = np.asarray(first_seen(jnp.asarray(position), window, chunk))
    assert got.dtype == np.int32 and got[50:].tolist() == want
    assert (got[:50] >= 0).all()  # of queries before position 0, which see nothing


@pytest.mark.parametrize("window, chunk", [(None, 8192), (128, None), (None, 3000), (1000, 3000)])
def test_first_seen_is_exact_at_any_position_an_int32_holds(window, chunk):
    position = np.array([0, 1, 8191, 8192, 10_000_000, 2**31 - 1], np.int64)
    firsts = [0 * position]
    firsts += [position - window + 1] if window else []
    firsts += [position // chunk * chunk] if chunk else []
    got = first_seen(jnp.asarray(position, jnp.int32), window, chunk)
    assert np.asarray(got).tolist() == np.max(firsts, axis=0).tolist()

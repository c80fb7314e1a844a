"""Samples the next token from logits whose vocabulary is split over devices.

`sample` runs inside `shard_map`: V is the part of the vocabulary that one device holds, and B are
its slots. Nothing of size V is gathered or sorted. A filter (top-k, top-p) is a threshold on the
logits, which is found bit by bit. The draw finds the device, then the group of blocks, the block
and the token. Two all-reduces of [B] give the largest logit (float32) and the lowest id that has it
(int32). If a slot of the device has a temperature above 0, there are up to 36 more:

    16        all-reduce [3, B]      float32, if a slot uses top-k: the search for its threshold
    16        all-reduce [3, B]      float32, if a slot uses top-p: the search for its threshold
    2         all-reduce [B]         float32, one before each search: the probability that is left
    1         all-gather [B, n]      float32: the sum of the probabilities on each of the n devices
    1         all-reduce [B]         int32: the drawn id
"""

from collections.abc import Callable, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from common.sharding import DATA, MODEL, P

INVALID = -1  # instead of a token, if the logits are not finite numbers
WHY_INVALID = "the model's logits are NaN or infinite, or a grammar grew too large"
# Tokens in a block, and blocks in a group. It is near the cube root of V, so that all prefix sums
# are short: over the groups, over the blocks of a group, and in a block.
BLOCK = 32
SIGN = np.uint32(1 << 31)


class Sampling(NamedTuple):
    """What each slot asks for. The filters apply in this order, as in Hugging Face transformers."""

    temperature_B: Array  # float32; 0 is greedy
    top_k_B: Array  # int32; keeps the k largest logits; 0 is off
    # float32; keeps the fewest tokens that hold this share of what top-k left; 1 is off
    top_p_B: Array
    min_p_B: Array  # float32; keeps tokens with this share of the likeliest's probability; 0 is off
    seed_B: Array  # uint32


def sampling_params(
    n: int,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 0,
) -> Sampling:
    """Parameters of n slots, each one value for all or n values; ValueError if one is invalid."""
    given = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    columns = []
    for name, values in given.items():
        row = np.asarray(values, object)
        if row.shape not in ((), (n,)):
            raise ValueError(f"{name} must be one value or {n}, got shape {row.shape}")
        for value in row.flat:
            check(name, value)
        columns.append(jnp.full(n, row.astype(PARAMETERS[name].dtype)))
    return Sampling(*columns)


class Parameter(NamedTuple):
    dtype: type
    valid: Callable[[Any], bool]
    must_be: str


PARAMETERS = {
    "temperature": Parameter(np.float32, lambda t: 0 <= t < np.inf, "finite and >= 0"),
    "top_k": Parameter(np.int32, lambda k: 0 <= k < 2**31, "an integer in [0, 2**31)"),
    "top_p": Parameter(np.float32, lambda p: 0 < p <= 1, "in (0, 1]"),
    "min_p": Parameter(np.float32, lambda p: 0 <= p < 1, "in [0, 1)"),
    "seed": Parameter(np.uint32, lambda s: 0 <= s < 2**32, "an integer in [0, 2**32)"),
}
# Those of `Rules` that are one number for each slot.
PENALTIES = {
    "repetition_penalty": Parameter(np.float32, lambda p: 0 < p < np.inf, "finite and > 0"),
    "frequency_penalty": Parameter(np.float32, lambda p: -2 <= p <= 2, "in [-2, 2]"),
    "presence_penalty": Parameter(np.float32, lambda p: -2 <= p <= 2, "in [-2, 2]"),
}


def check(name: str, value: Any) -> None:
    """ValueError if a parameter has an invalid value."""
    dtype, valid, must_be = (PARAMETERS | PENALTIES)[name]
    kind = Real if dtype is np.float32 else Integral
    with np.errstate(over="ignore"):
        # Judged as the float32 that it becomes: 1e-60 is not a positive top_p.
        if not isinstance(value, kind) or not valid(dtype(value) if kind is Real else value):
            raise ValueError(f"{name} must be {must_be}, got {value!r}")


class Rules(NamedTuple):
    """What slots ask about single tokens, before one is sampled; N biases and W words a slot."""

    allowed_BW: Array  # uint32; bit i of word w allows the token 32 w + i
    bias_id_BN: Array  # int32: tokens to whose logits a bias is added; -1 is none
    bias_BN: Array  # float32
    # float32; divides a logit above 0, and multiplies one below, of each token in the prompt or in
    # the reply (CTRL, arXiv 1909.05858, and Hugging Face transformers); 1 is off
    repetition_B: Array
    # float32; taken off a logit as often as the reply has the token, and once if it has it (OpenAI)
    frequency_B: Array
    presence_B: Array
    # int32: 2 for each time that the reply has a token, and 1 if the prompt has it. V is the
    # device's part of the vocabulary. None if no slot has a penalty.
    seen_BV: Array | None


RULES_SPEC: Any = Rules(*(P(DATA),) * 6, seen_BV=P(DATA, MODEL))


def ruled(logits_BV: Array, rules: Rules | None) -> Array:
    """Applies the rules in the order of their fields, but for `allowed_BW`, which comes last. A
    logit that is no number stays, so that `sample` sees it."""
    if rules is None:
        return logits_BV
    (B, V), first = logits_BV.shape, lax.axis_index(MODEL) * logits_BV.shape[1]
    at_BN = own_index(rules.bias_id_BN, V)
    x_BV = logits_BV.at[jnp.arange(B)[:, None], at_BN].add(rules.bias_BN, mode="drop")
    if rules.seen_BV is not None:
        factor_BV = jnp.where(rules.seen_BV > 0, rules.repetition_B[:, None], 1)
        x_BV = jnp.where(x_BV > 0, x_BV / factor_BV, x_BV * factor_BV)
        count_BV = rules.seen_BV // 2
        x_BV -= rules.frequency_B[:, None] * count_BV
        x_BV -= rules.presence_B[:, None] * (count_BV > 0)
    words = V // 32 + 2  # a device's part may begin and end inside a word
    allowed_BW = jnp.pad(rules.allowed_BW, ((0, 0), (0, words)))
    allowed_BW = lax.dynamic_slice_in_dim(allowed_BW, first // 32, words, axis=1)
    bits_BV = (allowed_BW[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1).reshape(B, -1)
    bits_BV = lax.dynamic_slice_in_dim(bits_BV, first % 32, V, axis=1)
    return jnp.where((bits_BV > 0) | ~(x_BV < jnp.inf), x_BV, -jnp.inf)


def count_token(rules: Rules, token_B: Array, is_on_B: Array) -> Rules:
    """Counts the newest token of the slots that are on."""
    if (seen_BV := rules.seen_BV) is None:
        return rules
    at_B = own_index(jnp.where(is_on_B, token_B, -1), seen_BV.shape[1])
    return rules._replace(seen_BV=seen_BV.at[jnp.arange(len(at_B)), at_B].add(2, mode="drop"))


def own_index(id_: Array, V: int) -> Array:
    """The index of ids in the device's part of the vocabulary; V, which is none, for the others."""
    at = id_ - lax.axis_index(MODEL) * V
    return jnp.where((at >= 0) & (at < V), at, V)


def sample(
    logits_BV: Array, sampling: Sampling, position_B: Array, vocab_size: int, axes: tuple[str, ...]
) -> Array:
    """Samples a token for each slot: int32 ids [B], equal on all devices of `axes`, over which the
    vocabulary of the float32 logits is split.

    A token depends on its slot's logits, parameters and position alone. Ids >= vocab_size are
    padding and never sampled. INVALID: logits of a slot are NaN or +inf, or all are -inf."""
    V = logits_BV.shape[1]
    ids = V * lax.axis_size(axes)
    if not 0 < vocab_size <= ids:
        raise ValueError(f"vocab_size {vocab_size} is not in [1, {ids}], the ids that have logits")
    device = lax.axis_index(axes)
    id_V = device * V + jnp.arange(V)
    x_BV = jnp.where(jnp.isnan(logits_BV), jnp.inf, logits_BV)  # a maximum may lose a NaN
    x_BV = jnp.where(id_V < vocab_size, x_BV, -jnp.inf)
    max_B = lax.pmax(x_BV.max(1), axes)  # one per device -> replicated, here and below
    # The lowest id that has the largest logit. (argmax is several times slower on CPU.)
    greedy_B = lax.pmin(jnp.where(x_BV == max_B[:, None], id_V, ids).min(1), axes)

    def draw() -> Array:
        p_BV = kept_mass(x_BV, max_B, sampling, axes)
        p_BV = jnp.pad(p_BV, ((0, 0), (0, -V % BLOCK**2)))
        p_BCKK = p_BV.reshape(len(p_BV), -1, BLOCK, BLOCK)
        p_BCK = p_BCKK.sum(3)
        p_BC = p_BCK.sum(2)
        p_BN = lax.all_gather(p_BC.sum(1), axes, axis=1)  # [B] per device -> [B, devices] on all
        u_B = jax.vmap(_uniform)(sampling.seed_B, position_B)
        owner_B, rest_B = _descend(p_BN, u_B * p_BN.sum(1))
        c_B, rest_B = _descend(p_BC, rest_B)
        k_B, rest_B = _descend(_pick(p_BCK, c_B), rest_B)
        i_B, _ = _descend(_pick(_pick(p_BCKK, c_B), k_B), rest_B)
        id_B = device * V + (c_B * BLOCK + k_B) * BLOCK + i_B
        drawn_B = lax.psum(jnp.where(device == owner_B, id_B, 0), axes)
        return jnp.where(sampling.temperature_B > 0, drawn_B, greedy_B)

    # All devices of `axes` take the same branch, here and below, so a branch may communicate.
    token_B = lax.cond(jnp.any(sampling.temperature_B > 0), draw, lambda: greedy_B)
    return jnp.where(jnp.isfinite(max_B), token_B, INVALID)


def kept_mass(x_BV: Array, max_B: Array, sampling: Sampling, axes: tuple[str, ...]) -> Array:
    """Probabilities [B, V] relative to the likeliest token's; 0 for tokens that a filter drops.

    Tokens that tie at a threshold are all kept. The threshold is on the logits: dividing by the
    temperature keeps their order, but may round different logits to one number.
    """
    hot_B = sampling.temperature_B > 0
    p_BV = jnp.exp((x_BV - max_B[:, None]) / jnp.where(hot_B, sampling.temperature_B, 1)[:, None])
    on_FB = jnp.stack([sampling.top_k_B > 0, sampling.top_p_B < 1]) & hot_B

    def keep(f: Array, p_BV: Array) -> Array:
        """Applies filter f. Both filters share this code, so the search is compiled once."""

        def search() -> Array:
            # float32 counts exactly up to 2**24, which no vocabulary exceeds.
            share_B = sampling.top_p_B * lax.psum(p_BV.sum(1), axes)
            target_B = jnp.where(f == 0, sampling.top_k_B.astype(jnp.float32), share_B)
            # A slot whose filter is off gets an infinite target. No threshold reaches it, so the
            # result is -inf, which keeps all tokens, as if no slot needed a search.
            target_B = jnp.where(on_FB[f], target_B, jnp.inf)
            return _threshold(x_BV, max_B, jnp.where(f == 0, 1, p_BV), target_B, axes)

        t_B = lax.cond(jnp.any(on_FB[f]), search, lambda: jnp.full_like(max_B, -jnp.inf))
        return jnp.where(x_BV >= t_B[:, None], p_BV, 0)

    p_BV = lax.fori_loop(0, len(on_FB), keep, p_BV)
    return jnp.where(p_BV >= sampling.min_p_B[:, None], p_BV, 0)


def _threshold(
    x_BV: Array, max_B: Array, weight_BV: Array, target_B: Array, axes: tuple[str, ...]
) -> Array:
    """The largest t_B <= max_B for which the weight of all x >= t reaches target_B; if none: -inf.

    `_image` maps floats to uint32 in the same order. The search finds the bits of the image from
    the top, two in a round, by trying three candidates at a time. That halves the rounds, and on
    many devices the latency of a round is the cost."""
    lowest_B, highest_B = _image(jnp.full_like(max_B, -jnp.inf)), _image(max_B)

    def value(image_B: Array) -> Array:
        image_B = jnp.clip(image_B, lowest_B, highest_B)  # outside lie images of NaN
        bits_B = jnp.where(image_B >= SIGN, image_B ^ SIGN, ~image_B)
        return lax.bitcast_convert_type(bits_B, jnp.float32)

    def refine(i: Array, image_B: Array) -> Array:
        shift = (30 - 2 * i).astype(jnp.uint32)
        t_JB = value(image_B + (jnp.arange(1, 4, dtype=jnp.uint32)[:, None] << shift))
        weights = [jnp.where(x_BV >= t_B[:, None], weight_BV, 0).sum(1) for t_B in t_JB]
        reached_JB = lax.psum(jnp.stack(weights), axes) >= target_B  # partial -> replicated
        return image_B + (reached_JB.sum(0, dtype=jnp.uint32) << shift)

    return value(lax.fori_loop(0, 16, refine, jnp.zeros_like(highest_B)))


def _image(x: Array) -> Array:
    """Maps float32 to uint32 so that the order of the numbers is kept."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >= SIGN, ~bits, bits ^ SIGN)


def _uniform(seed: Array, position: Array) -> Array:
    """One float32 in (0, 1), from the seed and the position alone: a block of the cipher Threefry,
    whose key is the seed and whose counter is the position."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    # Centres of 2**23 cells. Their lower ends include 0, which would draw even an impossible token.
    return (jax.random.key_data(key)[0] >> 9) * jnp.float32(2**-23) + jnp.float32(2**-24)


def _pick(x_BX: Array, index_B: Array) -> Array:
    """x[b, index_B[b]] of each slot b: [B, X, ..] -> [B, ..]."""
    return x_BX[jnp.arange(len(x_BX)), index_B]


def _descend(mass_BX: Array, rest_B: Array) -> tuple[Array, Array]:
    """Lays the masses of the bins end to end; returns the bin [B] in which rest_B falls, and how
    far inside it.

    Where a bin ends is a sum of X terms, in which the bins behind it count as 0. All these sums add
    their terms in the same order, so the ends stay in order although they are rounded. Therefore an
    empty bin is never hit, and a rest_B past the last end hits a bin that has mass. If no bin has
    any mass, the result is X, which is no bin.
    """
    x = jnp.arange(mass_BX.shape[1])
    end_BX = jnp.where(x[:, None] <= x, mass_BX[:, :, None], 0).sum(1)
    # The factor takes a float32 to the one below it.
    rest_B = jnp.minimum(rest_B, end_BX[:, -1] * np.float32(1 - 2**-24))
    passed_BX = end_BX <= rest_B[:, None]
    return passed_BX.sum(1), rest_B - jnp.where(passed_BX, end_BX, 0).max(1)


LIKELIEST = 20  # tokens that are scored beside the one taken


class Scores(NamedTuple):
    """Log-probabilities under the model's own distribution, before temperature and filters."""

    token_BT: Array  # float32, of the given tokens
    likeliest_BTX: Array  # int32, the X likeliest tokens, the likeliest first
    score_BTX: Array  # float32, of these


def scores(logits_BTV: Array, tokens_BT: Array, wanted: Array | bool, vocab_size: int) -> Scores:
    """Scores tokens_BT (int32) and the X = LIKELIEST likeliest tokens, or all if there are fewer,
    by float32 logits; gives zeros if the bool scalar `wanted` is false. Called inside `shard_map`,
    where V is the device's part of the vocabulary. A device sends its X candidates, no logits."""
    V = logits_BTV.shape[-1]
    first, n = lax.axis_index(MODEL) * V, min(LIKELIEST, vocab_size)

    def compute() -> Scores:
        x_BTV = jnp.where(first + jnp.arange(V) < vocab_size, logits_BTV, -jnp.inf)
        max_BT = lax.pmax(x_BTV.max(-1), MODEL)  # one per device -> replicated, here and below
        total_BT = jnp.log(lax.psum(jnp.exp(x_BTV - max_BT[..., None]).sum(-1), MODEL)) + max_BT
        at_BT1 = own_index(tokens_BT, V)[..., None]
        own_BT1 = jnp.take_along_axis(x_BTV, at_BT1, axis=-1, mode="fill", fill_value=0)
        own_BT = lax.psum(own_BT1[..., 0], MODEL)
        top_BTX, at_BTX = lax.top_k(x_BTV, min(n, V))
        gather = partial(lax.all_gather, axis_name=MODEL, axis=2, tiled=True)  # own -> all
        top_BTX, order_BTX = lax.top_k(gather(top_BTX), n)
        id_BTX = jnp.take_along_axis(gather(first + at_BTX), order_BTX, axis=-1)
        top_BTX, id_BTX = lax.pmax((top_BTX, id_BTX), MODEL)  # equal: now `shard_map` knows it
        return Scores(own_BT - total_BT, id_BTX, top_BTX - total_BT[..., None])

    def skip() -> Scores:
        zero_BTX = tokens_BT[..., None] * jnp.zeros(n, jnp.int32)
        return Scores(tokens_BT * 0.0, zero_BTX, zero_BTX * 0.0)

    return lax.cond(wanted, compute, skip)

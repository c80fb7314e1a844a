"""Kimi K2 in one file: llama3 with attention that caches one latent vector a token instead of keys
and values, and with MLPs of 384 experts, of which each token uses 8.

Kimi K2: Open Agentic Intelligence, arXiv 2507.20534. The design is that of DeepSeek V3 (arXiv
2412.19437), except that experts are chosen among all, and not within groups. What differs from
llama3, per token and head n:

    q_nope, q_rope = wq[n] norm(wq_a h)            h = norm(x); q_rope is rotated
    latent, k_rope = wkv_a h                       cached, C + R numbers for all heads together: the
                                                   latent is normed, k_rope is rotated
    k_nope, v = wk[n] latent, wv[n] latent         the head's own keys and values; wkv holds wk, wv
    q . k = q_nope . k_nope + q_rope . k_rope
          = (wk[n]^T q_nope) . latent + q_rope . k_rope        so decoding need not make keys
    x += shared(h) + sum_e p[e] * expert[e](h)     s = sigmoid(router(h)); the sum is over the X
                                                   experts with the largest s + bias; p is their s,
                                                   normalised and scaled
    rope rotates neighbours, elements 2 i and 2 i + 1; YaRN changes its angles, and scales q . k

Dimensions: B slots, T query tokens (1 when decoding), M = B * T, S cache positions, D model, N
heads, Q the rank of queries, C the rank of latents, U unrotated and R rotated numbers in a query or
key (H = U + R), J numbers in a value, W = C + R rounded up to a multiple of 128, F MLP width, E
experts, X experts of a token, V vocabulary, L layers.

Slots are split over the mesh axis `data`. Heads, vocabulary, dense MLPs and shared MLPs are split
over MODEL, which is the axes `expert` and `tensor` taken as one. Experts are split over `expert`.
The F of an expert and the positions of a cache are split over `tensor`. wq_a and wkv_a are
replicated. Shapes in classes are of whole arrays. In code inside `shard_map`, and in the next
paragraphs, B, N, F, E, V and the S of a cache count one device's part (a router has all E).

A greedy step has 2 L + 3 collectives over MODEL: [B, T, D] is all-reduced after the embedding, each
attention and each MLP (2 B T D bytes in bfloat16), and [B] twice in `sample` (4 bytes a slot). If
any temperature is above 0, `sample` has up to 36 more, of at most 12 bytes a slot each.

If `tensor` has t > 1 devices, each layer adds collectives over `tensor`. If T is at most
FEW_QUERIES (8), these are three, in `attend_latent`:

    all-gather [B, T, N t, C + R]    the queries of t devices, in the model's dtype
    all-gather [t, B, T, N t]        log-sum-exps, float32
    reduce-scatter [B, T, N, C]      the merged results, in the model's dtype

If T is larger, `attend_expanded` collects the cache from these t devices, some positions at a time,
up to the longest slot's end. It all-reduces rows [B, positions, W], which are zeros on all devices
but one, and the scales [B, positions] of an int8 cache.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from common.cache import RowCache, capacity_of, copy_slots
from common.config import SILU, is_fp8, read_config, read_rope, text_config
from common.experts import dot_one, group_by_expert, num_experts, sum_over_experts
from common.fields import Even, Index, at_most
from common.kernels.decode_attention import FEW_QUERIES
from common.kernels.dispatch import AUTO, KERNEL_FREE, Impl
from common.kernels.ragged_dot import ragged_dot
from common.latents import append_latent, attend_by, attend_expanded, attend_latent, empty_latent
from common.names import Same, Table, fp8_table, multimodal
from common.packing import Packing, read_packing
from common.products import embed_rows, headwise, linear
from common.quant import FP8_BLOCK, Fp8, Matrix, out_features
from common.sampling import Sampling, sample, sampling_params
from common.sharding import DATA, EXPERT, MODEL, TENSOR, UNSPLIT, P, Shards, round_up, split_heads
from common.weights import array, bias, headwise_matrix, matrix, norm, specs_like, stack, vocab_rows

INNER_EPS = 1e-6  # of the norms inside attention: the published code ignores rms_norm_eps there


class Yarn(NamedTuple):
    """`rope_scaling` of type yarn."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # multiplies cos and sin
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class Config(NamedTuple):
    """The fields of config.json that shape the computation, under their published names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int | None  # None: there is no wq_a, and wq is [N * H, D]
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: Even
    v_head_dim: int
    rope_theta: float
    rope_scaling: Yarn | None
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: Annotated[int, at_most("n_routed_experts")]
    moe_intermediate_size: int
    first_k_dense_replace: Index  # how many layers come before the first with experts
    norm_topk_prob: bool
    routed_scaling_factor: float
    fp8: bool  # quantization_config: the projections are published in 8-bit floats
    multimodal: bool  # there is a vision tower too, and the text model's names have a prefix
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 4096
    packing: Packing | None = None  # quantization_config: how the files' matrices are packed


class Mlp(NamedTuple):
    """One MLP; or all experts of a layer, with one more axis, E, in front."""

    w_gate: Matrix  # [F, D]
    w_up: Matrix  # [F, D]
    w_down: Matrix  # [D, F]


class Moe(NamedTuple):
    router: Array  # [E, D]
    b_router: Array  # float32 [E], added to choose experts
    experts: Mlp
    shared: Mlp


class Layer(NamedTuple):
    """The loader decides how a Matrix is stored (bfloat16, int8, ...); products take any form."""

    attn_norm: Array  # [D]
    wq_a: Matrix | None  # [Q, D]
    q_norm: Array | None  # [Q]
    wq: Matrix  # [N * H, Q], or [N * H, D]
    wkv_a: Matrix  # [C + R, D]
    kv_norm: Array  # [C]
    wkv: Matrix  # [N * (U + J), C]: of each head wk [U, C], then wv [J, C]
    wo: Matrix  # [D, N * J]
    mlp_norm: Array  # [D]
    mlp: Mlp | Moe


class Weights(NamedTuple):
    embed: Matrix  # [V, D]
    layers: tuple[Layer, ...]
    norm: Array  # [D]
    head: Matrix | None  # [V, D]; None if the embedding is the head too


class DecodeState(NamedTuple):
    """B slots, decoded together. A slot of length 0 is empty. When a request ends, `serve` sets its
    slot's length to 0 and clears nothing: attention hides what is past the length, even NaN."""

    # For each layer [B, 1, S, W]: a row per position, which holds latent, rotated key and zeros.
    cache: tuple[RowCache, ...]
    length_B: Array  # int32: tokens in the cache
    token_B: Array  # int32: the newest token, which is not in the cache yet
    sampling: Sampling  # arrays of [B]: settings and a seed; a draw is made from seed and length


class Step(NamedTuple):
    """What all layers of one step share, on one device."""

    end_B: Array  # int32: the old length + T, padding included; 0 in a skipped slot
    cos: Array  # float32 [B, T, 1, R / 2]
    sin: Array
    implementation: Impl  # of the kernels; static in jit


class Queries(NamedTuple):
    """The queries of the device's own heads."""

    nope: Array  # [B, T, N, U]
    rope: Array  # [B, T, N, R], rotated


# ---- the mathematics: from here to `forward`, what each device computes inside `shard_map`


def rms_norm(x: Array, weight_D: Array, eps: float) -> Array:
    """x / rms(x) in float32, then times the weight in the model's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * weight_D


def yarn_frequencies(period: np.ndarray, theta: float, yarn: Yarn) -> np.ndarray:
    """YaRN, arXiv 2309.00071. Pairs that rotate more than beta_fast times in the original context
    keep their frequency, 1 / period. Pairs that rotate less than beta_slow times have theirs
    divided by `factor`. A ramp blends the pairs in between."""
    R = 2 * len(period)  # how many numbers of a head rotate

    def pair(turns: float) -> float:
        """The fractional index of the pair that makes `turns` rotations in the original context."""
        context = yarn.original_max_position_embeddings
        return R * math.log(context / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, R - 1)  # R - 1 is the published bound
    width = high - low if high != low else 0.001  # never 0 / 0
    # Keep this order of operations: one ulp of a frequency is 0.006 radians at position 100,000.
    keep = 1 - np.clip((np.arange(R // 2, dtype=np.float32) - low) / width, 0, 1)
    return 1 / (yarn.factor * period) * (1 - keep) + 1 / period * keep


def rope_frequencies(config: Config) -> np.ndarray:
    """Radians per position of each pair of neighbours (2 i, 2 i + 1), [R / 2]."""
    R = config.qk_rope_head_dim
    exponent = np.arange(0, R, 2, dtype=np.float32) / R
    period = np.power(config.rope_theta, exponent, dtype=np.float64).astype(np.float32)
    if config.rope_scaling is None:
        return 1 / period
    return yarn_frequencies(period, config.rope_theta, config.rope_scaling)


def magnitude(factor: float, mscale: float) -> float:
    """YaRN: what queries and keys are multiplied by in a context `factor` times as long."""
    return 0.1 * mscale * math.log(factor) + 1


def attention_factor(yarn: Yarn | None) -> float:
    """YaRN multiplies cos and sin by this."""
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return magnitude(yarn.factor, yarn.mscale) / magnitude(yarn.factor, yarn.mscale_all_dim)
    return magnitude(yarn.factor, 1)


def softmax_scale(config: Config) -> float:
    """The factor of q . k: H**-0.5. YaRN with mscale_all_dim multiplies it by magnitude(...)**2."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    yarn = config.rope_scaling
    if yarn is None or not yarn.mscale_all_dim:
        return scale
    return scale * magnitude(yarn.factor, yarn.mscale_all_dim) ** 2


def rotary(position_BT: Array, config: Config) -> tuple[Array, Array]:
    """cos and sin of the angles of each position, float32 [B, T, 1, R / 2]."""
    angle = position_BT[..., None, None].astype(jnp.float32) * rope_frequencies(config)
    factor = attention_factor(config.rope_scaling)
    # Without the barrier, XLA on CPU recomputes cos and sin in every layer, for every head.
    return lax.optimization_barrier((jnp.cos(angle) * factor, jnp.sin(angle) * factor))


def rotate(x_BTNR: Array, step: Step) -> Array:
    """Rotates each pair of elements 2 i and 2 i + 1 by the angle of its position. The output holds
    the even elements first. Queries and keys are permuted alike, so q . k is unchanged."""
    cos, sin = step.cos.astype(x_BTNR.dtype), step.sin.astype(x_BTNR.dtype)
    a, b = x_BTNR[..., 0::2], x_BTNR[..., 1::2]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def embed(table_VD: Matrix, tokens_BT: Array, dtype: DTypeLike) -> Array:
    """Each device looks up the ids that it holds. Other ids give zeros."""
    local_BT = tokens_BT - lax.axis_index(MODEL) * out_features(table_VD)
    x_BTD = embed_rows(table_VD, local_BT, dtype)
    return lax.psum(x_BTD, MODEL)  # partial sums over own ids -> replicated


def queries(x: Array, layer: Layer, step: Step, config: Config) -> Queries:
    """The queries of x [B, T, D]."""
    (B, T, _), U, R = x.shape, config.qk_nope_head_dim, config.qk_rope_head_dim
    if layer.wq_a is not None and layer.q_norm is not None:
        x = rms_norm(linear(x, layer.wq_a), layer.q_norm, INNER_EPS)  # [B, T, Q]
    q_BTNH = linear(x, layer.wq).reshape(B, T, -1, U + R)
    return Queries(q_BTNH[..., :U], rotate(q_BTNH[..., U:], step))


def latents(x_BTD: Array, layer: Layer, step: Step, config: Config) -> Array:
    """What is cached of each token: its latent and its rotated key, [B, T, C + R]."""
    latent_BTC, k_BTR = jnp.split(linear(x_BTD, layer.wkv_a), [config.kv_lora_rank], axis=-1)
    latent_BTC = rms_norm(latent_BTC, layer.kv_norm, INNER_EPS)
    k_BTR = rotate(k_BTR[:, :, None], step)[:, :, 0]  # as one head
    return jnp.concatenate([latent_BTC, k_BTR], axis=-1)


def latent_attention(
    q: Queries, rows_SW: Array, position_T: Array, position_S: Array, layer: Layer, config: Config
) -> Array:
    """The definition of attention, [T, N, J] of a slot, in float32: in bfloat16 a score near 50
    would be off by up to 0.125, and its probability by 13 %. implementation="reference" runs this.
    Otherwise `expanded` or `absorbed` computes the same. A query sees positions up to its own."""
    C, U, R = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
    latent_SC, k_rope_SR = rows_SW[:, :C], rows_SW[:, C : C + R]
    kv = linear(latent_SC, layer.wkv).reshape(len(rows_SW), -1, U + config.v_head_dim)
    k_SNU, v_SNJ = jnp.split(kv, [U], axis=-1)
    score_NTS = jnp.einsum("tnu,snu->nts", q.nope, k_SNU)
    score_NTS = (score_NTS + jnp.einsum("tnr,sr->nts", q.rope, k_rope_SR)) * softmax_scale(config)
    seen_TS = position_S <= position_T[:, None]
    p_NTS = jax.nn.softmax(jnp.where(seen_TS, score_NTS, -jnp.inf))
    return jnp.einsum("nts,snj->tnj", p_NTS, v_SNJ)


def attention(
    x_BTD: Array, layer: Layer, cache: RowCache, step: Step, config: Config
) -> tuple[Array, RowCache]:
    """Appends T tokens to the cache. Each attends to all positions up to its own. Returns the
    output [B, T, D], summed over the device's heads, and the cache. If T is at most FEW_QUERIES
    (8), most time goes into reading the cache, and `absorbed` runs, which makes no keys. If T is
    larger, most time goes into arithmetic, and `expanded` runs: a score then costs U + R
    multiplications in place of C + R."""
    B, T, _ = x_BTD.shape
    q = queries(x_BTD, layer, step, config)
    cache = append_latent(cache, latents(x_BTD, layer, step, config), step.end_B - T)
    if step.implementation == Impl.REFERENCE:
        definition = partial(latent_attention, layer=layer, config=config)
        o_BTNJ = attend_by(definition, q, cache, step.end_B)
    else:
        o_BTNJ = (absorbed if T <= FEW_QUERIES else expanded)(q, layer, cache, step, config)
    return linear(o_BTNJ.reshape(B, T, -1), layer.wo), cache


def absorbed(q: Queries, layer: Layer, cache: RowCache, step: Step, config: Config) -> Array:
    """Applies wk to the query, and wv to the result. Returns [B, T, N, J]. The latent of a position
    is its value; the latent and k_rope are its key."""
    U = config.qk_nope_head_dim
    q_BTNC = headwise(q.nope, layer.wkv, slice(U), transpose=True)
    o_BTNC = attend_latent(
        jnp.concatenate([q_BTNC, q.rope], axis=-1),
        cache,
        step.end_B,
        step.implementation,
        v_dim=config.kv_lora_rank,
        scale=softmax_scale(config),
    )
    return headwise(o_BTNC, layer.wkv, slice(U, None))


def expanded(q: Queries, layer: Layer, cache: RowCache, step: Step, config: Config) -> Array:
    """Makes keys and values of the device's own heads, of a part of the positions at a time.
    Returns [B, T, N, J]."""
    C, U, R = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim

    def keys_and_values(rows_BSW: Array) -> tuple[Array, Array]:
        B, S, _ = rows_BSW.shape
        kv = linear(rows_BSW[..., :C], layer.wkv).reshape(B, S, -1, U + config.v_head_dim)
        k_BNSU, v_BNSJ = jnp.split(kv.swapaxes(1, 2), [U], axis=-1)
        k_rope = jnp.broadcast_to(rows_BSW[:, None, :, C : C + R], (*k_BNSU.shape[:3], R))
        return jnp.concatenate([k_BNSU, k_rope], axis=-1), v_BNSJ

    return attend_expanded(
        jnp.concatenate(q, axis=-1),
        cache,
        keys_and_values,
        step.end_B,
        step.implementation,
        scale=softmax_scale(config),
    )


def mlp(x_BTD: Array, w: Mlp) -> Array:
    """Partial sums over own F."""
    h_BTF = jax.nn.silu(linear(x_BTD, w.w_gate)) * linear(x_BTD, w.w_up)
    return linear(h_BTF, w.w_down)


def route(x_MD: Array, w: Moe, config: Config) -> tuple[Array, Array]:
    """The X experts of each token: their weights and their indices in the router, both [M, X].
    Scores are float32. The bias only helps to choose experts."""
    logits_ME = linear(x_MD.astype(jnp.float32), w.router.astype(jnp.float32))
    s_ME = jax.nn.sigmoid(logits_ME)
    choice_ME = s_ME + w.b_router
    expert_MX = lax.top_k(choice_ME, config.num_experts_per_tok)[1]
    weight_MX = jnp.take_along_axis(s_ME, expert_MX, axis=1)
    if config.norm_topk_prob:
        weight_MX = weight_MX / (weight_MX.sum(axis=-1, keepdims=True) + 1e-20)  # never 0 / 0
    return (weight_MX * config.routed_scaling_factor).astype(x_MD.dtype), expert_MX


def experts(x: Array, w: Mlp, dot: Callable[..., Array]) -> Array:
    """[rows, D] -> [rows, D]: the MLP of each row's expert. dot(x, w) uses that expert's matrix."""
    return dot(jax.nn.silu(dot(x, w.w_gate)) * dot(x, w.w_up), w.w_down)


def mixture(x_MD: Array, weight_MX: Array, expert_MX: Array, w: Mlp) -> Array:
    """The definition of the weighted sum of a token's experts: for each expert of the device, with
    index e in the router, y_MD += weight * expert[e](x_MD). implementation="reference" runs it."""

    def of_expert(e: Array, own: Mlp) -> Array:
        weight_M = jnp.where(expert_MX == e, weight_MX, 0).sum(axis=1)
        return weight_M[:, None] * experts(x_MD, own, dot_one)

    return sum_over_experts(of_expert, w)


def moe(x_BTD: Array, w: Moe, step: Step, config: Config) -> Array:
    """The shared MLP, plus the weighted sum of each token's experts: a partial sum, over the
    device's own experts and F. The M * X rows are sorted by expert; rows of other devices' experts
    come out as zeros."""
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
    weight_MX, expert_MX = route(x_MD, w, config)
    if step.implementation == Impl.REFERENCE:
        y_MD = mixture(x_MD, weight_MX, expert_MX, w.experts)
    else:
        groups = group_by_expert(expert_MX, num_experts(w.experts))
        dot = partial(ragged_dot, group_sizes_E=groups.sizes, implementation=step.implementation)
        y_MXD = experts(x_MD[groups.token], w.experts, dot)[groups.row]
        y_MD = (y_MXD * weight_MX[..., None]).sum(axis=1)
    return y_MD.reshape(x_BTD.shape) + mlp(x_BTD, w.shared)


@partial(jax.jit, static_argnames="config")
def block(
    x_BTD: Array, layer: Layer, cache: RowCache, step: Step, config: Config
) -> tuple[Array, RowCache]:
    h_BTD = rms_norm(x_BTD, layer.attn_norm, config.rms_norm_eps)
    o_BTD, cache = attention(h_BTD, layer, cache, step, config)
    x_BTD = x_BTD + lax.psum(o_BTD, MODEL)  # partial sums over own heads -> replicated
    h_BTD = rms_norm(x_BTD, layer.mlp_norm, config.rms_norm_eps)
    w = layer.mlp
    o_BTD = moe(h_BTD, w, step, config) if isinstance(w, Moe) else mlp(h_BTD, w)
    x_BTD = x_BTD + lax.psum(o_BTD, MODEL)  # partial sums over own experts and F -> replicated
    return x_BTD, cache


def forward(
    weights: Weights,
    cache: tuple[RowCache, ...],
    tokens_BT: Array,
    end_B: Array,
    config: Config,
    implementation: str = AUTO,
    last_B: Array | None = None,
) -> tuple[Array, tuple[RowCache, ...]]:
    """Appends T tokens to each slot, the last at position end_B - 1; skips a slot if its end_B is
    0. Returns float32 logits [B, T, V] and the cache; V is the device's part of the vocabulary,
    with padding. With last_B, only token last_B[b] of each slot gets logits, [B, V].

    For a loss (docs/library.md), call `logits` of common/serving/score.py with
    implementation="reference", which is differentiable if the weights are floats."""
    position_BT = end_B[:, None] + jnp.arange(-tokens_BT.shape[1], 0)
    step = Step(end_B, *rotary(position_BT, config), Impl(implementation))
    x_BTD, caches = embed(weights.embed, tokens_BT, weights.norm.dtype), []
    # In a `lax.scan` XLA would copy each layer's weights. `block` is traced once per kind of layer.
    for layer, layer_cache in zip(weights.layers, cache, strict=True):
        x_BTD, layer_cache = block(x_BTD, layer, layer_cache, step, config)
        caches.append(layer_cache)
    x = x_BTD if last_B is None else x_BTD[jnp.arange(len(last_B)), last_B]
    x = rms_norm(x, weights.norm, config.rms_norm_eps)
    head = weights.embed if weights.head is None else weights.head
    return linear(x, head, jnp.float32), tuple(caches)


def extend(
    weights: Weights,
    state: DecodeState,
    tokens_BT: Array,
    count_B: Array,
    config: Config,
    mesh: Mesh,
    implementation: str = AUTO,
) -> DecodeState:
    """Appends the first count_B of T tokens (int32) to each slot, and samples the next. The sum of
    length and count must not exceed the capacity. A count of 0 leaves a slot as it is. Tokens past
    count_B are padding. They come after the real tokens, which do not see them, and tokens of later
    steps overwrite them. Past the capacity they are dropped."""

    def run(weights: Weights, state: DecodeState, tokens_BT: Array, count_B: Array) -> DecodeState:
        end_B = jnp.where(count_B > 0, state.length_B + tokens_BT.shape[1], 0)
        logits_BV, cache = forward(
            weights, state.cache, tokens_BT, end_B, config, implementation, count_B - 1
        )
        length_B = state.length_B + count_B
        token_B = sample(logits_BV, state.sampling, length_B, config.vocab_size, MODEL)
        token_B = jnp.where(count_B > 0, token_B, state.token_B)
        return DecodeState(cache, length_B, token_B, state.sampling)

    specs = (specs_like(weights, weight_layout(config)), STATE_SPEC, P(DATA), P(DATA))
    check = implementation in KERNEL_FREE  # shard_map cannot check the results of a Pallas kernel
    sharded = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=STATE_SPEC, check_vma=check)
    return sharded(weights, state, tokens_BT, count_B)


STATIC = ("config", "mesh", "implementation")
# `serve` prefills a prompt in pieces of 512 tokens, and pads the last piece to a power of two, so
# that few values of T are compiled. The token sampled after the last piece begins the reply.
prefill = jax.jit(extend, static_argnames=STATIC, donate_argnames="state")


def insert(state: DecodeState, prefilled: DecodeState, slot_B: Array, *, mesh: Mesh) -> DecodeState:
    """Copies slot b of `prefilled` (cache, length, token, sampling) into slot slot_B[b] of the
    donated `state`; -1 copies nothing. b and slot_B[b] are local to a data shard. ValueError if the
    states differ in mesh, capacity or dtype of cache. Not for use inside jit."""
    return copy_slots(state, prefilled, slot_B, STATE_SPEC, mesh)


@partial(jax.jit, static_argnames=STATIC, donate_argnames="state")
def generate(
    weights: Weights, state: DecodeState, *, config: Config, mesh: Mesh, implementation: str = AUTO
) -> DecodeState:
    """Appends the newest token of each slot, and samples the next. Empty slots and full ones, whose
    length is the capacity, stay as they are. `state` is donated."""
    is_on_B = (state.length_B > 0) & (state.length_B < capacity_of(state.cache))
    tokens_BT, count_B = state.token_B[:, None], is_on_B.astype(jnp.int32)
    return extend(weights, state, tokens_BT, count_B, config, mesh, implementation)


# ---- what a loader needs: config.json, shapes and partitions, empty states, published names


# Either all of these are published in fp8, or none.
PROJECTIONS = {
    *("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
}


def config_from_hf(hf: dict[str, Any]) -> Config:
    """Config of a config.json. A field unknown here and in common/config.py is a ValueError."""
    if is_multimodal := hf.get("model_type") == "kimi_k25":
        hf = text_config(hf)
        if hf["model_type"] == "deepseek_v3":  # transformers' name for it
            hf["model_type"] = "kimi_k2"
    # Refused: other router scores, other ways to choose experts, experts in groups, another
    # activation, biases, rotation of halves, fewer key/value heads, dense layers among those with
    # experts (moe_layer_freq), extra layers that draft tokens (num_nextn_predict_layers).
    accepted = dict(scoring_func="sigmoid", topk_method="noaux_tc", n_group=1, topk_group=1)
    accepted |= dict(hidden_act=SILU, attention_bias=False, moe_layer_freq=1, rope_interleave=True)
    accepted |= dict(num_key_value_heads=hf.get("num_attention_heads"))
    fields = read_rope(Config, hf, {"yarn": Yarn}, theta=10000.0) | dict(multimodal=is_multimodal)
    packing = read_packing(hf, others=("fp8",))
    fields |= dict(packing=packing, fp8=packing is None and is_fp8(hf, PROJECTIONS))
    return read_config(
        Config,
        hf,
        model_types=("kimi_k2", "kimi_k25"),
        fields_read=fields,
        accepted=accepted | dict(num_nextn_predict_layers=0),
        ignored=("aux_loss_alpha", "ep_size", "head_dim", "qk_head_dim", "seq_aux"),
    )


# Slots are split over `data`, and the cache of each layer also over `tensor`, by positions.
SLOTS = P(DATA)
STATE_SPEC = DecodeState(cache=P(DATA, None, TENSOR), length_B=SLOTS, token_B=SLOTS, sampling=SLOTS)


def weight_layout(config: Config, shards: Shards = UNSPLIT) -> Weights:
    """Shape and partition of every weight. If `shards` has several parts, zeros pad each split
    dimension until its parts are equal. In fp8 each part consists of whole blocks. The number of
    experts must be a multiple of the axis `expert`."""
    c, n, fp8, J = config, shards.model, Fp8 if config.fp8 else None, config.v_head_dim
    D, E, V = c.hidden_size, c.n_routed_experts, round_up(c.vocab_size, n)
    Q, C, R, U = c.q_lora_rank, c.kv_lora_rank, c.qk_rope_head_dim, c.qk_nope_head_dim
    N = len(split_heads(c.num_attention_heads, c.num_attention_heads, n).query)
    while fp8 and n > 1 and any(N // n * x % FP8_BLOCK for x in (U + R, U + J, J)):
        N += n  # heads of zeros, until each device's parts of wq, wkv and wo are whole blocks
    whole, out, into = P(None, None), P(MODEL, None), P(None, MODEL)  # split by output, or by input

    def width(F: int, parts: int) -> int:
        return round_up(F, parts * FP8_BLOCK if fp8 and parts > 1 else parts)

    def dense(F: int) -> Mlp:
        return Mlp(
            w_gate=matrix((width(F, n), D), out, fp8),
            w_up=matrix((width(F, n), D), out, fp8),
            w_down=matrix((D, width(F, n)), into, fp8),
        )

    F = width(c.moe_intermediate_size, shards.tensor)
    moe = Moe(
        router=array((E, D)),
        b_router=bias((E,), dtype=jnp.float32),
        experts=Mlp(
            w_gate=stack((E, F, D), P(EXPERT, TENSOR, None), fp8),
            w_up=stack((E, F, D), P(EXPERT, TENSOR, None), fp8),
            w_down=stack((E, D, F), P(EXPERT, None, TENSOR), fp8),
        ),
        shared=dense(c.n_shared_experts * c.moe_intermediate_size),
    )
    layer = Layer(
        attn_norm=norm(D),
        wq_a=matrix((Q, D), whole, fp8) if Q else None,
        q_norm=norm(Q) if Q else None,
        wq=matrix((N * (U + R), Q or D), out, fp8),
        wkv_a=matrix((C + R, D), whole, fp8),
        kv_norm=norm(C),
        wkv=headwise_matrix((N * (U + J), C), out, fp8),
        wo=matrix((D, N * J), into, fp8),
        mlp_norm=norm(D),
        mlp=moe,
    )
    first = layer._replace(mlp=dense(c.intermediate_size))
    layers = range(c.num_hidden_layers)
    return Weights(
        embed=vocab_rows((V, D), out),
        layers=tuple(first if i < c.first_k_dense_replace else layer for i in layers),
        norm=norm(D),
        head=None if c.tie_word_embeddings else vocab_rows((V, D), out),
    )


def init_state(
    config: Config, slots: int, capacity: int, dtype: DTypeLike, shards: Shards = UNSPLIT
) -> DecodeState:
    """Empty slots of at least `capacity` positions, with a cache of `dtype`: a float, fp8, int8."""
    shape = (slots, capacity, config.kv_lora_rank + config.qk_rope_head_dim)
    return DecodeState(
        cache=tuple(
            empty_latent(shape, dtype, shards.tensor) for _ in range(config.num_hidden_layers)
        ),
        length_B=jnp.zeros(slots, jnp.int32),
        token_B=jnp.zeros(slots, jnp.int32),
        sampling=sampling_params(slots),
    )


def checkpoint_table(config: Config, shards: Shards = UNSPLIT) -> Table:
    """Published name -> its weight; `*` is any number. An unknown tensor is an error; so is a
    weight that no tensor fills. None: not loaded. `Same("x")`: equal to x, or absent."""
    q_proj = "q_b_proj" if config.q_lora_rank else "q_proj"
    table: Table = {
        "model.embed_tokens.weight": "embed",
        "model.layers.*.input_layernorm.weight": "layers.*.attn_norm",
        "model.layers.*.self_attn.q_a_proj.weight": "layers.*.wq_a",
        "model.layers.*.self_attn.q_a_layernorm.weight": "layers.*.q_norm",
        f"model.layers.*.self_attn.{q_proj}.weight": "layers.*.wq",
        "model.layers.*.self_attn.kv_a_proj_with_mqa.weight": "layers.*.wkv_a",
        "model.layers.*.self_attn.kv_a_layernorm.weight": "layers.*.kv_norm",
        "model.layers.*.self_attn.kv_b_proj.weight": "layers.*.wkv",
        "model.layers.*.self_attn.o_proj.weight": "layers.*.wo",
        "model.layers.*.post_attention_layernorm.weight": "layers.*.mlp_norm",
        "model.layers.*.mlp.gate_proj.weight": "layers.*.mlp.w_gate",
        "model.layers.*.mlp.up_proj.weight": "layers.*.mlp.w_up",
        "model.layers.*.mlp.down_proj.weight": "layers.*.mlp.w_down",
        "model.layers.*.mlp.gate.weight": "layers.*.mlp.router",
        "model.layers.*.mlp.gate.e_score_correction_bias": "layers.*.mlp.b_router",
        "model.layers.*.mlp.experts.*.gate_proj.weight": "layers.*.mlp.experts.w_gate",
        "model.layers.*.mlp.experts.*.up_proj.weight": "layers.*.mlp.experts.w_up",
        "model.layers.*.mlp.experts.*.down_proj.weight": "layers.*.mlp.experts.w_down",
        "model.layers.*.mlp.shared_experts.gate_proj.weight": "layers.*.mlp.shared.w_gate",
        "model.layers.*.mlp.shared_experts.up_proj.weight": "layers.*.mlp.shared.w_up",
        "model.layers.*.mlp.shared_experts.down_proj.weight": "layers.*.mlp.shared.w_down",
        "model.norm.weight": "norm",
        "lm_head.weight": Same("embed") if config.tie_word_embeddings else "head",
        "model.layers.*.self_attn.rotary_emb.inv_freq": None,
    }
    # In fp8 each projection is stored as two tensors: values, and the scales of their blocks.
    table = fp8_table(table, PROJECTIONS, shards) if config.fp8 else table
    return multimodal(table, ("vision_tower", "mm_projector")) if config.multimodal else table

"""Kimi K2 in one file: DeepSeek V3 with 384 experts in one group and half the heads; so llama3 with
attention that caches one latent vector a token, and with MLPs of which each token chooses 8.

Kimi K2: Open Agentic Intelligence, arXiv 2507.20534. What differs from llama3, per token and head
n, is what differs in DeepSeek V3 (arXiv 2412.19437), without its groups of experts:

    latent, k_rope = norm(L x), rope(K x)          cached, C and R numbers for all heads
    q_nope, q_rope = Q_n[n] c, rope(Q_r[n] c)      c = norm(Q x), a bottleneck for all heads
    q . k = q_nope . (W_k[n] latent) + q_rope . k_rope        and v = W_v[n] latent
          = (W_k[n]^T q_nope) . latent + q_rope . k_rope     so decoding never makes keys
    x += shared(norm(x)) + sum over a token's X experts e of p[e] * expert[e](norm(x))
                                                   s = sigmoid(router(norm(x))); p are the X with
                                                   the largest s + bias, scaled without the bias
    rope turns neighbours; YaRN, which scales q . k too; fp8 matrices stay in fp8

Dimensions: B batch or slots, T query tokens, M = B * T, S cache positions, D model, N heads, Q and
C ranks of queries and latents, R rotated numbers of a head, H those before them and R, W = C + R up
to a multiple of 128, F MLP width, E experts, X of them a token has, V vocabulary.
Inside `shard_map` N, F, E and V are what one device holds (the router knows all E), B is its slots,
and S in a cache its positions.

Devices form a mesh of three axes. Slots are split over `data`. Heads, dense and shared MLPs and
vocabulary are split over MODEL, the axes `expert` and `tensor` together; experts over `expert`, and
each expert over `tensor`. The positions of a cache are split over `tensor`; what makes latents and
queries out of x is whole on every device. One step of a device sends, over MODEL:

    all-reduce [B, T, D]   once for the embedding and twice a layer, in the model's dtype
    all-reduce [B]         twice, of 4 bytes: the largest logit, and the lowest id that has it
    all-reduce [3, B]      35 times at most, of 4 bytes, to draw where a slot has a temperature

and over `tensor`, if that is more than 1, in each layer: to decode, the queries [B, T, N, C + R],
float32 [B, T, N] and what attention made of them [B, T, N, C]; to prefill, the cache [B, S, W].

Layers are a tuple and a Python loop: `lax.scan` over stacked layers would copy the weights of each
layer, on CPU always and on TPU where a kernel reads them. `block` is jitted so that it is traced
once for each kind of layer.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from common.cache import (
    RowCache,
    append_latent,
    attend_latent,
    check_insert,
    copy_rows,
    empty_latent,
    latent_rows,
)
from common.config import SILU, is_fp8, read_config, read_rope
from common.experts import group_by_expert, num_experts
from common.kernels.decode_attention import FEW_QUERIES
from common.kernels.dispatch import KERNEL_FREE, Impl
from common.kernels.prefill_attention import prefill_attention
from common.kernels.ragged_dot import ragged_dot
from common.names import Same, Table, fp8_table
from common.quant import FP8_BLOCK, Fp8, Matrix, embed_rows, headwise, linear, out_features
from common.ranges import Above1, AtLeast1, Count, Even, Index, Positive
from common.sampling import Sampling, sample, sampling_params
from common.sharding import DATA, EXPERT, MODEL, TENSOR, UNSPLIT, P, Shards, round_up, split_heads
from common.weights import array, bias, heads, matrix, norm, specs_like, stack

Array = jax.Array

INNER_EPS = 1e-6  # of the norms in attention, whatever rms_norm_eps says


class Yarn(NamedTuple):
    """`rope_scaling` of type yarn."""

    factor: AtLeast1
    original_max_position_embeddings: Count
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None  # multiplies cos and sin
    mscale: Positive | None = None
    mscale_all_dim: Positive | None = None
    truncate: bool = True


class Config(NamedTuple):
    """The fields of config.json that shape the computation, under their published names."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    q_lora_rank: Count | None  # None: queries come from x in one matrix
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Even
    v_head_dim: Count
    rope_theta: Above1
    rope_scaling: Yarn | None
    n_routed_experts: Count
    n_shared_experts: Count
    num_experts_per_tok: Count
    moe_intermediate_size: Count
    first_k_dense_replace: Index  # layers before the first with experts
    norm_topk_prob: bool
    routed_scaling_factor: Positive
    fp8: bool  # quantization_config: the projections are published in 8-bit floats
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: Count = 4096


class Mlp(NamedTuple):
    """One MLP; or all experts of a layer, with one more axis, E, in front."""

    w_gate: Matrix  # [F, D]
    w_up: Matrix  # [F, D]
    w_down: Matrix  # [D, F]


class Moe(NamedTuple):
    router: Array  # [E, D]
    b_router: Array  # float32 [E], for the choice alone
    experts: Mlp
    shared: Mlp


class Layer(NamedTuple):
    """A Matrix is an array, or its form in int8, fp8 or 4 bits: `linear` takes any."""

    attn_norm: Array  # [D]
    wq_a: Matrix | None  # [Q, D]
    q_norm: Array | None  # [Q]
    wq: Matrix  # [N * H, Q], or [N * H, D]
    wkv_a: Matrix  # [C + R, D]
    kv_norm: Array  # [C]
    wkv: Matrix  # [N * (H - R + v_head_dim), C]: each head's W_k, then its W_v
    wo: Matrix  # [D, N * v_head_dim]
    mlp_norm: Array  # [D]
    mlp: Mlp | Moe


class Weights(NamedTuple):
    embed: Matrix  # [V, D]
    layers: tuple[Layer, ...]
    norm: Array  # [D]
    head: Matrix | None  # [V, D]; None where it is the embedding


class DecodeState(NamedTuple):
    """B slots, decoded together. A slot of length 0 is empty. Nothing reads what a cache holds at
    or past a slot's length: of a finished slot `serve` sets the length to 0, and clears nothing."""

    cache: tuple[
        RowCache, ...
    ]  # of all heads together [latent | rotated key | zeros]: [B, 1, S, W]
    length_B: Array  # int32: tokens in the cache
    token_B: Array  # int32: the newest token, not in the cache yet
    sampling: Sampling  # arrays of [B]


class Step(NamedTuple):
    """What all layers of one step share."""

    end_B: Array  # int32: the position after the last of the T tokens, padding too; 0: append none
    cos: Array  # float32 [B, T, 1, R / 2]
    sin: Array


class Queries(NamedTuple):
    """Of own heads."""

    nope: Array  # [B, T, N, H - R]
    rope: Array  # rotated [B, T, N, R]


def rms_norm(x: Array, weight_D: Array, eps: float) -> Array:
    """x / rms(x) in float32, then times the weight in the model's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * weight_D


def yarn_frequencies(frequency: np.ndarray, theta: float, yarn: Yarn) -> np.ndarray:
    """YaRN, arXiv 2309.00071: pairs with more than beta_fast rotations in the original context keep
    their frequency, those with fewer than beta_slow get 1 / factor of it, and a ramp lies between.
    """
    R = 2 * len(frequency)  # numbers of a head that are rotated

    def pair(rotations: float) -> float:
        """The index of the pair that makes `rotations` in the original context; not whole."""
        context = yarn.original_max_position_embeddings
        return R * math.log(context / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low, high = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, R - 1)  # the published code has R here, not R / 2
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(R // 2) - low) / width, 0, 1)
    return (frequency * (1 - ramp) + frequency / yarn.factor * ramp).astype(np.float32)


def rope_frequencies(config: Config) -> np.ndarray:
    """Radians per position of each pair of neighbours (2 i, 2 i + 1), [R / 2]."""
    R = config.qk_rope_head_dim
    exponent = np.arange(0, R, 2, dtype=np.float32) / R
    frequency = (1.0 / np.float32(config.rope_theta) ** exponent).astype(np.float32)
    if config.rope_scaling is None:
        return frequency
    return yarn_frequencies(frequency, config.rope_theta, config.rope_scaling)


def magnitude(factor: float, mscale: float) -> float:
    """YaRN's growth of attention with the context: 1 where that is not stretched."""
    return 0.1 * mscale * math.log(factor) + 1


def attention_factor(yarn: Yarn | None) -> float:
    """What YaRN multiplies cos and sin by."""
    if yarn is None:
        return 1.0
    if yarn.attention_factor is not None:
        return yarn.attention_factor
    if yarn.mscale and yarn.mscale_all_dim:
        return magnitude(yarn.factor, yarn.mscale) / magnitude(yarn.factor, yarn.mscale_all_dim)
    return magnitude(yarn.factor, 1)


def softmax_scale(config: Config) -> float:
    """What multiplies q . k, all H numbers of it: YaRN's second factor is in it, squared."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    yarn = config.rope_scaling
    if yarn is None or not yarn.mscale_all_dim:
        return scale
    return scale * magnitude(yarn.factor, yarn.mscale_all_dim) ** 2


def rotary(position_BT: Array, config: Config) -> tuple[Array, Array]:
    """cos and sin of each position's angles, float32 [B, T, 1, R / 2]."""
    angle = position_BT[..., None, None].astype(jnp.float32) * rope_frequencies(config)
    factor = attention_factor(config.rope_scaling)
    # Else XLA's CPU compiler computes them again in each layer, for each head.
    return lax.optimization_barrier((jnp.cos(angle) * factor, jnp.sin(angle) * factor))


def rotate(x_BTNR: Array, step: Step) -> Array:
    """Rotates element 2 i with element 2 i + 1, by the angle of their position. Of the result the
    even ones stand before the odd ones, in queries and keys alike, which no product notices."""
    cos, sin = step.cos.astype(x_BTNR.dtype), step.sin.astype(x_BTNR.dtype)
    a, b = x_BTNR[..., 0::2], x_BTNR[..., 1::2]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def embed(table_VD: Matrix, tokens_BT: Array, dtype: DTypeLike) -> Array:
    """Each device looks up the ids that it holds, and has zeros for the others."""
    local_BT = tokens_BT - lax.axis_index(MODEL) * out_features(table_VD)
    x_BTD = embed_rows(table_VD, local_BT, dtype)
    return lax.psum(x_BTD, MODEL)  # partial: own ids -> replicated


def queries(x_BTD: Array, layer: Layer, step: Step, config: Config) -> Queries:
    if layer.wq_a is not None and layer.q_norm is not None:
        x_BTD = rms_norm(linear(x_BTD, layer.wq_a), layer.q_norm, INNER_EPS)
    nope = config.qk_nope_head_dim
    q_BTNH = linear(x_BTD, layer.wq)
    q_BTNH = q_BTNH.reshape(*x_BTD.shape[:2], -1, nope + config.qk_rope_head_dim)
    return Queries(q_BTNH[..., :nope], rotate(q_BTNH[..., nope:], step))


def latents(x_BTD: Array, layer: Layer, step: Step, config: Config) -> Array:
    """What is cached of each token for all heads, [latent | rotated key]: [B, T, C + R]."""
    C, row_BTC = config.kv_lora_rank, linear(x_BTD, layer.wkv_a)
    latent_BTC = rms_norm(row_BTC[..., :C], layer.kv_norm, INNER_EPS)
    k_BTR = rotate(row_BTC[:, :, None, C:], step)[:, :, 0]
    return jnp.concatenate([latent_BTC, k_BTR], axis=-1)


def attention(
    x_BTD: Array, layer: Layer, cache: RowCache, step: Step, config: Config, implementation: Impl
) -> tuple[Array, RowCache]:
    """Appends T tokens to the cache, and each attends to all up to itself. Returns the sum over own
    heads [B, T, D], and the cache. Few queries attend to the latents as they are (absorbed), many
    to keys and values made of them (expanded): the same numbers. Scores and softmax are float32."""
    B, T, _ = x_BTD.shape
    q = queries(x_BTD, layer, step, config)
    cache = append_latent(cache, latents(x_BTD, layer, step, config), step.end_B - T)
    attend = absorbed if T <= FEW_QUERIES else expanded
    o_BTNH = attend(q, layer, cache, step, config, implementation)
    return linear(o_BTNH.reshape(B, T, -1), layer.wo), cache


def absorbed(
    q: Queries, layer: Layer, cache: RowCache, step: Step, config: Config, implementation: Impl
) -> Array:
    """W_k goes to the query and W_v to the result: attention with C + R numbers in the place of
    keys, of which the first C are the values too. [B, T, N, v_head_dim]."""
    k_rows, v_rows = slice(config.qk_nope_head_dim), slice(config.qk_nope_head_dim, None)
    q_latent = headwise(q.nope, layer.wkv, k_rows, transpose=True)
    o_BTNC = attend_latent(
        jnp.concatenate([q_latent, q.rope], axis=-1),
        cache,
        step.end_B,
        v_dim=config.kv_lora_rank,
        scale=softmax_scale(config),
        implementation=implementation,
    )
    return headwise(o_BTNC, layer.wkv, v_rows)


def expanded(
    q: Queries, layer: Layer, cache: RowCache, step: Step, config: Config, implementation: Impl
) -> Array:
    """Every device makes the keys and values of its own heads of all positions of the cache, which
    the devices of `tensor` gather. [B, T, N, v_head_dim]."""
    C, nope = config.kv_lora_rank, config.qk_nope_head_dim
    rows_BSC = latent_rows(cache, q.nope.dtype)  # own positions -> all
    B, S, _ = rows_BSC.shape
    kv_BNSH = linear(rows_BSC[..., :C], layer.wkv)
    kv_BNSH = kv_BNSH.reshape(B, S, -1, nope + config.v_head_dim).swapaxes(1, 2)
    R = q.rope.shape[-1]
    k_rope = jnp.broadcast_to(rows_BSC[:, None, :, C : C + R], (B, kv_BNSH.shape[1], S, R))
    return prefill_attention(
        jnp.concatenate(q, axis=-1),
        jnp.concatenate([kv_BNSH[..., :nope], k_rope], axis=-1),
        kv_BNSH[..., nope:],
        step.end_B,
        scale=softmax_scale(config),
        implementation=implementation,
    )


def mlp(x_BTD: Array, w: Mlp) -> Array:
    """Partial sums over own part of F."""
    h_BTF = jax.nn.silu(linear(x_BTD, w.w_gate)) * linear(x_BTD, w.w_up)
    return linear(h_BTF, w.w_down)


def route(x_MD: Array, w: Moe, config: Config) -> tuple[Array, Array]:
    """The weights of each token's experts, and which of all E they are: both [M, X]. In float32.

    The bias decides which experts are chosen, and is no part of their weights.
    """
    logits_ME = linear(x_MD.astype(jnp.float32), w.router.astype(jnp.float32))
    s_ME = jax.nn.sigmoid(logits_ME)
    expert_MX = lax.top_k(s_ME + w.b_router, config.num_experts_per_tok)[1]
    weight_MX = jnp.take_along_axis(s_ME, expert_MX, axis=1)
    if config.norm_topk_prob:
        weight_MX = weight_MX / (weight_MX.sum(axis=-1, keepdims=True) + 1e-20)
    return (weight_MX * config.routed_scaling_factor).astype(x_MD.dtype), expert_MX


def experts(x: Array, w: Mlp, dot: Callable[..., Array], config: Config) -> Array:
    """Each row through the MLP of its expert; `dot` knows whose row it is."""
    return dot(jax.nn.silu(dot(x, w.w_gate)) * dot(x, w.w_up), w.w_down)


def moe(x_BTD: Array, w: Moe, config: Config, implementation: Impl) -> Array:
    """Every device routes all tokens of its slots, and computes what its own experts and its part
    of the shared MLP add to them: partial sums over own experts and own part of F."""
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
    weight_MX, expert_MX = route(x_MD, w, config)
    groups = group_by_expert(expert_MX, num_experts(w.experts))
    dot = partial(ragged_dot, group_sizes_E=groups.sizes, implementation=implementation)
    rows = x_MD[groups.token]  # [M * X, D], those of an expert one after the other
    y_MXD = experts(rows, w.experts, dot, config)[groups.row]
    y_MD = (y_MXD * weight_MX[..., None]).sum(axis=1)
    return y_MD.reshape(x_BTD.shape) + mlp(x_BTD, w.shared)


@partial(jax.jit, static_argnames=("config", "implementation"))
def block(
    x_BTD: Array, layer: Layer, cache: RowCache, step: Step, config: Config, implementation: Impl
) -> tuple[Array, RowCache]:
    h_BTD = rms_norm(x_BTD, layer.attn_norm, config.rms_norm_eps)
    o_BTD, cache = attention(h_BTD, layer, cache, step, config, implementation)
    x_BTD = x_BTD + lax.psum(o_BTD, MODEL)  # partial: own heads -> replicated
    h_BTD = rms_norm(x_BTD, layer.mlp_norm, config.rms_norm_eps)
    if isinstance(layer.mlp, Moe):
        o_BTD = moe(h_BTD, layer.mlp, config, implementation)
    else:
        o_BTD = mlp(h_BTD, layer.mlp)
    x_BTD = x_BTD + lax.psum(o_BTD, MODEL)  # partial: own experts, own part of F -> replicated
    return x_BTD, cache


def hidden(
    weights: Weights,
    cache: tuple[RowCache, ...],
    tokens_BT: Array,
    end_B: Array,
    config: Config,
    implementation: Impl,
) -> tuple[Array, tuple[RowCache, ...]]:
    """What the last layer gives, normalised [B, T, D]; and the cache with the tokens appended."""
    step = Step(end_B, *rotary(positions(tokens_BT, end_B), config))
    x_BTD, caches = embed(weights.embed, tokens_BT, weights.norm.dtype), []
    for layer, layer_cache in zip(weights.layers, cache, strict=True):
        x_BTD, layer_cache = block(x_BTD, layer, layer_cache, step, config, implementation)
        caches.append(layer_cache)
    return rms_norm(x_BTD, weights.norm, config.rms_norm_eps), tuple(caches)


def positions(tokens_BT: Array, end_B: Array) -> Array:
    T = tokens_BT.shape[1]
    return end_B[:, None] - T + jnp.arange(T)


def logits(x: Array, weights: Weights) -> Array:
    """float32 logits [.., V] of the device's part of the vocabulary."""
    return linear(x, weights.embed if weights.head is None else weights.head, jnp.float32)


def forward(
    weights: Weights,
    cache: tuple[RowCache, ...],
    tokens_BT: Array,
    end_B: Array,
    config: Config,
    implementation: Impl = None,
    last_B: Array | None = None,
) -> tuple[Array, tuple[RowCache, ...]]:
    """One device's part of a step of T tokens a slot, of which the last is at position end_B - 1;
    called inside `shard_map`.

    Returns float32 logits of the device's part of the vocabulary, [B, T, V], or [B, V] of the token
    at index last_B of each slot; and the cache with the tokens appended. Differentiable with
    implementation="reference", as tools/train_embedded.py does it.
    """
    x, cache = hidden(weights, cache, tokens_BT, end_B, config, implementation)
    return logits(x if last_B is None else x[jnp.arange(len(last_B)), last_B], weights), cache


@partial(jax.jit, static_argnames=("config", "mesh", "implementation"), donate_argnames="state")
def prefill(
    weights: Weights,
    state: DecodeState,
    tokens_BT: Array,
    count_B: Array,
    *,
    config: Config,
    mesh: Mesh,
    implementation: Impl = None,
) -> DecodeState:
    """Appends the first count_B of T tokens to each slot, and samples the token after them.

    A long prompt takes several calls: `serve` reads 512 tokens at a time, the rest padded to a
    power of two. Only the last `token_B` counts. Tokens past count_B are padding: their keys land
    past the slot's new length, or nowhere if that is past the capacity. A count of 0 leaves a slot
    as it is. Each T, size and dtype is compiled once. `state` is donated: updated in place.
    """

    def run(weights: Weights, state: DecodeState, tokens_BT: Array, count_B: Array) -> DecodeState:
        end_B = jnp.where(count_B > 0, state.length_B + tokens_BT.shape[1], 0)
        logits_BV, cache = forward(
            weights, state.cache, tokens_BT, end_B, config, implementation, count_B - 1
        )
        length_B = state.length_B + count_B
        token_B = sample(logits_BV, state.sampling, length_B, config.vocab_size, MODEL)
        token_B = jnp.where(count_B > 0, token_B, state.token_B)
        return DecodeState(cache, length_B, token_B, state.sampling)

    in_specs = (specs_like(weights, weight_layout(config)), STATE_SPEC, P(DATA), P(DATA))
    check = implementation in KERNEL_FREE  # shard_map cannot check what a Pallas kernel replicates
    step = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=STATE_SPEC, check_vma=check)
    return step(weights, state, tokens_BT, count_B)


def insert(state: DecodeState, prompt: DecodeState, slot_B: Array, *, mesh: Mesh) -> DecodeState:
    """Copies slot b of `prompt` into slot slot_B[b] of the donated `state`, unless that is -1.

    Slots are counted within a data shard, and nothing moves from one shard to another. Both states
    are on `mesh`, with the same capacity and dtype of cache. ValueError otherwise. Not in jit.
    """
    check_insert(state, prompt, slot_B, mesh)
    return copy_rows(state, prompt, slot_B, specs=STATE_SPEC, mesh=mesh)


@partial(jax.jit, static_argnames=("config", "mesh", "implementation"), donate_argnames="state")
def generate(
    weights: Weights, state: DecodeState, *, config: Config, mesh: Mesh, implementation: Impl = None
) -> DecodeState:
    """Appends the newest token of every filled slot, and samples the next. `state` is donated."""
    static = dict(config=config, mesh=mesh, implementation=implementation)
    count_B = (state.length_B > 0).astype(jnp.int32)
    return prefill(weights, state, state.token_B[:, None], count_B, **static)


# ---- what a loader needs: config.json, shapes and partitions, empty states, published names


# Published in fp8: all of these, or none.
PROJECTIONS = {
    *("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
}


def config_from_hf(hf: dict[str, Any]) -> Config:
    """Config of a parsed config.json; ValueError names a key or a value that is not known here."""
    only = dict(scoring_func="sigmoid", topk_method="noaux_tc", n_group=1, topk_group=1)
    only |= dict(hidden_act=SILU, attention_bias=False, moe_layer_freq=1)
    given = read_rope(hf, {"yarn": Yarn}, theta=10000.0)
    return read_config(
        Config,
        hf,
        model_types=("kimi_k2",),
        given=given | dict(fp8=is_fp8(hf, PROJECTIONS)),
        only=only | dict(num_nextn_predict_layers=0),
        repeats=dict(num_key_value_heads="num_attention_heads"),
        read=("quantization_config",),
        inert=("aux_loss_alpha", "ep_size", "seq_aux"),
    )


STATE_SPEC = DecodeState(
    cache=P(DATA, None, TENSOR),  # every array of every layer: slots over data, positions
    length_B=P(DATA),
    token_B=P(DATA),
    sampling=P(DATA),
)


def weight_layout(config: Config, shards: Shards = UNSPLIT) -> Weights:
    """Shape and partition of every weight: as published, or padded with zeros so that every split
    dimension divides (in fp8, into whole blocks, whole heads together; `sample` never draws a
    padded id). Experts must divide as they are."""
    c, n, fp8, Hv = config, shards.model, Fp8 if config.fp8 else None, config.v_head_dim
    D, E, V = c.hidden_size, c.n_routed_experts, round_up(c.vocab_size, n)
    Q, C, R, nope = c.q_lora_rank, c.kv_lora_rank, c.qk_rope_head_dim, c.qk_nope_head_dim
    N = len(split_heads(c.num_attention_heads, c.num_attention_heads, n).query)
    while fp8 and n > 1 and any(N // n * x % FP8_BLOCK for x in (nope + R, nope + Hv, Hv)):
        N += n
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
        wq=matrix((N * (nope + R), Q or D), out, fp8),
        wkv_a=matrix((C + R, D), whole, fp8),
        kv_norm=norm(C),
        wkv=heads((N * (nope + Hv), C), out, fp8),
        wo=matrix((D, N * Hv), into, fp8),
        mlp_norm=norm(D),
        mlp=moe,
    )
    first = layer._replace(mlp=dense(c.intermediate_size))
    layers = range(c.num_hidden_layers)
    return Weights(
        embed=matrix((V, D), out),
        layers=tuple(first if i < c.first_k_dense_replace else layer for i in layers),
        norm=norm(D),
        head=None if c.tie_word_embeddings else matrix((V, D), out),
    )


def init_state(
    config: Config, slots: int, capacity: int, dtype: DTypeLike, shards: Shards = UNSPLIT
) -> DecodeState:
    """Empty slots of `capacity` positions, or the next number that divides over `tensor`, with a
    cache of `dtype`: a float, fp8 or int8."""
    width = config.kv_lora_rank + config.qk_rope_head_dim
    shape = (slots, round_up(capacity, shards.tensor), width)
    return DecodeState(
        cache=tuple(empty_latent(shape, dtype) for _ in range(config.num_hidden_layers)),
        length_B=jnp.zeros(slots, jnp.int32),
        token_B=jnp.zeros(slots, jnp.int32),
        sampling=sampling_params(slots),
    )


def checkpoint_table(config: Config, shards: Shards = UNSPLIT) -> Table:
    """Stored name -> the weight that it becomes. Same: must equal that weight, and is dropped.
    None: dropped. Any other name: ValueError."""
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
    }
    return fp8_table(table, PROJECTIONS, shards) if config.fp8 else table

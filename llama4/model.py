"""Llama 4 Scout and Maverick in one file, text only. It is llama3 with two kinds of layers: three
of four rotate queries and keys, and look at their own chunk of the context; the fourth has no
rotation, and looks at all of it. Some layers have large experts, of which a token uses a few.

The Llama 4 herd, ai.meta.com/blog/llama-4-multimodal-intelligence. In detail, with h = norm(x) and
l2(x) = x / rms(x) (without use_qk_norm, l2(x) = x):

    rotary layers       q, k = l2(rope(q)), l2(rope(k)); a query sees itself and what precedes it in
                        its chunk of attention_chunk_size positions
    other layers        q *= 1 + attn_scale * ln(1 + floor((p + 1) / floor_scale)) at position p;
                        no rope, and a query sees all positions up to its own
    sparse layers       x += shared(h) + sum_e expert[e](score[e] * h); the sum is over the X
                        experts with the largest router(h), and score = sigmoid(router(h))
    rope rotates neighbours, elements 2 i and 2 i + 1, in float32

Dimensions: B slots, T query tokens (1 when decoding), M = B * T, S cache positions, D model, N
query heads, K key/value heads with G = N / K queries each, H head dimension, F MLP width, E
experts, X experts of a token, V vocabulary, L layers.

Slots are split over the mesh axis `data`. Heads, vocabulary, dense MLPs and shared MLPs are split
over MODEL, which is the axes `expert` and `tensor` taken as one. Experts are split over `expert`,
and the F of each over `tensor`. Shapes in classes are of whole arrays. In code inside `shard_map`,
and in the next paragraph, B, N, K, F, E and V count one device's part (a router has all E).

A greedy step has 2 L + 3 collectives over MODEL: [B, T, D] is all-reduced after the embedding, each
attention and each MLP (2 B T D bytes in bfloat16), and [B] twice in `sample` (4 bytes a slot). If
any temperature is above 0, `sample` has up to 36 more, of at most 12 bytes a slot each.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from common.cache import LayerCache, append, attend, capacity_of, copy_slots, empty_cache
from common.config import SILU, all_heads, head_dim, read_config, read_rope, show, text_config
from common.experts import dot_one, group_by_expert, num_experts, sum_over_experts
from common.fields import Even, Index, at_most, divides
from common.kernels.dispatch import AUTO, KERNEL_FREE, Impl
from common.kernels.ragged_dot import ragged_dot
from common.kernels.reference import Slot
from common.names import Axes, Order, Same, Table, multimodal
from common.packing import Packing, read_packing
from common.products import embed_rows, linear
from common.quant import Matrix, out_features
from common.sampling import Sampling, sample, sampling_params
from common.sharding import (
    DATA,
    EXPERT,
    MODEL,
    TENSOR,
    UNSPLIT,
    P,
    Shards,
    round_up,
    split_fused,
    split_heads,
)
from common.weights import array, matrix, norm, specs_like, stack, vocab_rows


class RopeScaling(NamedTuple):
    """`rope_scaling` of type llama3."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class Config(NamedTuple):
    """The fields of config.json that shape the computation, under their published names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of an expert
    intermediate_size_mlp: int  # of the MLP in a layer without experts
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: Annotated[int, divides("num_attention_heads")]
    head_dim: Even
    rope_theta: float
    rope_scaling: RopeScaling | None
    num_local_experts: int
    num_experts_per_tok: Annotated[int, at_most("num_local_experts")]
    multimodal: bool  # there is a vision tower too, and the text model's names have a prefix
    moe_layers: tuple[Index, ...] | None = None  # None: every interleave_moe_layer_step-th
    interleave_moe_layer_step: int = 1
    no_rope_layers: tuple[Literal[0, 1], ...] = ()  # 1: a rotary layer; if (), the interval decides
    no_rope_layer_interval: int = 4  # the last layer of each interval is not rotary
    use_qk_norm: bool = True
    attention_chunk_size: int = 8192
    attn_temperature_tuning: bool = True
    floor_scale: int = 8192
    attn_scale: float = 0.1
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 131072
    packing: Packing | None = None  # quantization_config: how the files' matrices are packed


class Mlp(NamedTuple):
    w_gate: Matrix  # [F, D]
    w_up: Matrix  # [F, D]
    w_down: Matrix  # [D, F]


class Experts(NamedTuple):
    """All experts of a layer. In w_gate_up a device has its `gate` rows, then its `up` rows."""

    w_gate_up: Matrix  # [E, 2 * F, D]
    w_down: Matrix  # [E, D, F]


class Moe(NamedTuple):
    router: Array  # [E, D]
    experts: Experts
    shared: Mlp


class Rotary(NamedTuple):
    """Marks a layer that rotates queries and keys, and whose queries see their own chunk. It
    holds no arrays, so `if layer.rotary is None` is decided while jit traces."""


class Layer(NamedTuple):
    """The loader decides how a Matrix is stored (bfloat16, int8, ...); products take any form."""

    rotary: Rotary | None
    attn_norm: Array  # [D]
    wq: Matrix  # [N * H, D]
    wk: Matrix  # [K * H, D]
    wv: Matrix  # [K * H, D]
    wo: Matrix  # [D, N * H]
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

    # For each layer two arrays of [B, K, S, H]: keys, and values. If H is no multiple of 128, they
    # share one, [B, K, S, 2 * H]. In a rotary layer S is at most about two chunks, and position p
    # is in place p % S.
    cache: tuple[LayerCache, ...]
    length_B: Array  # int32: tokens in the cache
    token_B: Array  # int32: the newest token, which is not in the cache yet
    sampling: Sampling  # arrays of [B]: settings and a seed; a draw is made from seed and length


class Step(NamedTuple):
    """What all layers of one step share, on one device."""

    end_B: Array  # int32: the old length + T, padding included; 0 in a skipped slot
    cos: Array  # float32 [B, T, 1, H / 2]
    sin: Array
    query_scale: Array  # float32 [B, T, 1, 1], for layers that are not rotary
    implementation: Impl  # of the kernels; static in jit


# ---- the mathematics: from here to `forward`, what each device computes inside `shard_map`


def rms_norm(x: Array, weight_D: Array, eps: float) -> Array:
    """x / rms(x) in float32, then times the weight in the model's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * weight_D


def l2_norm(x: Array, eps: float) -> Array:
    """x / rms(x) in float32: the published code calls this an L2 norm."""
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype)


def rope_frequencies(config: Config) -> np.ndarray:
    """Radians per position of each pair of neighbours (2 i, 2 i + 1), [H / 2]. Scaling of type
    llama3 divides the slow ones by `factor`, keeps the fast ones, and blends those in between."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequency = 1 / np.power(config.rope_theta, exponent, dtype=np.float64).astype(np.float32)
    if config.rope_scaling is None:
        return frequency
    factor, low, high, original = config.rope_scaling
    rotations = original * frequency / (2 * math.pi)  # full turns within `original` positions
    smooth = np.clip((rotations - low) / max(high - low, 1e-9), 0, 1)  # 1e-9: never 0 / 0
    return ((1 - smooth) * frequency / factor + smooth * frequency).astype(np.float32)


def rotary(position_BT: Array, config: Config) -> tuple[Array, Array]:
    """cos and sin of the angles of each position, float32 [B, T, 1, H / 2]."""
    angle = position_BT[..., None, None].astype(jnp.float32) * rope_frequencies(config)
    # Without the barrier, XLA on CPU recomputes cos and sin in every layer, for every head.
    return lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))


def rotate(x_BTNH: Array, step: Step) -> Array:
    """Rotates each pair of elements 2 i and 2 i + 1 of a head by the angle of its position. The
    output holds the even elements first. Queries and keys are permuted alike, so q . k is
    unchanged."""
    a, b = (x_BTNH[..., i::2].astype(jnp.float32) for i in (0, 1))
    rotated = [a * step.cos - b * step.sin, b * step.cos + a * step.sin]
    return jnp.concatenate(rotated, axis=-1).astype(x_BTNH.dtype)


def query_scale(position_BT: Array, config: Config) -> Array:
    """The factors of the queries in layers that are not rotary, float32 [B, T, 1, 1]. The more
    positions a query sees, the sharper is its softmax: arXiv 2501.19399."""
    position = jnp.maximum(position_BT, 0)[..., None, None].astype(jnp.float32)  # < 0: skipped slot
    if not config.attn_temperature_tuning:
        return jnp.ones_like(position)
    return 1 + config.attn_scale * jnp.log1p(jnp.floor((position + 1) / config.floor_scale))


def embed(table_VD: Matrix, tokens_BT: Array, dtype: DTypeLike) -> Array:
    """Each device looks up the ids that it holds. Other ids give zeros."""
    local_BT = tokens_BT - lax.axis_index(MODEL) * out_features(table_VD)
    x_BTD = embed_rows(table_VD, local_BT, dtype)
    return lax.psum(x_BTD, MODEL)  # partial sums over own ids -> replicated


def attend_slot(slot: Slot, scale: float, chunk: int | None = None) -> Array:
    """The definition of attention, of one slot, whose arrays are float32: in bfloat16 a score near
    50 would be off by up to 0.125, and its probability by 13 %. implementation="reference" runs it;
    a kernel in common/kernels computes the same. If you change scores, change both. A query sees
    the positions up to its own that are in the same chunk; without chunks, all of them."""
    q_TKGH, k_KSH, v_KSH, position_T, position_S = slot
    score_KGTS = jnp.einsum("tkgh,ksh->kgts", q_TKGH, k_KSH) * scale
    seen_TS = position_S <= position_T[:, None]
    if chunk is not None:
        seen_TS &= position_S // chunk == position_T[:, None] // chunk
    p_KGTS = jax.nn.softmax(jnp.where(seen_TS, score_KGTS, -jnp.inf))
    return jnp.einsum("kgts,ksh->tkgh", p_KGTS, v_KSH)


def attention(
    x_BTD: Array, layer: Layer, cache: LayerCache, step: Step, config: Config
) -> tuple[Array, LayerCache]:
    """Appends T tokens to the cache. Each token attends to itself and to what precedes it in its
    chunk; in a layer that is not rotary, all positions are one chunk. Returns the output [B, T,
    D], summed over the device's heads, and the cache."""
    (B, T, _), H = x_BTD.shape, config.head_dim
    projections = (linear(x_BTD, w) for w in (layer.wq, layer.wk, layer.wv))
    q_BTNH, k_BTKH, v_BTKH = (x.reshape(B, T, -1, H) for x in projections)
    if layer.rotary is None:
        q_BTNH = (q_BTNH * step.query_scale).astype(q_BTNH.dtype)
    else:
        q_BTNH, k_BTKH = rotate(q_BTNH, step), rotate(k_BTKH, step)
    if layer.rotary is not None and config.use_qk_norm:
        q_BTNH, k_BTKH = (l2_norm(x, config.rms_norm_eps) for x in (q_BTNH, k_BTKH))
    cache = append(cache, k_BTKH, v_BTKH, step.end_B - T)
    chunk = config.attention_chunk_size if layer.rotary is not None else None
    attend_chunk = partial(attend, scale=H**-0.5, chunk=chunk)
    o_BTNH = attend_chunk(q_BTNH, cache, step.end_B, step.implementation, attend_slot)
    return linear(o_BTNH.reshape(B, T, -1), layer.wo), cache


def mlp(x_BTD: Array, w: Mlp) -> Array:
    """Partial sums over own F."""
    h_BTF = jax.nn.silu(linear(x_BTD, w.w_gate)) * linear(x_BTD, w.w_up)
    return linear(h_BTF, w.w_down)


def route(x_MD: Array, w: Moe, config: Config) -> tuple[Array, Array]:
    """The X experts of each token: their scores and their indices in the router, both [M, X]."""
    logits_MX, expert_MX = lax.top_k(linear(x_MD, w.router), config.num_experts_per_tok)
    return jax.nn.sigmoid(logits_MX.astype(jnp.float32)).astype(x_MD.dtype), expert_MX


def experts(x: Array, w: Experts, dot: Callable[..., Array]) -> Array:
    """[rows, D] -> [rows, D]: the MLP of each row's expert. dot(x, w) uses that expert's matrix."""
    gate, up = jnp.split(dot(x, w.w_gate_up), 2, axis=-1)
    return dot(jax.nn.silu(gate) * up, w.w_down)


def mixture(x_MD: Array, score_MX: Array, expert_MX: Array, w: Experts) -> Array:
    """The definition of the sum over a token's experts: y_MD += expert[e](score * x_MD) for each
    expert e of the device. implementation="reference" runs this."""

    def of_expert(e: Array, own: Experts) -> Array:
        score_M = jnp.where(expert_MX == e, score_MX, 0).sum(axis=1)
        return experts(score_M[:, None] * x_MD, own, dot_one)  # without a bias, 0 gives 0

    return sum_over_experts(of_expert, w)


def moe(x_BTD: Array, w: Moe, step: Step, config: Config) -> Array:
    """The shared MLP, plus the sum of each token's experts: a partial sum, over the device's own
    experts and F. The M * X rows are sorted by expert; rows of other devices' experts come out as
    zeros."""
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
    score_MX, expert_MX = route(x_MD, w, config)
    if step.implementation == Impl.REFERENCE:
        y_MD = mixture(x_MD, score_MX, expert_MX, w.experts)
    else:
        groups = group_by_expert(expert_MX, num_experts(w.experts))
        dot = partial(ragged_dot, group_sizes_E=groups.sizes, implementation=step.implementation)
        rows = x_MD[groups.token] * score_MX.reshape(-1, 1)[groups.choice]  # [M * X, D]
        y_MXD = experts(rows, w.experts, dot)[groups.row]
        y_MD = y_MXD.sum(axis=1)
    return y_MD.reshape(x_BTD.shape) + mlp(x_BTD, w.shared)


@partial(jax.jit, static_argnames="config")
def block(
    x_BTD: Array, layer: Layer, cache: LayerCache, step: Step, config: Config
) -> tuple[Array, LayerCache]:
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
    cache: tuple[LayerCache, ...],
    tokens_BT: Array,
    end_B: Array,
    config: Config,
    implementation: str = AUTO,
    last_B: Array | None = None,
) -> tuple[Array, tuple[LayerCache, ...]]:
    """Appends T tokens to each slot, the last at position end_B - 1; skips a slot if its end_B is
    0. Returns float32 logits [B, T, V] and the cache; V is the device's part of the vocabulary,
    with padding. With last_B, only token last_B[b] of each slot gets logits, [B, V].

    For a loss (docs/library.md), call `logits` of common/serving/score.py with
    implementation="reference", which is differentiable if the weights are floats."""
    position_BT = end_B[:, None] + jnp.arange(-tokens_BT.shape[1], 0)
    cos, sin = rotary(position_BT, config)
    step = Step(end_B, cos, sin, query_scale(position_BT, config), Impl(implementation))
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


def config_from_hf(hf: dict[str, Any]) -> Config:
    """Config of a config.json. A field unknown here and in common/config.py is a ValueError."""
    is_multimodal = hf.get("model_type") == "llama4"
    text = text_config(hf) if is_multimodal else dict(hf)
    if type(text.get("attn_temperature_tuning")) is int and text["attn_temperature_tuning"] == 4:
        text["attn_temperature_tuning"] = True  # the first published files say 4 for true
    nothing = dict(moe_layers=lambda c: None, no_rope_layers=lambda c: ())
    config: Config = read_config(
        Config,
        text,
        model_types=("llama4_text", "llama4"),
        fields_read=read_rope(Config, text, {"llama3": RopeScaling}, theta=500000.0)
        | dict(multimodal=is_multimodal, packing=read_packing(text)),
        if_null=dict(num_key_value_heads=all_heads, head_dim=head_dim) | nothing,
        # Refused: another activation, biases. (`text_config` refuses more in a multimodal file.)
        accepted=dict(hidden_act=SILU, attention_bias=False),
        ignored="cache_implementation for_llm_compressor layer_types router_jitter_noise".split(),
    )
    layers = range(config.num_hidden_layers)
    if config.no_rope_layers and len(config.no_rope_layers) != len(layers):
        counts = f"{len(config.no_rope_layers)} no_rope_layers"
        raise ValueError(f"config.json: {counts}, but num_hidden_layers is {len(layers)}")
    if (kinds := text.get("layer_types")) is not None:
        names = ("full_attention", "chunked_attention")
        if kinds != [names[is_rotary(i, config)] for i in layers]:
            problem = f"layer_types={show(kinds)} differs from what no_rope_layers says"
            raise ValueError(f"config.json: {problem}")
    return config


# Slots are split over `data`, and the cache of each layer also over MODEL, by heads.
STATE_SPEC = DecodeState(cache=P(DATA, MODEL), length_B=P(DATA), token_B=P(DATA), sampling=P(DATA))


def weight_layout(config: Config, shards: Shards = UNSPLIT) -> Weights:
    """Shape and partition of every weight. Zeros pad a split dimension until its parts are equal.
    Two key/value heads on 4 devices become 0, 0, 1, 1; the copies of a head divide its query heads
    between them. `expert` must divide E."""
    c, n = config, shards.model
    heads = split_heads(c.num_attention_heads, c.num_key_value_heads, n)
    q, kv = len(heads.query) * c.head_dim, len(heads.kv) * c.head_dim
    D, E, V = c.hidden_size, c.num_local_experts, round_up(c.vocab_size, n)
    F = round_up(c.intermediate_size, shards.tensor)
    out, into = P(MODEL, None), P(None, MODEL)  # split by output, or by input

    def dense(F: int) -> Mlp:
        F = round_up(F, n)
        return Mlp(
            w_gate=matrix((F, D), out),
            w_up=matrix((F, D), out),
            w_down=matrix((D, F), into),
        )

    moe = Moe(
        router=array((E, D)),
        experts=Experts(
            w_gate_up=stack((E, 2 * F, D), P(EXPERT, TENSOR, None)),
            w_down=stack((E, D, F), P(EXPERT, None, TENSOR)),
        ),
        shared=dense(c.intermediate_size),
    )
    layer = Layer(
        rotary=None,
        attn_norm=norm(D),
        wq=matrix((q, D), out),
        wk=matrix((kv, D), out),
        wv=matrix((kv, D), out),
        wo=matrix((D, q), into),
        mlp_norm=norm(D),
        mlp=moe,
    )

    def layer_at(i: int) -> Layer:
        mlp = moe if is_sparse(i, c) else dense(c.intermediate_size_mlp)
        return layer._replace(rotary=Rotary() if is_rotary(i, c) else None, mlp=mlp)

    return Weights(
        embed=vocab_rows((V, D), out),
        layers=tuple(layer_at(i) for i in range(c.num_hidden_layers)),
        norm=norm(D),
        head=None if c.tie_word_embeddings else vocab_rows((V, D), out),
    )


def is_rotary(layer: int, config: Config) -> bool:
    if config.no_rope_layers:
        return config.no_rope_layers[layer] == 1
    return (layer + 1) % config.no_rope_layer_interval != 0


def is_sparse(layer: int, config: Config) -> bool:
    if config.moe_layers is not None:
        return layer in config.moe_layers
    return (layer + 1) % config.interleave_moe_layer_step == 0


def init_state(
    config: Config, slots: int, capacity: int, dtype: DTypeLike, shards: Shards = UNSPLIT
) -> DecodeState:
    """Empty slots of `capacity` positions (fewer in rotary layers: see DecodeState), with a cache
    of `dtype`: a float, fp8 or int8."""
    heads = split_heads(config.num_attention_heads, config.num_key_value_heads, shards.model)
    shape = (slots, len(heads.kv), capacity, config.head_dim)
    chunks = {True: config.attention_chunk_size, False: None}
    rotary = (is_rotary(i, config) for i in range(config.num_hidden_layers))
    return DecodeState(
        cache=tuple(empty_cache(shape, dtype, chunk=chunks[r]) for r in rotary),
        length_B=jnp.zeros(slots, jnp.int32),
        token_B=jnp.zeros(slots, jnp.int32),
        sampling=sampling_params(slots),
    )


def checkpoint_table(config: Config, shards: Shards = UNSPLIT) -> Table:
    """Published name -> its weight. An unknown tensor is an error; so is a weight that no tensor
    fills. An Order lists the blocks along an axis, device by device: heads with their copies; in
    w_gate_up `gate` rows, then `up` rows. SWAPPED: the file swaps the last two axes. None: not
    loaded. `Same("x")`: equal to x, or absent. `prefix.**`: all names with that prefix."""
    heads = split_heads(config.num_attention_heads, config.num_key_value_heads, shards.model)
    query, kv = (partial(Order, size=config.head_dim, blocks=blocks) for blocks in heads)
    rows = split_fused(config.intermediate_size, shards.tensor, parts=2)
    table: Table = {
        "model.embed_tokens.weight": "embed",
        "model.layers.*.input_layernorm.weight": "layers.*.attn_norm",
        "model.layers.*.self_attn.q_proj.weight": ("layers.*.wq", query(axis=0)),
        "model.layers.*.self_attn.k_proj.weight": ("layers.*.wk", kv(axis=0)),
        "model.layers.*.self_attn.v_proj.weight": ("layers.*.wv", kv(axis=0)),
        "model.layers.*.self_attn.o_proj.weight": ("layers.*.wo", query(axis=1)),
        "model.layers.*.post_attention_layernorm.weight": "layers.*.mlp_norm",
        "model.layers.*.feed_forward.gate_proj.weight": "layers.*.mlp.w_gate",
        "model.layers.*.feed_forward.up_proj.weight": "layers.*.mlp.w_up",
        "model.layers.*.feed_forward.down_proj.weight": "layers.*.mlp.w_down",
        "model.layers.*.feed_forward.router.weight": "layers.*.mlp.router",
        "model.layers.*.feed_forward.experts.gate_up_proj": (
            "layers.*.mlp.experts.w_gate_up",
            Order(axis=1, size=1, blocks=rows, swapped=True),
        ),
        "model.layers.*.feed_forward.experts.down_proj": (
            "layers.*.mlp.experts.w_down",
            Axes.SWAPPED,
        ),
        "model.layers.*.feed_forward.shared_expert.gate_proj.weight": "layers.*.mlp.shared.w_gate",
        "model.layers.*.feed_forward.shared_expert.up_proj.weight": "layers.*.mlp.shared.w_up",
        "model.layers.*.feed_forward.shared_expert.down_proj.weight": "layers.*.mlp.shared.w_down",
        "model.norm.weight": "norm",
        "lm_head.weight": Same("embed") if config.tie_word_embeddings else "head",
    }
    if config.packing is not None:  # files hold gate and up apart; the loader joins them
        at, fused = "model.layers.*.feed_forward.experts.", Order(axis=0, size=1, blocks=rows)
        del table[f"{at}gate_up_proj"], table[f"{at}down_proj"]
        table[f"{at}*.gate_up_proj.weight"] = "layers.*.mlp.experts.w_gate_up", fused
        table[f"{at}*.down_proj.weight"] = "layers.*.mlp.experts.w_down"
    parts = ("vision_model", "multi_modal_projector")
    return multimodal(table, parts) if config.multimodal else table

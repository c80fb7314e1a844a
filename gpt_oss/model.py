"""GPT-OSS in one file: llama3 with a mixture of experts in place of every MLP. Experts that are
published in 4 bits stay so. Attention slides in every other layer, and each head has a sink.

gpt-oss-120b & gpt-oss-20b Model Card, arXiv 2508.10925. What differs from llama3:

    o[n] = sum_s exp(score[n, s]) v[s] / (exp(sink[n]) + sum_s exp(score[n, s]))
                                                   the sink is a learned score without a value
    in a sliding layer a query sees the last `sliding_window` positions, else all up to its own
    x += sum_e p[e] * (down[e](h[e]) + b[e])       the sum is over the X experts with the largest
                                                   router(norm(x)); p is the softmax of these X
    h[e] = (up + 1) * gate * sigmoid(1.702 * gate) up and gate are those of expert e and norm(x);
                                                   both are cut at swiglu_limit, up also at -limit
    YaRN replaces llama3's rope scaling; projections have biases; norms multiply in float32

Dimensions: B slots, T query tokens (1 when decoding), M = B * T, S cache positions, D model, N
query heads, K key/value heads with G = N / K queries each, H head dimension, F MLP width, E
experts, X experts of a token, V vocabulary, L layers.

Slots are split over the mesh axis `data`. Heads and vocabulary are split over MODEL, which is the
axes `expert` and `tensor` taken as one. Experts are split over `expert`, and the F of each over
`tensor`. Shapes in classes are of whole, padded arrays. In code inside `shard_map`, and in the next
paragraph, B, N, K, F, E and V count one device's part (a router has all E).

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
from common.config import SILU, is_published_in, read_config, read_rope
from common.experts import dot_one, group_by_expert, num_experts, sum_over_experts
from common.fields import Even, at_most, divides, one_each
from common.kernels.dispatch import AUTO, KERNEL_FREE, Impl
from common.kernels.ragged_dot import ragged_dot
from common.kernels.reference import Slot
from common.names import Axes, Order, Same, Table
from common.products import embed_rows, linear
from common.quant import MXFP4_GROUP, Matrix, Mxfp4, out_features
from common.sampling import Sampling, sample, sampling_params
from common.sharding import DATA, EXPERT, MODEL, TENSOR, UNSPLIT, P, Shards, round_up, split_heads
from common.weights import array, bias, matrix, norm, specs_like, stack, vocab_rows

SWIGLU_ALPHA = 1.702  # not in the published config.json
LayerType = Literal["sliding_attention", "full_attention"]


class Yarn(NamedTuple):
    """`rope_scaling` of type yarn."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # multiplies cos and sin
    truncate: bool = True


class Config(NamedTuple):
    """The fields of config.json that shape the computation, under their published names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: Annotated[int, divides("num_attention_heads")]
    head_dim: Even
    rope_theta: float
    rope_scaling: Yarn | None
    layer_types: Annotated[tuple[LayerType, ...], one_each("num_hidden_layers")]
    sliding_window: int
    num_local_experts: Annotated[int, "num_experts"]
    num_experts_per_tok: Annotated[int, at_most("num_local_experts")]
    swiglu_limit: float
    mxfp4: bool  # quantization_config: the experts are published in 4 bits
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 131072


class Experts(NamedTuple):
    """The experts of a layer. Even rows of w_gate_up belong to gate, odd rows to up."""

    w_gate_up: Matrix  # [E, 2 * F, D]
    b_gate_up: Array  # [E, 2 * F], float32
    w_down: Matrix  # [E, D, F]
    b_down: Array  # [E, D], float32


class Moe(NamedTuple):
    router: Array  # [E, D]
    b_router: Array  # [E]
    experts: Experts


class Sliding(NamedTuple):
    """Marks a layer whose queries see the last `sliding_window` positions. It holds no arrays, so
    `if layer.sliding is None` is decided while jit traces."""


class Layer(NamedTuple):
    """The loader decides how a Matrix is stored (bfloat16, int8, ...); products take any form."""

    sliding: Sliding | None
    attn_norm: Array  # [D]
    wq: Matrix  # [N * H, D]
    bq: Array  # [N * H]
    wk: Matrix  # [K * H, D]
    bk: Array  # [K * H]
    wv: Matrix  # [K * H, D]
    bv: Array  # [K * H]
    sinks: Array  # [N]
    wo: Matrix  # [D, N * H]
    bo: Array  # [D]
    mlp_norm: Array  # [D]
    mlp: Moe


class Weights(NamedTuple):
    embed: Matrix  # [V, D]
    layers: tuple[Layer, ...]
    norm: Array  # [D]
    head: Matrix | None  # [V, D]; None if the embedding is the head too


class DecodeState(NamedTuple):
    """B slots, decoded together. A slot of length 0 is empty. When a request ends, `serve` sets its
    slot's length to 0 and clears nothing: attention hides what is past the length, even NaN."""

    # For each layer two arrays of [B, K, S, H]: rotated keys, and values. If H is not a multiple of
    # 128, they share one, [B, K, S, 2 * H]. In a sliding layer S is at most about sliding_window +
    # 2048, and position p is in place p % S.
    cache: tuple[LayerCache, ...]
    length_B: Array  # int32: tokens in the cache
    token_B: Array  # int32: the newest token, which is not in the cache yet
    sampling: Sampling  # arrays of [B]: settings and a seed; a draw is made from seed and length


class Step(NamedTuple):
    """What all layers of one step share, on one device."""

    end_B: Array  # int32: the old length + T, padding included; 0 in a skipped slot
    cos: Array  # float32 [B, T, 1, H / 2]
    sin: Array
    implementation: Impl  # of the kernels; static in jit


# ---- the mathematics: from here to `forward`, what each device computes inside `shard_map`


def rms_norm(x: Array, weight_D: Array, eps: float) -> Array:
    """x / rms(x) times the weight, all in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * weight_D).astype(x.dtype)


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
    """Radians per position of each pair (i, i + H / 2) of a head, [H / 2]."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    period = np.power(config.rope_theta, exponent, dtype=np.float64).astype(np.float32)
    if config.rope_scaling is None:
        return 1 / period
    return yarn_frequencies(period, config.rope_theta, config.rope_scaling)


def attention_factor(yarn: Yarn | None) -> float:
    """YaRN multiplies cos and sin by this, and so the scores by its square."""
    if yarn is None:
        return 1.0
    return yarn.attention_factor or 0.1 * math.log(yarn.factor) + 1


def rotary(position_BT: Array, config: Config) -> tuple[Array, Array]:
    """cos and sin of the angles of each position, float32 [B, T, 1, H / 2]."""
    angle = position_BT[..., None, None].astype(jnp.float32) * rope_frequencies(config)
    factor = attention_factor(config.rope_scaling)
    # Without the barrier, XLA on CPU recomputes cos and sin in every layer, for every head.
    return lax.optimization_barrier((jnp.cos(angle) * factor, jnp.sin(angle) * factor))


def rotate(x_BTNH: Array, step: Step) -> Array:
    """Rotates each pair of elements i and i + H / 2 of a head by the angle of its position."""
    cos, sin = step.cos.astype(x_BTNH.dtype), step.sin.astype(x_BTNH.dtype)
    a, b = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def embed(table_VD: Matrix, tokens_BT: Array, dtype: DTypeLike) -> Array:
    """Each device looks up the ids that it holds. Other ids give zeros."""
    local_BT = tokens_BT - lax.axis_index(MODEL) * out_features(table_VD)
    x_BTD = embed_rows(table_VD, local_BT, dtype)
    return lax.psum(x_BTD, MODEL)  # partial sums over own ids -> replicated


def attend_slot(slot: Slot, scale: float, sinks_N: Array, window: int | None = None) -> Array:
    """The definition of attention, of one slot, whose arrays are float32: in bfloat16 a score near
    50 would be off by up to 0.125, and its probability by 13 %. implementation="reference" runs it;
    a kernel in common/kernels computes the same. If you change scores, change both. A query sees
    all positions up to its own, or the last `window` of them. A sink is a score without a value."""
    q_TKGH, k_KSH, v_KSH, position_T, position_S = slot
    score_KGTS = jnp.einsum("tkgh,ksh->kgts", q_TKGH, k_KSH) * scale
    behind_TS = position_T[:, None] - position_S
    seen_TS = behind_TS >= 0 if window is None else (behind_TS >= 0) & (behind_TS < window)
    score_KGTS = jnp.where(seen_TS, score_KGTS, -jnp.inf)
    sink_KG11 = sinks_N.astype(jnp.float32).reshape(*score_KGTS.shape[:2], 1, 1)
    sink_KGT1 = jnp.broadcast_to(sink_KG11, (*score_KGTS.shape[:3], 1))
    p_KGTS = jax.nn.softmax(jnp.concatenate([score_KGTS, sink_KGT1], axis=-1))[..., :-1]
    return jnp.einsum("kgts,ksh->tkgh", p_KGTS, v_KSH)


def attention(
    x_BTD: Array, layer: Layer, cache: LayerCache, step: Step, config: Config
) -> tuple[Array, LayerCache]:
    """Appends T tokens to the cache. Each token attends to all positions up to its own, and in a
    sliding layer only to the last `sliding_window` of these. Returns the output [B, T, D], summed
    over the device's heads, and the cache."""
    (B, T, _), H = x_BTD.shape, config.head_dim
    matrices = (layer.wq, layer.bq), (layer.wk, layer.bk), (layer.wv, layer.bv)
    q_BTNH, k_BTKH, v_BTKH = ((linear(x_BTD, w) + b).reshape(B, T, -1, H) for w, b in matrices)
    q_BTNH, k_BTKH = rotate(q_BTNH, step), rotate(k_BTKH, step)
    cache = append(cache, k_BTKH, v_BTKH, step.end_B - T)
    window = config.sliding_window if layer.sliding is not None else None
    attend_window = partial(attend, scale=H**-0.5, window=window, sinks_N=layer.sinks)
    o_BTNH = attend_window(q_BTNH, cache, step.end_B, step.implementation, attend_slot)
    return linear(o_BTNH.reshape(B, T, -1), layer.wo), cache


def route(x_MD: Array, w: Moe, config: Config) -> tuple[Array, Array]:
    """The X experts of each token: their weights and their indices in the router, both [M, X]."""
    logits_ME = linear(x_MD, w.router, jnp.float32) + w.b_router
    logits_MX, expert_MX = lax.top_k(logits_ME, config.num_experts_per_tok)
    return jax.nn.softmax(logits_MX).astype(x_MD.dtype), expert_MX


def swiglu(gate_up: Array, limit: float) -> Array:
    """[.., 2 * F] -> [.., F]."""
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate)


def experts(x: Array, w: Experts, dot: Callable[..., Array], limit: float) -> Array:
    """[rows, D] -> [rows, D]: the MLP of each row's expert. dot(x, w) uses that expert's matrix."""
    h = swiglu(dot(x, w.w_gate_up, bias_EO=w.b_gate_up), limit)
    b_down = jnp.where(lax.axis_index(TENSOR) == 0, w.b_down, 0)  # psum must add it once
    return dot(h, w.w_down, bias_EO=b_down)


def mixture(x_MD: Array, weight_MX: Array, expert_MX: Array, w: Experts, config: Config) -> Array:
    """The definition of the weighted sum of a token's experts: for each expert of the device, with
    index e in the router, y_MD += weight * expert[e](x_MD). implementation="reference" runs it."""

    def of_expert(e: Array, own: Experts) -> Array:
        weight_M = jnp.where(expert_MX == e, weight_MX, 0).sum(axis=1)
        return weight_M[:, None] * experts(x_MD, own, dot_one, config.swiglu_limit)

    return sum_over_experts(of_expert, w)


def moe(x_BTD: Array, w: Moe, step: Step, config: Config) -> Array:
    """The weighted sum of each token's experts: a partial sum, over the device's own experts and F.
    The M * X rows are sorted by expert; rows of other devices' experts come out as zeros."""
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
    weight_MX, expert_MX = route(x_MD, w, config)
    if step.implementation == Impl.REFERENCE:
        y_MD = mixture(x_MD, weight_MX, expert_MX, w.experts, config)
    else:
        groups = group_by_expert(expert_MX, num_experts(w.experts))
        dot = partial(ragged_dot, group_sizes_E=groups.sizes, implementation=step.implementation)
        y_MXD = experts(x_MD[groups.token], w.experts, dot, config.swiglu_limit)[groups.row]
        y_MD = (y_MXD * weight_MX[..., None]).sum(axis=1)
    return y_MD.reshape(x_BTD.shape)


@partial(jax.jit, static_argnames="config")
def block(
    x_BTD: Array, layer: Layer, cache: LayerCache, step: Step, config: Config
) -> tuple[Array, LayerCache]:
    h_BTD = rms_norm(x_BTD, layer.attn_norm, config.rms_norm_eps)
    o_BTD, cache = attention(h_BTD, layer, cache, step, config)
    # Keep the brackets. Without them, XLA on CPU repeats the additions wherever the new x is used.
    x_BTD = x_BTD + (lax.psum(o_BTD, MODEL) + layer.bo)  # partial sums over own heads -> replicated
    h_BTD = rms_norm(x_BTD, layer.mlp_norm, config.rms_norm_eps)
    o_BTD = moe(h_BTD, layer.mlp, step, config)
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


# What a config.json without rope settings means.
DEFAULT_ROPE = dict(
    rope_type="yarn", factor=32, original_max_position_embeddings=4096, truncate=False
)


def config_from_hf(hf: dict[str, Any]) -> Config:
    """Config of a config.json. A field unknown here and in common/config.py is a ValueError."""
    mxfp4 = is_published_in("mxfp4", hf, ignored=("modules_to_not_convert",))
    same = dict(experts_per_token=hf.get("num_experts_per_tok"))
    rope = read_rope(Config, hf, {"yarn": Yarn}, theta=150000.0, default=DEFAULT_ROPE)
    return read_config(
        Config,
        hf,
        model_types=("gpt_oss",),
        fields_read=rope | dict(mxfp4=mxfp4),
        # Refused: other activations or alphas, no biases, experts_per_token != num_experts_per_tok.
        accepted=dict(hidden_act=SILU, attention_bias=True, swiglu_alpha=SWIGLU_ALPHA) | same,
        ignored=("initial_context_length",),
    )


# Slots are split over `data`, and the cache of each layer also over MODEL, by heads.
STATE_SPEC = DecodeState(cache=P(DATA, MODEL), length_B=P(DATA), token_B=P(DATA), sampling=P(DATA))


def weight_layout(config: Config, shards: Shards = UNSPLIT) -> Weights:
    """Shape and partition of every weight. Zeros pad a split dimension until its parts are equal.
    In mxfp4 each part of F has whole groups. Two key/value heads on 4 devices become 0, 0, 1, 1;
    the copies of a head divide its query heads between them. `expert` must divide E."""
    c, n, mxfp4 = config, shards.model, Mxfp4 if config.mxfp4 else None
    heads = split_heads(c.num_attention_heads, c.num_key_value_heads, n)
    N, q, kv = len(heads.query), len(heads.query) * c.head_dim, len(heads.kv) * c.head_dim
    D, E, V = c.hidden_size, c.num_local_experts, round_up(c.vocab_size, n)
    parts = shards.tensor
    F = round_up(c.intermediate_size, parts * MXFP4_GROUP if mxfp4 and parts > 1 else parts)
    out, into = P(MODEL, None), P(None, MODEL)  # split by output, or by input
    of_experts = Experts(
        w_gate_up=stack((E, 2 * F, D), P(EXPERT, TENSOR, None), mxfp4),
        b_gate_up=bias((E, 2 * F), P(EXPERT, TENSOR), jnp.float32),
        w_down=stack((E, D, F), P(EXPERT, None, TENSOR), mxfp4),
        b_down=bias((E, D), P(EXPERT, None), jnp.float32),
    )
    layer = Layer(
        sliding=None,
        attn_norm=norm(D),
        wq=matrix((q, D), out),
        bq=bias((q,), P(MODEL)),
        wk=matrix((kv, D), out),
        bk=bias((kv,), P(MODEL)),
        wv=matrix((kv, D), out),
        bv=bias((kv,), P(MODEL)),
        sinks=bias((N,), P(MODEL)),
        wo=matrix((D, q), into),
        bo=bias((D,)),
        mlp_norm=norm(D),
        mlp=Moe(router=array((E, D)), b_router=bias((E,)), experts=of_experts),
    )
    sliding = layer._replace(sliding=Sliding())
    kinds = dict(sliding_attention=sliding, full_attention=layer)
    return Weights(
        embed=vocab_rows((V, D), out),
        layers=tuple(kinds[c.layer_types[i]] for i in range(c.num_hidden_layers)),
        norm=norm(D),
        head=None if c.tie_word_embeddings else vocab_rows((V, D), out),
    )


def init_state(
    config: Config, slots: int, capacity: int, dtype: DTypeLike, shards: Shards = UNSPLIT
) -> DecodeState:
    """Empty slots of `capacity` positions (fewer in sliding layers: see DecodeState), with a cache
    of `dtype`: a float, fp8 or int8."""
    heads = split_heads(config.num_attention_heads, config.num_key_value_heads, shards.model)
    shape = (slots, len(heads.kv), capacity, config.head_dim)
    window = {"sliding_attention": config.sliding_window, "full_attention": None}
    kinds = config.layer_types[: config.num_hidden_layers]
    return DecodeState(
        cache=tuple(empty_cache(shape, dtype, window=window[t]) for t in kinds),
        length_B=jnp.zeros(slots, jnp.int32),
        token_B=jnp.zeros(slots, jnp.int32),
        sampling=sampling_params(slots),
    )


def checkpoint_table(config: Config, shards: Shards = UNSPLIT) -> Table:
    """Published name -> its weight. An unknown tensor is an error; so is a weight that no tensor
    fills. An Order lists the heads along an axis, device by device, copies included. SPLIT: the
    last axis is two axes in the file. SWAPPED: the last two are swapped there. `Same("x")`: equal
    to x, or absent."""
    heads = split_heads(config.num_attention_heads, config.num_key_value_heads, shards.model)
    query, kv = (partial(Order, size=config.head_dim, blocks=blocks) for blocks in heads)
    table: Table = {
        "model.embed_tokens.weight": "embed",
        "model.layers.*.input_layernorm.weight": "layers.*.attn_norm",
        "model.layers.*.self_attn.q_proj.weight": ("layers.*.wq", query(axis=0)),
        "model.layers.*.self_attn.q_proj.bias": ("layers.*.bq", query(axis=0)),
        "model.layers.*.self_attn.k_proj.weight": ("layers.*.wk", kv(axis=0)),
        "model.layers.*.self_attn.k_proj.bias": ("layers.*.bk", kv(axis=0)),
        "model.layers.*.self_attn.v_proj.weight": ("layers.*.wv", kv(axis=0)),
        "model.layers.*.self_attn.v_proj.bias": ("layers.*.bv", kv(axis=0)),
        "model.layers.*.self_attn.sinks": ("layers.*.sinks", Order(0, 1, heads.query)),
        "model.layers.*.self_attn.o_proj.weight": ("layers.*.wo", query(axis=1)),
        "model.layers.*.self_attn.o_proj.bias": "layers.*.bo",
        "model.layers.*.post_attention_layernorm.weight": "layers.*.mlp_norm",
        "model.layers.*.mlp.router.weight": "layers.*.mlp.router",
        "model.layers.*.mlp.router.bias": "layers.*.mlp.b_router",
        "model.norm.weight": "norm",
        "lm_head.weight": Same("embed") if config.tie_word_embeddings else "head",
    }
    for name in ("gate_up", "down"):
        stored, path = f"model.layers.*.mlp.experts.{name}_proj", f"layers.*.mlp.experts.w_{name}"
        if config.mxfp4:
            table[f"{stored}_blocks"] = f"{path}.values", Axes.SPLIT
            table[f"{stored}_scales"] = f"{path}.scale"
        else:
            table[stored] = path, Axes.SWAPPED
        table[f"{stored}_bias"] = f"layers.*.mlp.experts.b_{name}"
    return table

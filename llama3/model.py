"""Llama 3 in one file: a decoder-only transformer with grouped-query attention and a gated MLP.

The Llama 3 Herd of Models, arXiv 2407.21783. Each layer adds to the residual stream x twice:

    x += attention(norm(x))                        N query heads share K rotated key/value heads
    x += down(silu(gate(norm(x))) * up(norm(x)))

Dimensions: B slots, T query tokens (1 when decoding), S cache positions, D model, N query heads, K
key/value heads with G = N / K queries each, H head dimension, F MLP width, V vocabulary, L layers.

Slots are split over the mesh axis `data`. Heads, MLP and vocabulary are split over MODEL, which is
the axes `expert` and `tensor` taken as one. Shapes in classes are of whole, padded arrays. In code
inside `shard_map`, and in the next paragraph, B, N, K, F and V count one device's part.

A greedy step has 2 L + 3 collectives over MODEL: [B, T, D] is all-reduced after the embedding, each
attention and each MLP (2 B T D bytes in bfloat16), and [B] twice in `sample` (4 bytes a slot). If
any temperature is above 0, `sample` has up to 36 more, of at most 12 bytes a slot each.
"""

import math
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from common.cache import LayerCache, append, attend, capacity_of, copy_slots, empty_cache
from common.config import SILU, all_heads, head_dim, read_config, read_rope
from common.fields import Even, divides
from common.kernels.dispatch import AUTO, KERNEL_FREE, Impl
from common.kernels.reference import Slot
from common.names import Order, Same, Table
from common.packing import Packing, read_packing
from common.products import embed_rows, linear
from common.quant import Matrix, out_features
from common.sampling import Sampling, sample, sampling_params
from common.sharding import DATA, MODEL, UNSPLIT, P, Shards, round_up, split_heads
from common.weights import matrix, norm, specs_like, vocab_rows


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
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: Annotated[int, divides("num_attention_heads")]
    head_dim: Even
    rope_theta: float
    rope_scaling: RopeScaling | None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    packing: Packing | None = None  # quantization_config: how the files' matrices are packed


class Layer(NamedTuple):
    """The loader decides how a Matrix is stored (bfloat16, int8, ...); products take any form."""

    attn_norm: Array  # [D]
    wq: Matrix  # [N * H, D]
    wk: Matrix  # [K * H, D]
    wv: Matrix  # [K * H, D]
    wo: Matrix  # [D, N * H]
    mlp_norm: Array  # [D]
    w_gate: Matrix  # [F, D]
    w_up: Matrix  # [F, D]
    w_down: Matrix  # [D, F]


class Weights(NamedTuple):
    embed: Matrix  # [V, D]
    layers: tuple[Layer, ...]
    norm: Array  # [D]
    head: Matrix | None  # [V, D]; None if the embedding is the head too


class DecodeState(NamedTuple):
    """B slots, decoded together. A slot of length 0 is empty. When a request ends, `serve` sets its
    slot's length to 0 and clears nothing: attention hides what is past the length, even NaN."""

    # For each layer two arrays of [B, K, S, H]: rotated keys, and values. If H is not a multiple of
    # 128, they share one array, [B, K, S, 2 * H].
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
    """x / rms(x) in float32, then times the weight in the model's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * weight_D


def rope_frequencies(config: Config) -> np.ndarray:
    """Radians per position of each pair (i, i + H / 2) of a head, [H / 2]. Scaling of type llama3
    divides the slow ones by `factor`, keeps the fast ones, and blends those in between."""
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
    """Rotates each pair of elements i and i + H / 2 of a head by the angle of its position."""
    cos, sin = step.cos.astype(x_BTNH.dtype), step.sin.astype(x_BTNH.dtype)
    a, b = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def embed(table_VD: Matrix, tokens_BT: Array, dtype: DTypeLike) -> Array:
    """Each device looks up the ids that it holds. Other ids give zeros."""
    local_BT = tokens_BT - lax.axis_index(MODEL) * out_features(table_VD)
    x_BTD = embed_rows(table_VD, local_BT, dtype)
    return lax.psum(x_BTD, MODEL)  # partial sums over own ids -> replicated


def attend_slot(slot: Slot, scale: float) -> Array:
    """The definition of attention, of one slot, whose arrays are float32: in bfloat16 a score near
    50 would be off by up to 0.125, and its probability by 13 %. implementation="reference" runs it;
    otherwise a kernel in common/kernels computes the same. If you change the scores here, change
    the kernels, too. A query sees all positions up to its own. `attend` has replaced keys and
    values past end_B by zeros."""
    q_TKGH, k_KSH, v_KSH, position_T, position_S = slot
    score_KGTS = jnp.einsum("tkgh,ksh->kgts", q_TKGH, k_KSH) * scale
    seen_TS = position_S <= position_T[:, None]
    p_KGTS = jax.nn.softmax(jnp.where(seen_TS, score_KGTS, -jnp.inf))
    return jnp.einsum("kgts,ksh->tkgh", p_KGTS, v_KSH)


def attention(
    x_BTD: Array, layer: Layer, cache: LayerCache, step: Step, config: Config
) -> tuple[Array, LayerCache]:
    """Appends T tokens to the cache. Each attends to all positions up to its own. Returns the
    output [B, T, D], summed over the device's heads, and the cache. In a slot that is skipped,
    end - T is negative, and `append` writes nothing below position 0. `attend` also takes a
    `window` (see gpt_oss) or a `chunk` (see llama4)."""
    (B, T, _), H = x_BTD.shape, config.head_dim
    projections = (linear(x_BTD, w) for w in (layer.wq, layer.wk, layer.wv))
    q_BTNH, k_BTKH, v_BTKH = (x.reshape(B, T, -1, H) for x in projections)
    q_BTNH, k_BTKH = rotate(q_BTNH, step), rotate(k_BTKH, step)
    cache = append(cache, k_BTKH, v_BTKH, step.end_B - T)
    o_BTNH = attend(q_BTNH, cache, step.end_B, step.implementation, attend_slot, scale=H**-0.5)
    return linear(o_BTNH.reshape(B, T, -1), layer.wo), cache


def mlp(x_BTD: Array, layer: Layer) -> Array:
    """Partial sums over own F."""
    h_BTF = jax.nn.silu(linear(x_BTD, layer.w_gate)) * linear(x_BTD, layer.w_up)
    return linear(h_BTF, layer.w_down)


@partial(jax.jit, static_argnames="config")
def block(
    x_BTD: Array, layer: Layer, cache: LayerCache, step: Step, config: Config
) -> tuple[Array, LayerCache]:
    h_BTD = rms_norm(x_BTD, layer.attn_norm, config.rms_norm_eps)
    o_BTD, cache = attention(h_BTD, layer, cache, step, config)
    x_BTD = x_BTD + lax.psum(o_BTD, MODEL)  # partial sums over own heads -> replicated
    h_BTD = rms_norm(x_BTD, layer.mlp_norm, config.rms_norm_eps)
    o_BTD = mlp(h_BTD, layer)
    x_BTD = x_BTD + lax.psum(o_BTD, MODEL)  # partial sums over own F -> replicated
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


def config_from_hf(hf: dict[str, Any]) -> Config:
    """Config of a config.json. A field unknown here and in common/config.py is a ValueError."""
    fields = read_rope(Config, hf, {"llama3": RopeScaling}, theta=10000.0)
    return read_config(
        Config,
        hf,
        model_types=("llama",),
        fields_read=fields | dict(packing=read_packing(hf)),
        if_missing=dict(num_key_value_heads=all_heads, head_dim=head_dim),
        accepted=dict(  # Other values are refused. They would mean:
            hidden_act=SILU,  # another activation in the MLP
            attention_bias=False,  # biases on q, k, v and o
            mlp_bias=False,  # biases on gate, up and down
            rope_interleaved=False,  # rotation of neighbours, elements 2 i and 2 i + 1
        ),
        ignored=("is_llama_config", "max_sequence_length"),
    )


# Slots are split over `data`, and the cache of each layer also over MODEL, by heads.
STATE_SPEC = DecodeState(cache=P(DATA, MODEL), length_B=P(DATA), token_B=P(DATA), sampling=P(DATA))


def weight_layout(config: Config, shards: Shards = UNSPLIT) -> Weights:
    """Shape and partition of every weight. Zeros pad a split dimension until its parts are equal.
    Two key/value heads on 4 devices become 0, 0, 1, 1; the copies of a head divide its query heads
    between them. (Query head n uses head n // G.)"""
    c, n = config, shards.model
    heads = split_heads(c.num_attention_heads, c.num_key_value_heads, n)
    q, kv = len(heads.query) * c.head_dim, len(heads.kv) * c.head_dim
    D, F, V = c.hidden_size, round_up(c.intermediate_size, n), round_up(c.vocab_size, n)
    out, into = P(MODEL, None), P(None, MODEL)  # split by output, or by input
    layer = Layer(
        attn_norm=norm(D),
        wq=matrix((q, D), out),
        wk=matrix((kv, D), out),
        wv=matrix((kv, D), out),
        wo=matrix((D, q), into),
        mlp_norm=norm(D),
        w_gate=matrix((F, D), out),
        w_up=matrix((F, D), out),
        w_down=matrix((D, F), into),
    )
    return Weights(
        embed=vocab_rows((V, D), out),
        layers=(layer,) * c.num_hidden_layers,
        norm=norm(D),
        head=None if c.tie_word_embeddings else vocab_rows((V, D), out),
    )


def init_state(
    config: Config, slots: int, capacity: int, dtype: DTypeLike, shards: Shards = UNSPLIT
) -> DecodeState:
    """Empty slots of `capacity` positions, with a cache of `dtype`: a float, fp8 or int8."""
    heads = split_heads(config.num_attention_heads, config.num_key_value_heads, shards.model)
    shape = (slots, len(heads.kv), capacity, config.head_dim)
    return DecodeState(
        cache=tuple(empty_cache(shape, dtype) for _ in range(config.num_hidden_layers)),
        length_B=jnp.zeros(slots, jnp.int32),
        token_B=jnp.zeros(slots, jnp.int32),
        sampling=sampling_params(slots),
    )


def checkpoint_table(config: Config, shards: Shards = UNSPLIT) -> Table:
    """Published name -> its weight. An unknown tensor is an error; so is a weight that no tensor
    fills. An Order lists the heads along an axis, device by device, copies included. None: not
    loaded. `Same("x")`: equal to x, or absent."""
    heads = split_heads(config.num_attention_heads, config.num_key_value_heads, shards.model)
    query, kv = (partial(Order, size=config.head_dim, blocks=blocks) for blocks in heads)
    return {
        "model.embed_tokens.weight": "embed",
        "model.layers.*.input_layernorm.weight": "layers.*.attn_norm",
        "model.layers.*.self_attn.q_proj.weight": ("layers.*.wq", query(axis=0)),
        "model.layers.*.self_attn.k_proj.weight": ("layers.*.wk", kv(axis=0)),
        "model.layers.*.self_attn.v_proj.weight": ("layers.*.wv", kv(axis=0)),
        "model.layers.*.self_attn.o_proj.weight": ("layers.*.wo", query(axis=1)),
        "model.layers.*.post_attention_layernorm.weight": "layers.*.mlp_norm",
        "model.layers.*.mlp.gate_proj.weight": "layers.*.w_gate",
        "model.layers.*.mlp.up_proj.weight": "layers.*.w_up",
        "model.layers.*.mlp.down_proj.weight": "layers.*.w_down",
        "model.norm.weight": "norm",
        "lm_head.weight": Same("embed") if config.tie_word_embeddings else "head",
        "model.layers.*.self_attn.rotary_emb.inv_freq": None,
    }

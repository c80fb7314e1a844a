"""Llama 3 in one file: a decoder-only transformer with grouped-query attention and a gated MLP.

The Llama 3 Herd of Models, arXiv 2407.21783. A layer adds to the residual stream twice:

    x += attention(norm(x))                        N query heads share K rotated key/value heads
    x += down(silu(gate(norm(x))) * up(norm(x)))

Dimensions: B batch or slots, T query tokens, S cache positions, D model, N query heads, K key/value
heads, H head dimension, F MLP width, V vocabulary. Inside `shard_map` N, K, F and V are what one
device holds, and B is its slots.

Devices form a mesh of three axes. Slots are split over `data`. Heads, MLP and vocabulary are split
over MODEL, the axes `expert` and `tensor` together. One step of a device sends, over MODEL:

    all-reduce [B, T, D]   once for the embedding and twice a layer, in the model's dtype
    all-reduce [B]         twice, of 4 bytes: the largest logit, and the lowest id that has it
    all-reduce [3, B]      35 times at most, of 4 bytes, to draw where a slot has a temperature

Layers are a tuple and a Python loop: `lax.scan` over stacked layers would copy the weights of each
layer, on CPU always and on TPU where a kernel reads them. `block` is jitted to be traced once.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from common.cache import LayerCache, append, attend, check_insert, copy_rows, empty_cache
from common.config import SILU, all_heads, head_dim, read_config, read_rope
from common.kernels.dispatch import KERNEL_FREE, Impl
from common.names import Order, Same, Table
from common.quant import Matrix, embed_rows, linear, out_features
from common.ranges import Above1, AtLeast1, Count, Even, Positive
from common.sampling import Sampling, sample, sampling_params
from common.sharding import DATA, MODEL, UNSPLIT, P, Shards, round_up, split_heads
from common.weights import matrix, norm, specs_like

Array = jax.Array


class RopeScaling(NamedTuple):
    """`rope_scaling` of type llama3."""

    factor: AtLeast1
    low_freq_factor: Positive
    high_freq_factor: Positive
    original_max_position_embeddings: Count


class Config(NamedTuple):
    """The fields of config.json that shape the computation, under their published names."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Even
    rope_theta: Above1
    rope_scaling: RopeScaling | None
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: Count = 2048


class Layer(NamedTuple):
    """A Matrix is an array, or its form in int8, fp8 or 4 bits: `linear` takes any."""

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
    head: Matrix | None  # [V, D]; None where it is the embedding


class DecodeState(NamedTuple):
    """B slots, decoded together. A slot of length 0 is empty. Nothing reads what a cache holds at
    or past a slot's length: of a finished slot `serve` sets the length to 0, and clears nothing."""

    cache: tuple[LayerCache, ...]  # rotated keys, and values: [B, K, S, H], or as one array
    length_B: Array  # int32: tokens in the cache
    token_B: Array  # int32: the newest token, not in the cache yet
    sampling: Sampling  # arrays of [B]


class Step(NamedTuple):
    """What all layers of one step share."""

    end_B: Array  # int32: the position after the last of the T tokens, padding too; 0: append none
    cos: Array  # float32 [B, T, 1, H / 2]
    sin: Array


def rms_norm(x: Array, weight_D: Array, eps: float) -> Array:
    """x / rms(x) in float32, then times the weight in the model's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * weight_D


def rope_frequencies(config: Config) -> np.ndarray:
    """Radians per position of each pair (i, i + H / 2) of a head, [H / 2]. Scaling of type llama3
    divides those of slow pairs by `factor`, keeps those of fast ones, and blends in between."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequency = (1.0 / np.float32(config.rope_theta) ** exponent).astype(np.float32)
    if config.rope_scaling is None:
        return frequency
    factor, low, high, original = config.rope_scaling
    rotations = original * frequency / (2 * math.pi)  # of each pair in the original context
    smooth = np.clip((rotations - low) / max(high - low, 1e-9), 0, 1)
    return ((1 - smooth) * frequency / factor + smooth * frequency).astype(np.float32)


def rotary(position_BT: Array, config: Config) -> tuple[Array, Array]:
    """cos and sin of each position's angles, float32 [B, T, 1, H / 2]."""
    angle = position_BT[..., None, None].astype(jnp.float32) * rope_frequencies(config)
    # Else XLA's CPU compiler computes them again in each layer, for each head.
    return lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))


def rotate(x_BTNH: Array, step: Step) -> Array:
    """Rotates element i of each head with element i + H / 2, by the angle of its position."""
    cos, sin = step.cos.astype(x_BTNH.dtype), step.sin.astype(x_BTNH.dtype)
    a, b = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def embed(table_VD: Matrix, tokens_BT: Array, dtype: DTypeLike) -> Array:
    """Each device looks up the ids that it holds, and has zeros for the others."""
    local_BT = tokens_BT - lax.axis_index(MODEL) * out_features(table_VD)
    x_BTD = embed_rows(table_VD, local_BT, dtype)
    return lax.psum(x_BTD, MODEL)  # partial: own ids -> replicated


def attention(
    x_BTD: Array, layer: Layer, cache: LayerCache, step: Step, config: Config, implementation: Impl
) -> tuple[Array, LayerCache]:
    """Appends T tokens to the cache, and each attends to all up to itself. Returns the sum over own
    heads [B, T, D], and the cache. Scores and softmax are float32 in `attend`, which has arguments
    for windows, chunks and sinks too; a soft cap would be one more."""
    B, T, _ = x_BTD.shape
    projections = (linear(x_BTD, w) for w in (layer.wq, layer.wk, layer.wv))
    q_BTNH, k_BTKH, v_BTKH = (x.reshape(B, T, -1, config.head_dim) for x in projections)
    cache = append(cache, rotate(k_BTKH, step), v_BTKH, step.end_B - T)
    q_BTNH, scale = rotate(q_BTNH, step), config.head_dim**-0.5
    o_BTNH = attend(q_BTNH, cache, step.end_B, scale=scale, implementation=implementation)
    return linear(o_BTNH.reshape(B, T, -1), layer.wo), cache


def mlp(x_BTD: Array, layer: Layer) -> Array:
    """Partial sums over own part of F."""
    h_BTF = jax.nn.silu(linear(x_BTD, layer.w_gate)) * linear(x_BTD, layer.w_up)
    return linear(h_BTF, layer.w_down)


@partial(jax.jit, static_argnames=("config", "implementation"))
def block(
    x_BTD: Array, layer: Layer, cache: LayerCache, step: Step, config: Config, implementation: Impl
) -> tuple[Array, LayerCache]:
    h_BTD = rms_norm(x_BTD, layer.attn_norm, config.rms_norm_eps)
    o_BTD, cache = attention(h_BTD, layer, cache, step, config, implementation)
    x_BTD = x_BTD + lax.psum(o_BTD, MODEL)  # partial: own heads -> replicated
    h_BTD = rms_norm(x_BTD, layer.mlp_norm, config.rms_norm_eps)
    o_BTD = mlp(h_BTD, layer)
    x_BTD = x_BTD + lax.psum(o_BTD, MODEL)  # partial: own part of F -> replicated
    return x_BTD, cache


def forward(
    weights: Weights,
    cache: tuple[LayerCache, ...],
    tokens_BT: Array,
    end_B: Array,
    config: Config,
    implementation: Impl = None,
    last_B: Array | None = None,
) -> tuple[Array, tuple[LayerCache, ...]]:
    """One device's part of a step of T tokens a slot, of which the last is at position end_B - 1;
    called inside `shard_map`.

    Returns float32 logits of the device's part of the vocabulary, [B, T, V], or [B, V] of the token
    at index last_B of each slot; and the cache with the tokens appended. Differentiable with
    implementation="reference", as tools/train_embedded.py does it.
    """
    T = tokens_BT.shape[1]
    position_BT = end_B[:, None] - T + jnp.arange(T)
    step = Step(end_B, *rotary(position_BT, config))
    x_BTD, caches = embed(weights.embed, tokens_BT, weights.norm.dtype), []
    for layer, layer_cache in zip(weights.layers, cache, strict=True):
        x_BTD, layer_cache = block(x_BTD, layer, layer_cache, step, config, implementation)
        caches.append(layer_cache)
    x = x_BTD if last_B is None else x_BTD[jnp.arange(len(last_B)), last_B]
    x = rms_norm(x, weights.norm, config.rms_norm_eps)
    head = weights.embed if weights.head is None else weights.head
    return linear(x, head, jnp.float32), tuple(caches)


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


def config_from_hf(hf: dict[str, Any]) -> Config:
    """Config of a parsed config.json; ValueError names a key or a value that is not known here."""
    return read_config(
        Config,
        hf,
        model_types=("llama",),
        given=read_rope(hf, {"llama3": RopeScaling}, theta=10000.0),
        derived=dict(num_key_value_heads=all_heads, head_dim=head_dim),
        only=dict(hidden_act=SILU, attention_bias=False, mlp_bias=False, rope_interleaved=False),
        inert=("is_llama_config", "max_sequence_length"),
    )


STATE_SPEC = DecodeState(
    cache=P(DATA, MODEL),  # every array of every layer: slots over data, heads over MODEL
    length_B=P(DATA),
    token_B=P(DATA),
    sampling=P(DATA),
)


def weight_layout(config: Config, shards: Shards = UNSPLIT) -> Weights:
    """Shape and partition of every weight: as published; or padded with zeros (`sample` never draws
    a padded id), and key/value heads repeated where they are fewer than `shards`, so that every
    split dimension divides."""
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
        embed=matrix((V, D), out),
        layers=(layer,) * c.num_hidden_layers,
        norm=norm(D),
        head=None if c.tie_word_embeddings else matrix((V, D), out),
    )


def init_state(
    config: Config, slots: int, capacity: int, dtype: DTypeLike, shards: Shards = UNSPLIT
) -> DecodeState:
    """Empty slots of `capacity` positions, with a cache of `dtype`: a float, fp8 or int8. Heads
    whose width is no multiple of 128 have rows of value and key in one array, [B, K, S, 2 * H]."""
    heads = split_heads(config.num_attention_heads, config.num_key_value_heads, shards.model)
    shape = (slots, len(heads.kv), capacity, config.head_dim)
    return DecodeState(
        cache=tuple(empty_cache(shape, dtype) for _ in range(config.num_hidden_layers)),
        length_B=jnp.zeros(slots, jnp.int32),
        token_B=jnp.zeros(slots, jnp.int32),
        sampling=sampling_params(slots),
    )


def checkpoint_table(config: Config, shards: Shards = UNSPLIT) -> Table:
    """Stored name -> the weight that it becomes, and the order of its heads. Same: must equal that
    weight, and is dropped. None: dropped. Any other name: ValueError."""
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

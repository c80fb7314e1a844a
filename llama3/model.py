"""Llama 3 in one file: a decoder-only transformer with grouped-query attention and a gated MLP.

The Llama 3 Herd of Models, arXiv 2407.21783. A layer is two residual steps, each behind an RMS
norm:

    x += attention(norm(x))                        N query heads share K rotated key/value heads
    x += down(silu(gate(norm(x))) * up(norm(x)))

Weights and caches are one array per layer in a tuple, and the layers are a Python loop: stacked
arrays under `lax.scan` are copied slice by slice on CPU, and before every kernel on TPU. `block` is
a jitted function, so that it is traced once and compilation stays in check.

Dimensions: B batch or slots, T query tokens, S cache positions, D model, N query heads, K key/value
heads, H head dimension, F MLP width, V vocabulary. Inside `shard_map`, N, K, F and V are what one
device holds and B is its slots.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from common.cache import append, attend, empty
from common.checkpoint import Order, Table
from common.quant import Int8, embed_rows, linear, out_features, specs_like
from common.sampling import Sampling, sample, sampling_params
from common.sharding import DATA, MODEL, UNSPLIT, Shards, round_up, split_heads

Array = jax.Array

KERNEL_FREE = ("reference", "blocked")  # shard_map's check covers these; no Pallas call passes it


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
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    max_position_embeddings: int


def config_from_hf(hf: dict[str, Any]) -> Config:
    """Config from a parsed config.json; ValueError names a setting that this file does not
    implement."""
    for name, expected in dict(hidden_act="silu", attention_bias=False, mlp_bias=False).items():
        if hf.get(name, expected) != expected:
            raise ValueError(
                f"config.json: {name}={hf[name]!r} is not implemented, only {expected!r}"
            )
    rope = hf.get("rope_parameters") or {
        "rope_theta": hf["rope_theta"],
        **(hf.get("rope_scaling") or {}),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(
            f"config.json: rope type {kind!r} is not implemented, only 'default' and 'llama3'"
        )
    scaling = (
        RopeScaling(*(rope[field] for field in RopeScaling._fields)) if kind == "llama3" else None
    )
    heads = hf["num_attention_heads"]
    return Config(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_hidden_layers=hf["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=hf.get("num_key_value_heads") or heads,
        head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
        rms_norm_eps=hf["rms_norm_eps"],
        rope_theta=rope["rope_theta"],
        rope_scaling=scaling,
        tie_word_embeddings=hf["tie_word_embeddings"],
        max_position_embeddings=hf["max_position_embeddings"],
    )


class Layer(NamedTuple):
    attn_norm: Any  # [D]
    wq: Any  # [N * H, D]
    wk: Any  # [K * H, D]
    wv: Any  # [K * H, D]
    wo: Any  # [D, N * H]
    mlp_norm: Any  # [D]
    w_gate: Any  # [F, D]
    w_up: Any  # [F, D]
    w_down: Any  # [D, F]


class Weights(NamedTuple):
    embed: Any  # [V, D]
    layers: tuple[Layer, ...]
    norm: Any  # [D]
    head: Any  # [V, D], or None when it is the embedding


def weight_shapes(config: Config, shards: Shards = UNSPLIT) -> Weights:
    """Shapes as published; with `shards`, padded so that every split dimension divides."""
    c, n = config, shards.model
    heads = split_heads(c.num_attention_heads, c.num_key_value_heads, n)
    q, kv = len(heads.query) * c.head_dim, len(heads.kv) * c.head_dim
    D, F, V = c.hidden_size, round_up(c.intermediate_size, n), round_up(c.vocab_size, n)
    layer = Layer((D,), (q, D), (kv, D), (kv, D), (D, q), (D,), (F, D), (F, D), (D, F))
    head = None if c.tie_word_embeddings else (V, D)
    return Weights((V, D), (layer,) * c.num_hidden_layers, (D,), head)


def weight_specs(config: Config) -> Weights:
    """Matrices that read the residual stream are split by output, those that write it by input."""
    out, into = P(MODEL, None), P(None, MODEL)
    layer = Layer(P(), out, out, out, into, P(), out, out, into)
    head = None if config.tie_word_embeddings else out
    return Weights(out, (layer,) * config.num_hidden_layers, P(), head)


class KVCache(NamedTuple):
    """Keys (rotated) and values by layer; what lies at or past a slot's length is stale."""

    k: tuple[Array | Int8, ...]  # [B, K, S, H] each
    v: tuple[Array | Int8, ...]


class DecodeState(NamedTuple):
    """The slots being decoded. A slot of length 0 is empty, and whatever else it holds is stale."""

    cache: Any  # KVCache
    length_B: Any  # int32: tokens in the cache
    token_B: Any  # int32: the newest token, not in the cache yet
    sampling: Any  # Sampling of [B] each


CACHE_SPEC: Any = P(DATA, MODEL)  # slots over data, heads over the model axes; int8 scales likewise
STATE_SPEC = DecodeState(CACHE_SPEC, *[P(DATA)] * 3)


def init_cache(
    config: Config, batch: int, capacity: int, dtype: Any, shards: Shards = UNSPLIT
) -> KVCache:
    heads = split_heads(config.num_attention_heads, config.num_key_value_heads, shards.model)
    shape = (batch, len(heads.kv), capacity, config.head_dim)
    k, v = (tuple(empty(shape, dtype) for _ in range(config.num_hidden_layers)) for _ in "kv")
    return KVCache(k, v)


def init_state(
    config: Config, slots: int, capacity: int, dtype: Any, shards: Shards = UNSPLIT
) -> DecodeState:
    length_B, token_B = jnp.zeros(slots, jnp.int32), jnp.zeros(slots, jnp.int32)
    cache = init_cache(config, slots, capacity, dtype, shards)
    return DecodeState(cache, length_B, token_B, sampling_params(slots))


def rms_norm(x: Array, weight_D: Array, eps: float) -> Array:
    """x / rms(x) in float32, then the weight in the model's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return x32.astype(x.dtype) * weight_D


def rope_frequencies(config: Config) -> np.ndarray:
    """Radians per position for each pair of a head, [H / 2]; llama3 scaling slows the long
    wavelengths by `factor`."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequency = (1.0 / np.float32(config.rope_theta) ** exponent).astype(np.float32)
    if config.rope_scaling is None:
        return frequency
    factor, low, high, original = config.rope_scaling
    turns = original * frequency / (2 * math.pi)  # of a pair within the original context
    smooth = np.clip((turns - low) / max(high - low, 1e-9), 0, 1)
    return ((1 - smooth) * frequency / factor + smooth * frequency).astype(np.float32)


def rotary(positions_BT: Array, config: Config) -> tuple[Array, Array]:
    """cos and sin [B, T, 1, H / 2], float32."""
    angles = positions_BT[..., None, None].astype(jnp.float32) * rope_frequencies(config)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x_BTNH: Array, rope: tuple[Array, Array]) -> Array:
    """Rotates element i of each head with element i + H / 2."""
    cos, sin = (r.astype(x_BTNH.dtype) for r in rope)
    a, b = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def embed(table_VD: Any, tokens_BT: Array, dtype: Any) -> Array:
    """Each device looks up the ids it owns; the others contribute zeros."""
    local_BT = tokens_BT - lax.axis_index(MODEL) * out_features(table_VD)
    x_BTD = embed_rows(table_VD, local_BT, dtype)
    return lax.psum(x_BTD, MODEL)  # own ids only -> replicated


def attention(x_BTD, layer, k_cache, v_cache, rope, length_B, config, implementation):
    """Appends T tokens to the cache and attends to it: (output [B, T, D], k_cache, v_cache)."""
    B, T, _ = x_BTD.shape
    projections = (linear(x_BTD, w) for w in (layer.wq, layer.wk, layer.wv))
    q_BTNH, k_BTKH, v_BTKH = (x.reshape(B, T, -1, config.head_dim) for x in projections)
    k_cache = append(k_cache, rotate(k_BTKH, rope), length_B - T)
    v_cache = append(v_cache, v_BTKH, length_B - T)
    scale, q_BTNH = config.head_dim**-0.5, rotate(q_BTNH, rope)
    o_BTNH = attend(q_BTNH, k_cache, v_cache, length_B, scale=scale, implementation=implementation)
    o_BTD = linear(o_BTNH.reshape(B, T, -1), layer.wo)
    return lax.psum(o_BTD, MODEL), k_cache, v_cache  # partial: own heads only -> replicated


def mlp(x_BTD: Array, layer: Layer) -> Array:
    h_BTF = jax.nn.silu(linear(x_BTD, layer.w_gate)) * linear(x_BTD, layer.w_up)
    return lax.psum(linear(h_BTF, layer.w_down), MODEL)  # partial: own part of F -> replicated


@partial(jax.jit, static_argnames=("config", "implementation"))
def block(x_BTD, layer, k_cache, v_cache, rope, length_B, config, implementation):
    h_BTD = rms_norm(x_BTD, layer.attn_norm, config.rms_norm_eps)
    o_BTD, *caches = attention(
        h_BTD, layer, k_cache, v_cache, rope, length_B, config, implementation
    )
    x_BTD = x_BTD + o_BTD
    x_BTD = x_BTD + mlp(rms_norm(x_BTD, layer.mlp_norm, config.rms_norm_eps), layer)
    return x_BTD, *caches


def forward(
    weights: Weights,
    cache: KVCache,
    tokens_BT: Array,
    length_B: Array,
    config: Config,
    implementation: str | None = None,
    at_B: Array | None = None,
) -> tuple[Array, KVCache]:
    """One device's part of the model over T new tokens per row; runs inside `shard_map`.

    `length_B` counts the row's tokens with these T; 0 is an empty row. Returns this device's range
    of the logits in float32, [B, T, V], or [B, V] of token `at_B` alone; and the cache with the T
    tokens appended.
    """
    T = tokens_BT.shape[1]
    rope = rotary(length_B[:, None] - T + jnp.arange(T), config)
    x_BTD = embed(weights.embed, tokens_BT, weights.norm.dtype)
    keys, values = [], []
    for layer, k, v in zip(weights.layers, *cache, strict=True):
        x_BTD, k, v = block(x_BTD, layer, k, v, rope, length_B, config, implementation)
        keys.append(k)
        values.append(v)
    x = x_BTD if at_B is None else x_BTD[jnp.arange(len(at_B)), at_B]
    x = rms_norm(x, weights.norm, config.rms_norm_eps)
    head = weights.embed if weights.head is None else weights.head
    return linear(x, head, jnp.float32), KVCache(tuple(keys), tuple(values))


@partial(jax.jit, static_argnames=("config", "mesh", "implementation"), donate_argnames="cache")
def prefill(
    weights: Weights,
    cache: KVCache,
    tokens_BT: Array,
    start_B: Array,
    count_B: Array,
    sampling: Sampling,
    *,
    config: Config,
    mesh: Mesh,
    implementation: str | None = None,
) -> tuple[KVCache, Array]:
    """Reads count_B tokens of each prompt behind the start_B that the cache already holds.

    T is a bucket: tokens past count_B are padding, whose keys land beyond the row's length and are
    never seen. Returns the cache (donated) and the next token [B], which means something once the
    prompt is complete.
    """

    def run(weights, cache, tokens_BT, start_B, count_B, sampling):
        length_B, last_B = start_B + tokens_BT.shape[1], jnp.maximum(count_B - 1, 0)
        logits_BV, cache = forward(
            weights, cache, tokens_BT, length_B, config, implementation, last_B
        )
        return cache, pick(logits_BV, sampling, start_B + count_B)

    pick = partial(sample, vocab_size=config.vocab_size, axes=MODEL)
    in_specs = (specs_like(weights, weight_specs(config)), CACHE_SPEC, *[P(DATA)] * 4)
    out_specs = (CACHE_SPEC, P(DATA))
    check = implementation in KERNEL_FREE
    run = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check)
    return run(weights, cache, tokens_BT, start_B, count_B, sampling)


@partial(jax.jit, static_argnames="mesh", donate_argnames="state")
def insert(state: DecodeState, prompt: DecodeState, slot_B: Array, *, mesh: Mesh) -> DecodeState:
    """Copies row b of `prompt` into slot slot_B[b], on the row's own `data` shard; -1 copies
    nothing."""

    def run(state, prompt, slot_B):
        slots = len(state.length_B)
        local_B = slot_B - lax.axis_index(DATA) * slots
        here_B = (local_B >= 0) & (local_B < slots)
        local_B = jnp.where(here_B, local_B, slots)  # past the end, where writes are dropped
        return jax.tree.map(lambda s, p: s.at[local_B].set(p, mode="drop"), state, prompt)

    in_specs = (STATE_SPEC, STATE_SPEC, P(DATA))
    run = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=STATE_SPEC)
    return run(state, prompt, slot_B)


@partial(jax.jit, static_argnames=("config", "mesh", "implementation"), donate_argnames="state")
def generate(
    weights: Weights,
    state: DecodeState,
    *,
    config: Config,
    mesh: Mesh,
    implementation: str | None = None,
) -> tuple[DecodeState, Array]:
    """One more token for every slot that is not empty: (state (donated), token [B]).

    The newest token joins the cache, and its successor is sampled.
    """

    def run(weights, state):
        length_B = jnp.where(state.length_B > 0, state.length_B + 1, 0)
        tokens_BT = state.token_B[:, None]
        logits_BTV, cache = forward(
            weights, state.cache, tokens_BT, length_B, config, implementation
        )
        token_B = pick(logits_BTV[:, 0], state.sampling, length_B)
        return DecodeState(cache, length_B, token_B, state.sampling), token_B

    pick = partial(sample, vocab_size=config.vocab_size, axes=MODEL)
    in_specs = (specs_like(weights, weight_specs(config)), STATE_SPEC)
    out_specs, check = (STATE_SPEC, P(DATA)), implementation in KERNEL_FREE
    run = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check)
    return run(weights, state)


def checkpoint_table(config: Config, shards: Shards = UNSPLIT) -> Table:
    """Published name -> its place in Weights (None: not needed), and the order of its heads."""
    heads = split_heads(config.num_attention_heads, config.num_key_value_heads, shards.model)
    query, kv_heads = (partial(Order, size=config.head_dim, blocks=b) for b in heads)
    return {
        "model.embed_tokens.weight": ("embed", None),
        "model.layers.*.input_layernorm.weight": ("layers.*.attn_norm", None),
        "model.layers.*.self_attn.q_proj.weight": ("layers.*.wq", query(axis=0)),
        "model.layers.*.self_attn.k_proj.weight": ("layers.*.wk", kv_heads(axis=0)),
        "model.layers.*.self_attn.v_proj.weight": ("layers.*.wv", kv_heads(axis=0)),
        "model.layers.*.self_attn.o_proj.weight": ("layers.*.wo", query(axis=1)),
        "model.layers.*.post_attention_layernorm.weight": ("layers.*.mlp_norm", None),
        "model.layers.*.mlp.gate_proj.weight": ("layers.*.w_gate", None),
        "model.layers.*.mlp.up_proj.weight": ("layers.*.w_up", None),
        "model.layers.*.mlp.down_proj.weight": ("layers.*.w_down", None),
        "model.norm.weight": ("norm", None),
        "lm_head.weight": (None if config.tie_word_embeddings else "head", None),
        "model.layers.*.self_attn.rotary_emb.inv_freq": (None, None),
    }

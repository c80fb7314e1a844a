"""Qwen3 in one file, dense and mixture of experts: llama3 with a norm on every query and key head,
and in sparse layers many small MLPs of which each token chooses a few.

Qwen3 Technical Report, arXiv 2505.09388. What differs from llama3:

    q, k = rope(norm(q)), rope(norm(k))            over the head dimension, one weight for all heads
    x += sum over its X experts e of p[e] * down[e](silu(gate[e](norm(x))) * up[e](norm(x)))
                                                   p = softmax(router(norm(x))), the X largest
    YaRN in place of the llama3 rope scaling; matrices may be published, and are kept, in fp8

Weights and caches are one array per layer in a tuple, and the layers are a Python loop: stacked
arrays under `lax.scan` are copied slice by slice on CPU, and before every kernel on TPU. `block` is
a jitted function, so that it is traced once and compilation stays in check.

Dimensions: B batch or slots, T query tokens, M = B * T, S cache positions, D model, N query heads,
K key/value heads, H head dimension, F MLP width, E experts, X experts of a token, V vocabulary.
Inside `shard_map`, N, K, F, E and V are what one device holds (the router knows all E) and B is its
slots.
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
from common.experts import group_by_expert, num_experts
from common.kernels.ragged_dot import ragged_dot
from common.quant import FP8_BLOCK, Int8, embed_rows, fp8_shapes, linear, out_features, specs_like
from common.sampling import Sampling, sample, sampling_params
from common.sharding import DATA, EXPERT, MODEL, TENSOR, UNSPLIT, Shards, round_up, split_heads

Array = jax.Array

KERNEL_FREE = ("reference", "blocked")  # shard_map's check covers these; no Pallas call passes it


class Yarn(NamedTuple):
    """`rope_scaling` of type yarn."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    attention_factor: float  # of cos and sin
    truncate: bool


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
    rope_scaling: Yarn | None
    tie_word_embeddings: bool
    max_position_embeddings: int
    num_experts: int  # 0 in a dense model
    num_experts_per_tok: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    decoder_sparse_step: int
    mlp_only_layers: tuple[int, ...]
    fp8: bool  # quantization_config


DENSE: dict[str, Any] = dict(  # what config.json of a dense model leaves out
    num_experts=0,
    num_experts_per_tok=0,
    moe_intermediate_size=0,
    norm_topk_prob=False,
    decoder_sparse_step=1,
    mlp_only_layers=(),
)


def config_from_hf(hf: dict[str, Any]) -> Config:
    """Config from a parsed config.json; ValueError names a setting that this file does not
    implement."""
    only = dict(hidden_act="silu", attention_bias=False, use_sliding_window=False)
    for name, expected in only.items():
        if hf.get(name, expected) != expected:
            raise ValueError(
                f"config.json: {name}={hf[name]!r} is not implemented, only {expected!r}"
            )
    if hf["model_type"] not in ("qwen3", "qwen3_moe"):
        raise ValueError(
            f"config.json: model_type={hf['model_type']!r} is not implemented, only 'qwen3' and "
            "'qwen3_moe'"
        )
    rope = hf.get("rope_parameters") or {
        "rope_theta": hf["rope_theta"],
        **(hf.get("rope_scaling") or {}),
    }
    moe = hf if hf["model_type"] == "qwen3_moe" else DENSE
    return Config(
        vocab_size=hf["vocab_size"],
        hidden_size=hf["hidden_size"],
        intermediate_size=hf["intermediate_size"],
        num_hidden_layers=hf["num_hidden_layers"],
        num_attention_heads=hf["num_attention_heads"],
        num_key_value_heads=hf["num_key_value_heads"],
        head_dim=hf["head_dim"],
        rms_norm_eps=hf["rms_norm_eps"],
        rope_theta=rope["rope_theta"],
        rope_scaling=yarn_from_hf(rope),
        tie_word_embeddings=hf["tie_word_embeddings"],
        max_position_embeddings=hf["max_position_embeddings"],
        num_experts=moe.get("num_local_experts") or moe["num_experts"],  # transformers 5 or hub
        num_experts_per_tok=moe["num_experts_per_tok"],
        moe_intermediate_size=moe["moe_intermediate_size"],
        norm_topk_prob=moe["norm_topk_prob"],
        decoder_sparse_step=moe["decoder_sparse_step"],
        mlp_only_layers=tuple(moe["mlp_only_layers"]),
        fp8=is_fp8(hf.get("quantization_config") or {}),
    )


def yarn_from_hf(rope: dict[str, Any]) -> Yarn | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise ValueError(
            f"config.json: rope type {kind!r} is not implemented, only 'default' and 'yarn'"
        )
    if other := rope.keys() - {"rope_theta", "rope_type", "type", *Yarn._fields}:
        raise ValueError(f"config.json: rope setting {min(other)!r} is not implemented")
    if kind == "default":
        return None
    factor, attention_factor = rope["factor"], rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = 0.1 * math.log(max(factor, 1)) + 1
    return Yarn(
        factor=factor,
        original_max_position_embeddings=rope["original_max_position_embeddings"],
        beta_fast=rope.get("beta_fast") or 32,
        beta_slow=rope.get("beta_slow") or 1,
        attention_factor=attention_factor,
        truncate=rope.get("truncate", True),
    )


def is_fp8(quantization: dict[str, Any]) -> bool:
    """Whether the projections are published in fp8: all of them, or none."""
    if not quantization:
        return False
    method, size = quantization["quant_method"], quantization.get("weight_block_size")
    if method != "fp8" or size != [FP8_BLOCK, FP8_BLOCK]:
        raise ValueError(
            f"config.json: quantization_config with quant_method {method!r} and weight_block_size "
            f"{size} is not implemented, only 'fp8' and {[FP8_BLOCK, FP8_BLOCK]}"
        )
    for name in quantization.get("modules_to_not_convert") or []:
        if name.endswith("_proj"):
            raise ValueError(
                f"config.json: modules_to_not_convert with {name!r} is not implemented: all "
                "projections are fp8"
            )
    return True


class Mlp(NamedTuple):
    """One MLP, or with one more axis, E, in front all experts of a layer."""

    w_gate: Any  # [F, D]
    w_up: Any  # [F, D]
    w_down: Any  # [D, F]


class Moe(NamedTuple):
    router: Any  # [E, D]
    experts: Mlp


class Layer(NamedTuple):
    attn_norm: Any  # [D]
    wq: Any  # [N * H, D]
    wk: Any  # [K * H, D]
    wv: Any  # [K * H, D]
    q_norm: Any  # [H]
    k_norm: Any  # [H]
    wo: Any  # [D, N * H]
    mlp_norm: Any  # [D]
    mlp: Any  # Mlp, or Moe in a sparse layer


class Weights(NamedTuple):
    embed: Any  # [V, D]
    layers: tuple[Layer, ...]
    norm: Any  # [D]
    head: Any  # [V, D], or None when it is the embedding


def layers_of(config: Config, layer: Layer, dense: Mlp, sparse: Moe) -> tuple[Layer, ...]:
    """`layer` with the MLP that each has."""

    def is_sparse(i: int) -> bool:
        step = (i + 1) % config.decoder_sparse_step == 0
        return config.num_experts > 0 and step and i not in config.mlp_only_layers

    mlps = (sparse if is_sparse(i) else dense for i in range(config.num_hidden_layers))
    return tuple(layer._replace(mlp=mlp) for mlp in mlps)


def weight_shapes(config: Config, shards: Shards = UNSPLIT) -> Weights:
    """Shapes as published; with `shards`, padded so that every split dimension divides, in fp8 into
    whole blocks."""
    c, n = config, shards.model
    if c.num_experts % shards.expert:
        raise ValueError(f"{c.num_experts} experts do not divide by the mesh's {shards.expert}")
    if c.fp8 and n > 1 and c.head_dim % FP8_BLOCK:
        raise ValueError(
            f"heads of {c.head_dim} in fp8 cannot be split over {n} devices: they are not whole "
            f"blocks of {FP8_BLOCK}"
        )
    heads = split_heads(c.num_attention_heads, c.num_key_value_heads, n)
    q, kv = len(heads.query) * c.head_dim, len(heads.kv) * c.head_dim
    D, E, V = c.hidden_size, c.num_experts, round_up(c.vocab_size, n)
    matrix: Any = fp8_shapes if c.fp8 else tuple

    def mlp(width: int, n: int, *lead: int) -> Mlp:
        F = round_up(width, n * FP8_BLOCK if c.fp8 and n > 1 else n)
        out, into = matrix((*lead, F, D)), matrix((*lead, D, F))
        return Mlp(out, out, into)

    wq, wkv, wo, H = matrix((q, D)), matrix((kv, D)), matrix((D, q)), (c.head_dim,)
    layer = Layer((D,), wq, wkv, wkv, H, H, wo, (D,), mlp=None)
    dense = mlp(c.intermediate_size, n)
    sparse = Moe((E, D), mlp(c.moe_intermediate_size, shards.tensor, E))
    head = None if c.tie_word_embeddings else (V, D)
    return Weights((V, D), layers_of(c, layer, dense, sparse), (D,), head)


def weight_specs(config: Config) -> Weights:
    """Matrices that read the residual stream are split by output, those that write it by input;
    experts over `expert`, and each over `tensor`."""
    out, into = P(MODEL, None), P(None, MODEL)
    layer = Layer(P(), out, out, out, P(), P(), into, P(), mlp=None)
    of_expert, into_expert = P(EXPERT, TENSOR, None), P(EXPERT, None, TENSOR)
    sparse = Moe(P(), Mlp(of_expert, of_expert, into_expert))
    head = None if config.tie_word_embeddings else out
    return Weights(out, layers_of(config, layer, Mlp(out, out, into), sparse), P(), head)


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


def yarn_frequencies(frequency: np.ndarray, theta: float, yarn: Yarn) -> np.ndarray:
    """YaRN (arXiv 2309.00071): pairs that turn more than beta_fast times within the original
    context keep their frequency, those below beta_slow turns get 1 / factor of it, and a ramp lies
    between."""
    R = 2 * len(frequency)

    def pair(turns: float) -> float:  # which turns so often, as a fraction
        context = yarn.original_max_position_embeddings
        return R * math.log(context / (2 * math.pi * turns)) / (2 * math.log(theta))

    low, high = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, R - 1)  # R, not R / 2: as published
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(R // 2) - low) / width, 0, 1)
    return (frequency * (1 - ramp) + frequency / yarn.factor * ramp).astype(np.float32)


def rope_frequencies(config: Config) -> np.ndarray:
    """Radians per position for each pair of a head, [H / 2]."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequency = (1.0 / np.float32(config.rope_theta) ** exponent).astype(np.float32)
    if config.rope_scaling is None:
        return frequency
    return yarn_frequencies(frequency, config.rope_theta, config.rope_scaling)


def rotary(positions_BT: Array, config: Config) -> tuple[Array, Array]:
    """cos and sin [B, T, 1, H / 2], float32."""
    angles = positions_BT[..., None, None].astype(jnp.float32) * rope_frequencies(config)
    factor = 1 if config.rope_scaling is None else config.rope_scaling.attention_factor
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


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
    q_BTNH = rms_norm(q_BTNH, layer.q_norm, config.rms_norm_eps)
    k_BTKH = rms_norm(k_BTKH, layer.k_norm, config.rms_norm_eps)
    k_cache = append(k_cache, rotate(k_BTKH, rope), length_B - T)
    v_cache = append(v_cache, v_BTKH, length_B - T)
    scale, q_BTNH = config.head_dim**-0.5, rotate(q_BTNH, rope)
    o_BTNH = attend(q_BTNH, k_cache, v_cache, length_B, scale=scale, implementation=implementation)
    o_BTD = linear(o_BTNH.reshape(B, T, -1), layer.wo)
    return lax.psum(o_BTD, MODEL), k_cache, v_cache  # partial: own heads only -> replicated


def mlp(x_BTD: Array, w: Mlp) -> Array:
    h_BTF = jax.nn.silu(linear(x_BTD, w.w_gate)) * linear(x_BTD, w.w_up)
    return lax.psum(linear(h_BTF, w.w_down), MODEL)  # partial: own part of F -> replicated


def route(x_MD: Array, router_ED: Array, config: Config) -> tuple[Array, Array]:
    """The experts of each token and their weights, both [M, X]."""
    p_ME = jax.nn.softmax(linear(x_MD, router_ED).astype(jnp.float32))
    weight_MX, expert_MX = lax.top_k(p_ME, config.num_experts_per_tok)
    if config.norm_topk_prob:
        weight_MX = weight_MX / weight_MX.sum(axis=-1, keepdims=True)
    return weight_MX.astype(x_MD.dtype), expert_MX


def moe(x_BTD: Array, w: Moe, config: Config, implementation: str | None) -> Array:
    """Every device routes all tokens of its slots, and computes what its experts do for them."""
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
    weight_MX, expert_MX = route(x_MD, w.router, config)
    groups = group_by_expert(expert_MX, num_experts(w.experts.w_gate))
    dot = partial(ragged_dot, group_sizes_E=groups.sizes, implementation=implementation)
    rows = x_MD[groups.token]  # [M * X, D], an expert's one after the other
    h = jax.nn.silu(dot(rows, w.experts.w_gate)) * dot(rows, w.experts.w_up)
    y_MXD = dot(h, w.experts.w_down)[groups.row]
    o_MD = (y_MXD * weight_MX[..., None]).sum(axis=1)
    o_MD = lax.psum(o_MD, MODEL)  # partial: own experts, own part of F -> replicated
    return o_MD.reshape(x_BTD.shape)


@partial(jax.jit, static_argnames=("config", "implementation"))
def block(x_BTD, layer, k_cache, v_cache, rope, length_B, config, implementation):
    h_BTD = rms_norm(x_BTD, layer.attn_norm, config.rms_norm_eps)
    o_BTD, *caches = attention(
        h_BTD, layer, k_cache, v_cache, rope, length_B, config, implementation
    )
    x_BTD = x_BTD + o_BTD
    h_BTD = rms_norm(x_BTD, layer.mlp_norm, config.rms_norm_eps)
    if isinstance(layer.mlp, Moe):
        x_BTD = x_BTD + moe(h_BTD, layer.mlp, config, implementation)
    else:
        x_BTD = x_BTD + mlp(h_BTD, layer.mlp)
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
    table: Table = {
        "model.embed_tokens.weight": ("embed", None),
        "model.layers.*.input_layernorm.weight": ("layers.*.attn_norm", None),
        "model.layers.*.self_attn.q_proj.weight": ("layers.*.wq", query(axis=0)),
        "model.layers.*.self_attn.k_proj.weight": ("layers.*.wk", kv_heads(axis=0)),
        "model.layers.*.self_attn.v_proj.weight": ("layers.*.wv", kv_heads(axis=0)),
        "model.layers.*.self_attn.q_norm.weight": ("layers.*.q_norm", None),
        "model.layers.*.self_attn.k_norm.weight": ("layers.*.k_norm", None),
        "model.layers.*.self_attn.o_proj.weight": ("layers.*.wo", query(axis=1)),
        "model.layers.*.post_attention_layernorm.weight": ("layers.*.mlp_norm", None),
        "model.layers.*.mlp.gate_proj.weight": ("layers.*.mlp.w_gate", None),
        "model.layers.*.mlp.up_proj.weight": ("layers.*.mlp.w_up", None),
        "model.layers.*.mlp.down_proj.weight": ("layers.*.mlp.w_down", None),
        "model.layers.*.mlp.gate.weight": ("layers.*.mlp.router", None),
        "model.layers.*.mlp.experts.*.gate_proj.weight": ("layers.*.mlp.experts.w_gate", None),
        "model.layers.*.mlp.experts.*.up_proj.weight": ("layers.*.mlp.experts.w_up", None),
        "model.layers.*.mlp.experts.*.down_proj.weight": ("layers.*.mlp.experts.w_down", None),
        "model.norm.weight": ("norm", None),
        "lm_head.weight": (None if config.tie_word_embeddings else "head", None),
    }
    return fp8_table(table, shards) if config.fp8 else table


def fp8_table(table: Table, shards: Shards) -> Table:
    """The table of a checkpoint whose projections are stored as 8-bit floats and their scales."""
    fp8: Table = {}
    for name, (path, order) in table.items():
        if not name.endswith("_proj.weight"):
            fp8[name] = path, order
            continue
        in_blocks = None  # the published order, on one device
        if isinstance(order, Order) and shards.model > 1:
            in_blocks = order._replace(size=order.size // FP8_BLOCK)
        fp8[name] = f"{path}.values", order
        fp8[f"{name}_scale_inv"] = f"{path}.scale", in_blocks
    return fp8

"""GPT-OSS in one file: llama3 with every MLP a mixture of experts that is kept in 4 bits, and with
attention that slides in every other layer, in which a head may give its weight to no position.

gpt-oss-120b & gpt-oss-20b Model Card, arXiv 2508.10925. What differs from llama3:

    o[n] = sum_s exp(q[n] . k[s]) v[s] / (exp(sink[n]) + sum_s exp(q[n] . k[s]))
                                                   a learned sink per head, which has no value
    sliding layers see the last `sliding_window` positions, full layers all of them
    x += sum over a token's X experts e of p[e] * (down[e](h) + b[e])
                                                   p = softmax(the X largest of router(norm(x)))
    h = (up[e] + 1) * gate[e] * sigmoid(1.702 * gate[e])
                                                   up clamped to +-swiglu_limit, gate above
    YaRN in place of the llama3 rope scaling; biases; norms that multiply in float32

Dimensions: B batch or slots, T query tokens, M = B * T, S cache positions, D model, N query heads,
K key/value heads, H head dimension, F MLP width, E experts, X experts of a token, V vocabulary.
Inside `shard_map` N, K, F, E and V are what one device holds (the router knows all E), and B is its
slots.

Devices form a mesh of three axes. Slots are split over `data`. Heads and vocabulary are split over
MODEL, the axes `expert` and `tensor` together; experts over `expert`, and each expert over
`tensor`. One step of a device sends, over MODEL:

    all-reduce [B, T, D]   once for the embedding and twice a layer, in the model's dtype
    all-reduce [B]         twice, of 4 bytes: the largest logit, and the lowest id that has it
    all-reduce [3, B]      35 times at most, of 4 bytes, to draw where a slot has a temperature

Layers are a tuple and a Python loop: `lax.scan` over stacked layers would copy the weights of each
layer, on CPU always and on TPU where a kernel reads them. `block` is jitted so that it is traced
once for each kind of layer.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from common.cache import LayerCache, append, attend, check_insert, copy_rows, empty_cache
from common.config import SILU, is_published_in, read_config, read_rope
from common.experts import group_by_expert, num_experts
from common.kernels.dispatch import KERNEL_FREE, Impl
from common.kernels.ragged_dot import ragged_dot
from common.names import Axes, Order, Same, Table
from common.quant import MXFP4_GROUP, Matrix, Mxfp4, embed_rows, linear, out_features
from common.ranges import Above1, AtLeast1, Count, Even, Positive
from common.sampling import Sampling, sample, sampling_params
from common.sharding import DATA, EXPERT, MODEL, TENSOR, UNSPLIT, P, Shards, round_up, split_heads
from common.weights import array, bias, matrix, norm, specs_like, stack

Array = jax.Array

SWIGLU_ALPHA = 1.702  # not in the published config.json


class Yarn(NamedTuple):
    """`rope_scaling` of type yarn."""

    factor: AtLeast1
    original_max_position_embeddings: Count
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None  # multiplies cos and sin
    truncate: bool = True


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
    rope_scaling: Yarn | None
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...]
    sliding_window: Count
    num_local_experts: Annotated[Count, "num_experts"]
    num_experts_per_tok: Count
    swiglu_limit: Positive
    mxfp4: bool  # quantization_config: the experts are published in 4 bits
    rms_norm_eps: Positive = 1e-5
    tie_word_embeddings: bool = False
    max_position_embeddings: Count = 131072


class Experts(NamedTuple):
    """All experts of a layer. Even rows of w_gate_up are the gate's, odd ones up's."""

    w_gate_up: Matrix  # [E, 2 * F, D]
    b_gate_up: Array  # [E, 2 * F], float32
    w_down: Matrix  # [E, D, F]
    b_down: Array  # [E, D], float32


class Moe(NamedTuple):
    router: Array  # [E, D]
    b_router: Array  # [E]
    experts: Experts


class Sliding(NamedTuple):
    """Marks a layer whose queries see the last `sliding_window` positions. It has no arrays: jit
    sees it in the structure of the weights, while it traces."""


class Layer(NamedTuple):
    """A Matrix is an array, or its form in int8, fp8 or 4 bits: `linear` takes any."""

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
    """x / rms(x) times the weight, all in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * weight_D).astype(x.dtype)


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
    """Radians per position of each pair (i, i + H / 2) of a head, [H / 2]."""
    exponent = np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim
    frequency = (1.0 / np.float32(config.rope_theta) ** exponent).astype(np.float32)
    if config.rope_scaling is None:
        return frequency
    return yarn_frequencies(frequency, config.rope_theta, config.rope_scaling)


def attention_factor(yarn: Yarn | None) -> float:
    """What YaRN multiplies cos and sin by."""
    if yarn is None:
        return 1.0
    return yarn.attention_factor or 0.1 * math.log(yarn.factor) + 1


def rotary(position_BT: Array, config: Config) -> tuple[Array, Array]:
    """cos and sin of each position's angles, float32 [B, T, 1, H / 2]."""
    angle = position_BT[..., None, None].astype(jnp.float32) * rope_frequencies(config)
    factor = attention_factor(config.rope_scaling)
    # Else XLA's CPU compiler computes them again in each layer, for each head.
    return lax.optimization_barrier((jnp.cos(angle) * factor, jnp.sin(angle) * factor))


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
    """Appends T tokens to the cache; each attends to all up to itself, or to the last of them in a
    sliding layer. Returns the sum over own heads [B, T, D], without the bias, and the cache.
    Scores and softmax are float32 in `attend`; a soft cap would be one more of its arguments."""
    B, T, _ = x_BTD.shape
    matrices = (layer.wq, layer.bq), (layer.wk, layer.bk), (layer.wv, layer.bv)
    projections = (linear(x_BTD, w) + b for w, b in matrices)
    q_BTNH, k_BTKH, v_BTKH = (x.reshape(B, T, -1, config.head_dim) for x in projections)
    cache = append(cache, rotate(k_BTKH, step), v_BTKH, step.end_B - T)
    o_BTNH = attend(
        rotate(q_BTNH, step),
        cache,
        step.end_B,
        scale=config.head_dim**-0.5,
        window=config.sliding_window if layer.sliding is not None else None,
        sinks_N=layer.sinks,
        implementation=implementation,
    )
    return linear(o_BTNH.reshape(B, T, -1), layer.wo), cache


def route(x_MD: Array, w: Moe, config: Config) -> tuple[Array, Array]:
    """The weights of each token's experts, and which of all E they are: both [M, X]."""
    logits_ME = linear(x_MD, w.router, jnp.float32) + w.b_router
    logits_MX, expert_MX = lax.top_k(logits_ME, config.num_experts_per_tok)
    return jax.nn.softmax(logits_MX).astype(x_MD.dtype), expert_MX


def swiglu(gate_up: Array, limit: float) -> Array:
    """[.., 2 * F] -> [.., F]."""
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(SWIGLU_ALPHA * gate)


def experts(x: Array, w: Experts, dot: Callable[..., Array], config: Config) -> Array:
    """Each row through the MLP of its expert; `dot` knows whose row it is."""
    h = swiglu(dot(x, w.w_gate_up, bias_EO=w.b_gate_up), config.swiglu_limit)
    b_down = jnp.where(lax.axis_index(TENSOR) == 0, w.b_down, 0)  # one of the devices adds it
    return dot(h, w.w_down, bias_EO=b_down)


def moe(x_BTD: Array, w: Moe, config: Config, implementation: Impl) -> Array:
    """Every device routes all tokens of its slots, and computes what its own experts add to them:
    partial sums over own experts and own part of F."""
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
    weight_MX, expert_MX = route(x_MD, w, config)
    groups = group_by_expert(expert_MX, num_experts(w.experts))
    dot = partial(ragged_dot, group_sizes_E=groups.sizes, implementation=implementation)
    rows = x_MD[groups.token]  # [M * X, D], those of an expert one after the other
    y_MXD = experts(rows, w.experts, dot, config)[groups.row]
    return (y_MXD * weight_MX[..., None]).sum(axis=1).reshape(x_BTD.shape)


@partial(jax.jit, static_argnames=("config", "implementation"))
def block(
    x_BTD: Array, layer: Layer, cache: LayerCache, step: Step, config: Config, implementation: Impl
) -> tuple[Array, LayerCache]:
    h_BTD = rms_norm(x_BTD, layer.attn_norm, config.rms_norm_eps)
    o_BTD, cache = attention(h_BTD, layer, cache, step, config, implementation)
    # Without the brackets XLA's CPU compiler adds again wherever x is read.
    x_BTD = x_BTD + (lax.psum(o_BTD, MODEL) + layer.bo)  # partial: own heads -> replicated
    h_BTD = rms_norm(x_BTD, layer.mlp_norm, config.rms_norm_eps)
    o_BTD = moe(h_BTD, layer.mlp, config, implementation)
    x_BTD = x_BTD + lax.psum(o_BTD, MODEL)  # partial: own experts, own part of F -> replicated
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


# What a config.json without rope settings means.
DEFAULT_ROPE = dict(
    rope_type="yarn", factor=32, original_max_position_embeddings=4096, truncate=False
)


def config_from_hf(hf: dict[str, Any]) -> Config:
    """Config of a parsed config.json; ValueError names a key or a value that is not known here."""
    mxfp4 = is_published_in("mxfp4", hf, inert=("modules_to_not_convert",))
    given = read_rope(hf, {"yarn": Yarn}, theta=150000.0, default=DEFAULT_ROPE)
    return read_config(
        Config,
        hf,
        model_types=("gpt_oss",),
        given=given | dict(mxfp4=mxfp4),
        # hidden_act is not what the experts compute, but it is what every file says.
        only=dict(hidden_act=SILU, attention_bias=True, swiglu_alpha=SWIGLU_ALPHA),
        repeats=dict(experts_per_token="num_experts_per_tok"),
        read=("quantization_config",),
        inert=("initial_context_length",),
    )


STATE_SPEC = DecodeState(
    cache=P(DATA, MODEL),  # every array of every layer: slots over data, heads over MODEL
    length_B=P(DATA),
    token_B=P(DATA),
    sampling=P(DATA),
)


def weight_layout(config: Config, shards: Shards = UNSPLIT) -> Weights:
    """Shape and partition of every weight: as published; or padded with zeros (in mxfp4, to whole
    groups; `sample` never draws a padded id), and key/value heads repeated where they are fewer
    than `shards`, so that every split dimension divides. Experts must divide as they are."""
    c, n, mxfp4 = config, shards.model, Mxfp4 if config.mxfp4 else None
    heads = split_heads(c.num_attention_heads, c.num_key_value_heads, n)
    N, q, kv = len(heads.query), len(heads.query) * c.head_dim, len(heads.kv) * c.head_dim
    D, E, V = c.hidden_size, c.num_local_experts, round_up(c.vocab_size, n)
    F = round_up(c.intermediate_size, shards.tensor * (MXFP4_GROUP if mxfp4 else 1))
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
        embed=matrix((V, D), out),
        layers=tuple(kinds[c.layer_types[i]] for i in range(c.num_hidden_layers)),
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
    """Stored name -> the weight that it becomes, and the order of its heads or axes. Same: must
    equal that weight, and is dropped. None: dropped. Any other name: ValueError."""
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
        "model.layers.*.self_attn.sinks": (
            "layers.*.sinks",
            Order(axis=0, size=1, blocks=heads.query),
        ),
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

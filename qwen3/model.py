"""Qwen3 in one file, dense and mixture of experts: llama3 with a norm on every query and key head,
and in sparse layers many small MLPs of which each token chooses a few.

Qwen3 Technical Report, arXiv 2505.09388. What differs from llama3:

    q, k = rope(norm(q)), rope(norm(k))            over the head dimension, one weight for all heads
    x += sum over a token's X experts e of p[e] * down[e](silu(gate[e](norm(x))) * up[e](norm(x)))
                                                   p = softmax(router(norm(x))), the X largest,
                                                   which norm_topk_prob scales to a sum of 1
    YaRN in place of the llama3 rope scaling; matrices that are published in fp8 stay in fp8

Dimensions: B batch or slots, T query tokens, M = B * T, S cache positions, D model, N query heads,
K key/value heads, H head dimension, F MLP width, E experts, X experts of a token, V vocabulary.
Inside `shard_map` N, K, F, E and V are what one device holds (the router knows all E), and B is its
slots.

Devices form a mesh of three axes. Slots are split over `data`. Heads, dense MLPs and vocabulary are
split over MODEL, the axes `expert` and `tensor` together; experts over `expert`, and each
expert over `tensor`. One step of a device sends, over MODEL:

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
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from common.cache import LayerCache, append, attend, check_insert, copy_rows, empty_cache
from common.config import SILU, all_heads, is_fp8, read_config, read_rope, show
from common.experts import group_by_expert, num_experts
from common.kernels.dispatch import KERNEL_FREE, Impl
from common.kernels.ragged_dot import ragged_dot
from common.names import Order, Same, Table, fp8_table
from common.quant import FP8_BLOCK, Fp8, Matrix, embed_rows, linear, out_features
from common.ranges import Above1, AtLeast1, Count, Even, Index, Positive
from common.sampling import Sampling, sample, sampling_params
from common.sharding import DATA, EXPERT, MODEL, TENSOR, UNSPLIT, P, Shards, round_up, split_heads
from common.weights import array, matrix, norm, specs_like, stack

Array = jax.Array


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
    num_experts: Annotated[Count, "num_local_experts"]  # 0 in a dense model
    num_experts_per_tok: Count
    moe_intermediate_size: Count
    decoder_sparse_step: Count
    norm_topk_prob: bool
    fp8: bool  # quantization_config: the projections are published in 8-bit floats
    mlp_only_layers: tuple[Index, ...] = ()
    rms_norm_eps: Positive = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: Count = 32768


class Mlp(NamedTuple):
    """One MLP; or all experts of a layer, with one more axis, E, in front."""

    w_gate: Matrix  # [F, D]
    w_up: Matrix  # [F, D]
    w_down: Matrix  # [D, F]


class Moe(NamedTuple):
    router: Array  # [E, D]
    experts: Mlp


class Layer(NamedTuple):
    """A Matrix is an array, or its form in int8, fp8 or 4 bits: `linear` takes any."""

    attn_norm: Array  # [D]
    wq: Matrix  # [N * H, D]
    wk: Matrix  # [K * H, D]
    wv: Matrix  # [K * H, D]
    q_norm: Array  # [H]
    k_norm: Array  # [H]
    wo: Matrix  # [D, N * H]
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
    """Appends T tokens to the cache, and each attends to all up to itself. Returns the sum over own
    heads [B, T, D], and the cache. Scores and softmax are float32 in `attend`, which has arguments
    for windows, chunks and sinks too; a soft cap would be one more."""
    B, T, _ = x_BTD.shape
    projections = (linear(x_BTD, w) for w in (layer.wq, layer.wk, layer.wv))
    q_BTNH, k_BTKH, v_BTKH = (x.reshape(B, T, -1, config.head_dim) for x in projections)
    q_BTNH = rms_norm(q_BTNH, layer.q_norm, config.rms_norm_eps)
    k_BTKH = rms_norm(k_BTKH, layer.k_norm, config.rms_norm_eps)
    cache = append(cache, rotate(k_BTKH, step), v_BTKH, step.end_B - T)
    q_BTNH, scale = rotate(q_BTNH, step), config.head_dim**-0.5
    o_BTNH = attend(q_BTNH, cache, step.end_B, scale=scale, implementation=implementation)
    return linear(o_BTNH.reshape(B, T, -1), layer.wo), cache


def mlp(x_BTD: Array, w: Mlp) -> Array:
    """Partial sums over own part of F."""
    h_BTF = jax.nn.silu(linear(x_BTD, w.w_gate)) * linear(x_BTD, w.w_up)
    return linear(h_BTF, w.w_down)


def route(x_MD: Array, w: Moe, config: Config) -> tuple[Array, Array]:
    """The weights of each token's experts, and which of all E they are: both [M, X]."""
    p_ME = jax.nn.softmax(linear(x_MD, w.router).astype(jnp.float32))
    weight_MX, expert_MX = lax.top_k(p_ME, config.num_experts_per_tok)
    if config.norm_topk_prob:
        weight_MX = weight_MX / weight_MX.sum(axis=-1, keepdims=True)
    return weight_MX.astype(x_MD.dtype), expert_MX


def experts(x: Array, w: Mlp, dot: Callable[..., Array], config: Config) -> Array:
    """Each row through the MLP of its expert; `dot` knows whose row it is."""
    return dot(jax.nn.silu(dot(x, w.w_gate)) * dot(x, w.w_up), w.w_down)


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
    x_BTD = x_BTD + lax.psum(o_BTD, MODEL)  # partial: own heads -> replicated
    h_BTD = rms_norm(x_BTD, layer.mlp_norm, config.rms_norm_eps)
    if isinstance(layer.mlp, Moe):
        o_BTD = moe(h_BTD, layer.mlp, config, implementation)
    else:
        o_BTD = mlp(h_BTD, layer.mlp)
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


DENSE: dict[str, Any] = dict(  # fields that a dense model's config.json lacks
    num_experts=0,
    num_experts_per_tok=0,
    moe_intermediate_size=0,
    decoder_sparse_step=1,
    norm_topk_prob=False,
    mlp_only_layers=(),
)
# Published in fp8: all of these, or none.
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def config_from_hf(hf: dict[str, Any]) -> Config:
    """Config of a parsed config.json; ValueError names a key or a value that is not known here."""
    dense = hf.get("model_type") == "qwen3"
    given = read_rope(hf, {"yarn": Yarn}, theta=10000.0) | dict(fp8=is_fp8(hf, PROJECTIONS))
    only = dict(hidden_act=SILU, attention_bias=False, qkv_bias=False, use_qk_norm=True)
    only["use_sliding_window"] = (False, True) if has_no_window(hf) and dense else False
    return read_config(
        Config,
        hf,
        model_types=("qwen3", "qwen3_moe"),
        given=given | DENSE if dense else given,
        null=dict(num_key_value_heads=all_heads) if dense else dict(mlp_only_layers=lambda c: ()),
        only=only | dict(shared_expert_intermediate_size=0),
        read=("quantization_config", "layer_types", "max_window_layers"),
        inert=("sliding_window",),
    )


def has_no_window(hf: dict[str, Any]) -> bool:
    """Whether no layer has a window whatever the switch says; ValueError if layer_types has one."""
    first, layers = hf.get("max_window_layers"), hf.get("num_hidden_layers")
    if (kinds := hf.get("layer_types")) is not None:
        if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
            text = f"config.json: layer_types={show(kinds)} has other than 'full_attention'"
            raise ValueError(text)
        if len(kinds) != layers:
            text = f"config.json: {len(kinds)} layer_types, but num_hidden_layers={show(layers)}"
            raise ValueError(text)
        return True
    return type(first) is type(layers) is int and first >= layers


STATE_SPEC = DecodeState(
    cache=P(DATA, MODEL),  # every array of every layer: slots over data, heads over MODEL
    length_B=P(DATA),
    token_B=P(DATA),
    sampling=P(DATA),
)


def weight_layout(config: Config, shards: Shards = UNSPLIT) -> Weights:
    """Shape and partition of every weight: as published; or padded with zeros (in fp8, to whole
    blocks; `sample` never draws a padded id), and key/value heads repeated where they are fewer
    than `shards`, so that every split dimension divides. Experts must divide as they are."""
    c, n, fp8 = config, shards.model, Fp8 if config.fp8 else None
    heads = split_heads(c.num_attention_heads, c.num_key_value_heads, n)
    q, kv = len(heads.query) * c.head_dim, len(heads.kv) * c.head_dim
    D, E, V = c.hidden_size, c.num_experts, round_up(c.vocab_size, n)
    out, into = P(MODEL, None), P(None, MODEL)  # split by output, or by input

    def width(F: int, parts: int) -> int:
        return round_up(F, parts * FP8_BLOCK if fp8 and parts > 1 else parts)

    F, F_moe = width(c.intermediate_size, n), width(c.moe_intermediate_size, shards.tensor)
    dense = Mlp(
        w_gate=matrix((F, D), out, fp8),
        w_up=matrix((F, D), out, fp8),
        w_down=matrix((D, F), into, fp8),
    )
    of_experts = Mlp(
        w_gate=stack((E, F_moe, D), P(EXPERT, TENSOR, None), fp8),
        w_up=stack((E, F_moe, D), P(EXPERT, TENSOR, None), fp8),
        w_down=stack((E, D, F_moe), P(EXPERT, None, TENSOR), fp8),
    )
    layer = Layer(
        attn_norm=norm(D),
        wq=matrix((q, D), out, fp8),
        wk=matrix((kv, D), out, fp8),
        wv=matrix((kv, D), out, fp8),
        q_norm=norm(c.head_dim),
        k_norm=norm(c.head_dim),
        wo=matrix((D, q), into, fp8),
        mlp_norm=norm(D),
        mlp=dense,
    )
    sparse = layer._replace(mlp=Moe(router=array((E, D)), experts=of_experts))
    return Weights(
        embed=matrix((V, D), out),
        layers=tuple(sparse if is_sparse(i, c) else layer for i in range(c.num_hidden_layers)),
        norm=norm(D),
        head=None if c.tie_word_embeddings else matrix((V, D), out),
    )


def is_sparse(layer: int, config: Config) -> bool:
    chosen = (layer + 1) % config.decoder_sparse_step == 0 and layer not in config.mlp_only_layers
    return config.num_experts > 0 and chosen


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
    table: Table = {
        "model.embed_tokens.weight": "embed",
        "model.layers.*.input_layernorm.weight": "layers.*.attn_norm",
        "model.layers.*.self_attn.q_proj.weight": ("layers.*.wq", query(axis=0)),
        "model.layers.*.self_attn.k_proj.weight": ("layers.*.wk", kv(axis=0)),
        "model.layers.*.self_attn.v_proj.weight": ("layers.*.wv", kv(axis=0)),
        "model.layers.*.self_attn.q_norm.weight": "layers.*.q_norm",
        "model.layers.*.self_attn.k_norm.weight": "layers.*.k_norm",
        "model.layers.*.self_attn.o_proj.weight": ("layers.*.wo", query(axis=1)),
        "model.layers.*.post_attention_layernorm.weight": "layers.*.mlp_norm",
        "model.layers.*.mlp.gate_proj.weight": "layers.*.mlp.w_gate",
        "model.layers.*.mlp.up_proj.weight": "layers.*.mlp.w_up",
        "model.layers.*.mlp.down_proj.weight": "layers.*.mlp.w_down",
        "model.layers.*.mlp.gate.weight": "layers.*.mlp.router",
        "model.layers.*.mlp.experts.*.gate_proj.weight": "layers.*.mlp.experts.w_gate",
        "model.layers.*.mlp.experts.*.up_proj.weight": "layers.*.mlp.experts.w_up",
        "model.layers.*.mlp.experts.*.down_proj.weight": "layers.*.mlp.experts.w_down",
        "model.norm.weight": "norm",
        "lm_head.weight": Same("embed") if config.tie_word_embeddings else "head",
    }
    return fp8_table(table, PROJECTIONS, shards) if config.fp8 else table

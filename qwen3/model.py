"""Qwen3 in one file, dense and mixture of experts: llama3 with norms on queries and keys. Sparse
layers have many small MLPs, the experts. Each token uses a few of them.

Qwen3 Technical Report, arXiv 2505.09388. What differs from llama3:

    q, k = rope(norm(q)), rope(norm(k))            heads are normed, q and k each with one weight
    x += sum_e p[e] * down[e](silu(gate[e](h)) * up[e](h))
                                                   h = norm(x); p = softmax(router(h)); e are the X
                                                   experts with the largest p; if norm_topk_prob,
                                                   these X numbers p are scaled to add up to 1
    YaRN replaces the rope scaling of llama3; matrices that are published in fp8 stay in fp8

Qwen2 and Qwen2.5 are read too: there q, k and v have biases, and no head is normed.

Dimensions: B slots, T query tokens (1 when decoding), M = B * T, S cache positions, D model, N
query heads, K key/value heads with G = N / K queries each, H head dimension, F MLP width, E
experts, X experts of a token, V vocabulary, L layers.

Slots are split over the mesh axis `data`. Heads, dense MLPs and vocabulary are split over MODEL,
which is the axes `expert` and `tensor` taken as one. Experts are split over `expert`, and the F of
each over `tensor`. Shapes in classes are of whole, padded arrays. In code inside `shard_map`, and
in the next paragraph, B, N, K, F, E and V count one device's part (a router has all E).

A greedy step has 2 L + 3 collectives over MODEL: [B, T, D] is all-reduced after the embedding, each
attention and each MLP (2 B T D bytes in bfloat16), and [B] twice in `sample` (4 bytes a slot). If
any temperature is above 0, `sample` has up to 36 more, of at most 12 bytes a slot each.
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

from common.cache import LayerCache, append, attend, capacity_of, copy_slots, empty_cache
from common.config import SILU, all_heads, head_dim, is_fp8, read_config, read_rope, show
from common.experts import dot_one, group_by_expert, num_experts, sum_over_experts
from common.fields import Even, Index, at_most, divides
from common.kernels.dispatch import AUTO, KERNEL_FREE, Impl
from common.kernels.ragged_dot import ragged_dot
from common.kernels.reference import Slot
from common.names import Order, Same, Table, fp8_table
from common.packing import Packing, read_packing
from common.products import embed_rows, linear
from common.quant import FP8_BLOCK, Fp8, Matrix, out_features
from common.sampling import Sampling, sample, sampling_params
from common.sharding import DATA, EXPERT, MODEL, TENSOR, UNSPLIT, P, Shards, round_up, split_heads
from common.weights import array, bias, matrix, norm, specs_like, stack, vocab_rows


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
    num_experts: Annotated[int, "num_local_experts"]  # 0 in a dense model
    num_experts_per_tok: Annotated[int, at_most("num_experts")]
    moe_intermediate_size: int
    decoder_sparse_step: int
    norm_topk_prob: bool
    qwen2: bool  # model_type: biases on q, k and v, and no norms of q and k
    fp8: bool  # quantization_config: the projections are published in 8-bit floats
    mlp_only_layers: tuple[Index, ...] = ()
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768
    packing: Packing | None = None  # quantization_config: how the files' matrices are packed


class Mlp(NamedTuple):
    """One MLP; or all experts of a layer, with one more axis, E, in front."""

    w_gate: Matrix  # [F, D]
    w_up: Matrix  # [F, D]
    w_down: Matrix  # [D, F]


class Moe(NamedTuple):
    router: Array  # [E, D]
    experts: Mlp


class Layer(NamedTuple):
    """The loader decides how a Matrix is stored (bfloat16, int8, ...); products take any form."""

    attn_norm: Array  # [D]
    wq: Matrix  # [N * H, D]
    wk: Matrix  # [K * H, D]
    wv: Matrix  # [K * H, D]
    bq: Array | None  # [N * H]; None in Qwen3
    bk: Array | None  # [K * H]
    bv: Array | None
    q_norm: Array | None  # [H]; None in Qwen2
    k_norm: Array | None
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
    output [B, T, D], summed over the device's heads, and the cache.
    `attend` also takes a `window` (see gpt_oss) or a `chunk` (see llama4)."""
    (B, T, _), H = x_BTD.shape, config.head_dim
    matrices = (layer.wq, layer.bq), (layer.wk, layer.bk), (layer.wv, layer.bv)
    projections = (linear(x_BTD, w) + (0 if b is None else b) for w, b in matrices)
    q_BTNH, k_BTKH, v_BTKH = (x.reshape(B, T, -1, H) for x in projections)
    if layer.q_norm is not None and layer.k_norm is not None:
        q_BTNH = rms_norm(q_BTNH, layer.q_norm, config.rms_norm_eps)
        k_BTKH = rms_norm(k_BTKH, layer.k_norm, config.rms_norm_eps)
    q_BTNH, k_BTKH = rotate(q_BTNH, step), rotate(k_BTKH, step)
    cache = append(cache, k_BTKH, v_BTKH, step.end_B - T)
    o_BTNH = attend(q_BTNH, cache, step.end_B, step.implementation, attend_slot, scale=H**-0.5)
    return linear(o_BTNH.reshape(B, T, -1), layer.wo), cache


def mlp(x_BTD: Array, w: Mlp) -> Array:
    """Partial sums over own F."""
    h_BTF = jax.nn.silu(linear(x_BTD, w.w_gate)) * linear(x_BTD, w.w_up)
    return linear(h_BTF, w.w_down)


def route(x_MD: Array, w: Moe, config: Config) -> tuple[Array, Array]:
    """The X experts of each token: their weights and their indices in the router, both [M, X]."""
    p_ME = jax.nn.softmax(linear(x_MD, w.router).astype(jnp.float32))
    weight_MX, expert_MX = lax.top_k(p_ME, config.num_experts_per_tok)
    if config.norm_topk_prob:
        weight_MX = weight_MX / weight_MX.sum(axis=-1, keepdims=True)
    return weight_MX.astype(x_MD.dtype), expert_MX


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
    """The weighted sum of each token's experts: a partial sum, over the device's own experts and F.
    The M * X rows are sorted by expert; rows of other devices' experts come out as zeros."""
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
    weight_MX, expert_MX = route(x_MD, w, config)
    if step.implementation == Impl.REFERENCE:
        y_MD = mixture(x_MD, weight_MX, expert_MX, w.experts)
    else:
        groups = group_by_expert(expert_MX, num_experts(w.experts))
        dot = partial(ragged_dot, group_sizes_E=groups.sizes, implementation=step.implementation)
        y_MXD = experts(x_MD[groups.token], w.experts, dot)[groups.row]
        y_MD = (y_MXD * weight_MX[..., None]).sum(axis=1)
    return y_MD.reshape(x_BTD.shape)


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


# The fields that the config.json of a dense model lacks.
DENSE: dict[str, Any] = dict(num_experts=0, num_experts_per_tok=0, moe_intermediate_size=0)
DENSE |= dict(decoder_sparse_step=1, norm_topk_prob=False, mlp_only_layers=())
# Either all of these are published in fp8, or none.
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def config_from_hf(hf: dict[str, Any]) -> Config:
    """Config of a config.json. A field unknown here and in common/config.py is a ValueError."""
    kind = hf.get("model_type")
    dense, qwen2 = kind in ("qwen2", "qwen3"), kind == "qwen2"
    # R1-0528-Qwen3-8B has an attn_factor, which transformers does not read.
    fields = read_rope(Config, hf, {"yarn": Yarn}, theta=10000.0, ignored=("attn_factor",))
    packing = read_packing(hf, others=("fp8",))
    fields |= dict(packing=packing, fp8=packing is None and is_fp8(hf, PROJECTIONS))
    fields |= dict(qwen2=qwen2) | (DENSE if dense else {})
    heads, layers = dict(num_key_value_heads=all_heads), dict(mlp_only_layers=lambda c: ())
    # Refused: other activations, a shared expert, windows, mrope; in Qwen3 biases or missing norms.
    # (use_sliding_window may be true in a dense model in which no layer has a window.)
    accepted: dict[str, Any] = dict(hidden_act=SILU, use_mrope=False)
    if not qwen2:
        accepted |= dict(attention_bias=False, qkv_bias=False, use_qk_norm=True)
    windows = (False, True) if has_no_window(hf) and dense else False
    return read_config(
        Config,
        hf,
        model_types=("qwen2", "qwen3", "qwen3_moe"),
        fields_read=fields,
        if_missing=dict(head_dim=head_dim) if qwen2 else {},
        if_null=heads if dense else layers,
        accepted=accepted | dict(shared_expert_intermediate_size=0, use_sliding_window=windows),
        ignored=("layer_types", "max_window_layers", "sliding_window"),
    )


def has_no_window(hf: dict[str, Any]) -> bool:
    """Whether no layer has a window, so that use_sliding_window=true changes nothing. ValueError if
    layer_types is given, and is anything but 'full_attention' for each layer."""
    first, layers = hf.get("max_window_layers"), hf.get("num_hidden_layers")
    if (kinds := hf.get("layer_types")) is None:
        return type(first) is type(layers) is int and first >= layers
    full = ["full_attention"] * len(kinds) if isinstance(kinds, list) else None
    if full is None or kinds != full or len(full) != layers:
        what = f"'full_attention' for each of num_hidden_layers={show(layers)}"
        raise ValueError(f"config.json: layer_types={show(kinds)} is not implemented, only {what}")
    return True


# Slots are split over `data`, and the cache of each layer also over MODEL, by heads.
STATE_SPEC = DecodeState(cache=P(DATA, MODEL), length_B=P(DATA), token_B=P(DATA), sampling=P(DATA))


def weight_layout(config: Config, shards: Shards = UNSPLIT) -> Weights:
    """Shape and partition of every weight. Zeros pad a split dimension until its parts are equal.
    In fp8 each part of F has whole blocks. Two key/value heads on 4 devices become 0, 0, 1, 1; the
    copies of a head divide its query heads between them. `expert` must divide E."""
    c, n, fp8 = config, shards.model, Fp8 if config.fp8 else None
    heads = split_heads(c.num_attention_heads, c.num_key_value_heads, n)
    q, kv = len(heads.query) * c.head_dim, len(heads.kv) * c.head_dim
    D, E, V = c.hidden_size, c.num_experts, round_up(c.vocab_size, n)
    out, into = P(MODEL, None), P(None, MODEL)  # split by output, or by input
    F, F_moe = (
        round_up(F, parts * FP8_BLOCK if fp8 and parts > 1 else parts)
        for F, parts in ((c.intermediate_size, n), (c.moe_intermediate_size, shards.tensor))
    )
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
        bq=bias((q,), P(MODEL)) if c.qwen2 else None,
        bk=bias((kv,), P(MODEL)) if c.qwen2 else None,
        bv=bias((kv,), P(MODEL)) if c.qwen2 else None,
        q_norm=None if c.qwen2 else norm(c.head_dim),
        k_norm=None if c.qwen2 else norm(c.head_dim),
        wo=matrix((D, q), into, fp8),
        mlp_norm=norm(D),
        mlp=dense,
    )
    sparse = layer._replace(mlp=Moe(router=array((E, D)), experts=of_experts))
    return Weights(
        embed=vocab_rows((V, D), out),
        layers=tuple(sparse if is_sparse(i, c) else layer for i in range(c.num_hidden_layers)),
        norm=norm(D),
        head=None if c.tie_word_embeddings else vocab_rows((V, D), out),
    )


def is_sparse(layer: int, config: Config) -> bool:
    chosen = (layer + 1) % config.decoder_sparse_step == 0 and layer not in config.mlp_only_layers
    return config.num_experts > 0 and chosen


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
    table: Table = {
        "model.embed_tokens.weight": "embed",
        "model.layers.*.input_layernorm.weight": "layers.*.attn_norm",
        "model.layers.*.self_attn.q_proj.weight": ("layers.*.wq", query(axis=0)),
        "model.layers.*.self_attn.k_proj.weight": ("layers.*.wk", kv(axis=0)),
        "model.layers.*.self_attn.v_proj.weight": ("layers.*.wv", kv(axis=0)),
        "model.layers.*.self_attn.q_proj.bias": ("layers.*.bq", query(axis=0)),
        "model.layers.*.self_attn.k_proj.bias": ("layers.*.bk", kv(axis=0)),
        "model.layers.*.self_attn.v_proj.bias": ("layers.*.bv", kv(axis=0)),
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
        "model.layers.*.self_attn.rotary_emb.inv_freq": None,
    }
    # In fp8 each projection is stored as two tensors: values, and the scales of their blocks.
    return fp8_table(table, PROJECTIONS, shards) if config.fp8 else table

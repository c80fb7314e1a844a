"""Qwen3.5 in one file, dense and mixture of experts, without vision. Three of four layers keep a
state of fixed size, not keys and values. They read and write it by the gated delta rule.

Gated Delta Networks, arXiv 2412.06464. What differs from qwen3:

    S = decay * S                                  the state of a head, [key, value], forgets
    S += strength * outer(k, v - S.T @ k)          and learns to give v for k
    o = S.T @ q                                    instead of attention, in `linear` layers
    q, k, v = silu(convolve(qkv))                  there each channel first mixes 4 tokens
    o = attention(...) * sigmoid(gate)             in the other layers; a quarter of a head rotates
    rms_norm(x) * (1 + w)                          every norm but that of the linear heads
    y += sigmoid(shared_gate(h)) * shared(h)       an expert that all tokens use

Dimensions: B slots, T query tokens (1 when decoding), M = B * T, S cache positions, D model, N
query heads, K key/value heads with G = N / K queries each, H head dimension, F MLP width, E
experts, X experts of a token, V vocabulary, L layers. Linear layers have N value heads, K heads of
queries and keys, V numbers in a value, C = 2 K H + N V channels, and states [H, V].

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
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from common.cache import (
    LayerCache,
    append,
    attend,
    capacity_of,
    copy_slots,
    empty_cache,
    real_tokens,
)
from common.config import SILU, is_fp8, read_config, read_rope, text_config
from common.experts import dot_one, group_by_expert, num_experts, sum_over_experts
from common.fields import at_most, divides, one_each
from common.kernels.delta_rule import Tokens, delta_rule
from common.kernels.dispatch import AUTO, KERNEL_FREE, Impl
from common.kernels.ragged_dot import ragged_dot
from common.kernels.reference import Slot
from common.names import Order, Same, Table, fp8_table
from common.packing import Packing, read_packing
from common.products import embed_rows, linear
from common.quant import FP8_BLOCK, Fp8, Matrix, out_features
from common.recurrent import PENDING, Recurrent, empty_recurrent, from_each, past
from common.sampling import Sampling, sample, sampling_params
from common.sharding import DATA, EXPERT, MODEL, TENSOR, UNSPLIT, P, Shards, round_up, split_heads
from common.weights import array, bias, matrix, norm, specs_like, stack, vocab_rows

FULL = "full_attention"


class Config(NamedTuple):
    """The fields of config.json that shape the computation, under their published names."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: Annotated[int, divides("num_attention_heads")]
    head_dim: int
    rope_theta: float
    partial_rotary_factor: float
    linear_conv_kernel_dim: int
    linear_num_value_heads: int
    linear_num_key_heads: Annotated[int, divides("linear_num_value_heads")]
    linear_key_head_dim: int
    linear_value_head_dim: int
    layer_types: Annotated[
        tuple[Literal["linear_attention", "full_attention"], ...], one_each("num_hidden_layers")
    ]
    intermediate_size: int  # 0 in a mixture
    num_experts: Annotated[int, "num_local_experts"]  # 0 in a dense model
    num_experts_per_tok: Annotated[int, at_most("num_experts")]
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    fp8: bool  # quantization_config: the projections are published in 8-bit floats
    packing: Packing | None  # quantization_config: how the files' matrices are packed
    multimodal: bool  # the files also hold a vision tower
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 32768


class Mlp(NamedTuple):
    """One MLP; or all experts of a layer, with one more axis, E, in front."""

    w_gate: Matrix  # [F, D]
    w_up: Matrix  # [F, D]
    w_down: Matrix  # [D, F]


class Moe(NamedTuple):
    router: Array  # [E, D]
    experts: Mlp
    shared: Mlp
    shared_gate: Array  # [1, D]


class Attention(NamedTuple):
    wq: Matrix  # [N * 2 * H, D]: of each head the query, then the gate
    wk: Matrix  # [K * H, D]
    wv: Matrix  # [K * H, D]
    q_norm: Array  # [H]
    k_norm: Array  # [H]
    wo: Matrix  # [D, N * H]


class Linear(NamedTuple):
    """A gated DeltaNet. A device's C rows are its queries, then its keys, then its values."""

    w_qkv: Matrix  # [C, D]
    conv: Array  # [C, 1, 4]
    w_gate: Matrix  # [N * V, D]
    w_decay: Array  # [N, D]
    w_strength: Array  # [N, D]
    a_log: Array  # [N]
    dt_bias: Array  # [N]
    norm: Array  # [V]
    w_out: Matrix  # [D, N * V]


class Layer(NamedTuple):
    """The loader decides how a Matrix is stored (bfloat16, int8, ...); products take any form."""

    attn_norm: Array  # [D]
    mixer: Attention | Linear
    mlp_norm: Array  # [D]
    mlp: Mlp | Moe


class Weights(NamedTuple):
    embed: Matrix  # [V, D]
    layers: tuple[Layer, ...]
    norm: Array  # [D]
    head: Matrix | None  # [V, D]; None if the embedding is the head too


class DecodeState(NamedTuple):
    """B slots, decoded together. A slot of length 0 is empty. When a request ends, `serve` sets its
    slot's length to 0 and clears nothing: attention hides what is past the length, even NaN, and a
    recurrent layer starts from zeros where its slot begins at 0."""

    # For each layer of attention two arrays of [B, K, S, H]: rotated keys, and values. If H is not
    # a multiple of 128, they share one array, [B, K, S, 2 * H]. For each linear layer a Recurrent.
    cache: tuple[LayerCache | Recurrent, ...]
    length_B: Array  # int32: tokens in the cache
    token_B: Array  # int32: the newest token, which is not in the cache yet
    sampling: Sampling  # arrays of [B]: settings and a seed; a draw is made from seed and length


class Step(NamedTuple):
    """What all layers of one step share, on one device."""

    end_B: Array  # int32: the old length + T, padding included; 0 in a skipped slot
    real_BT: Array  # bool: false for padding
    cos: Array  # float32 [B, T, 1, R / 2], for the R numbers of a head that rotate
    sin: Array
    implementation: Impl  # of the kernels; static in jit


# ---- the mathematics: from here to `forward`, what each device computes inside `shard_map`


def rms_norm(x: Array, weight_D: Array, eps: float) -> Array:
    """x / rms(x) * (1 + weight) in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * (1 + weight_D.astype(jnp.float32))).astype(x.dtype)


def gated_norm(x: Array, weight_V: Array, gate: Array, eps: float) -> Array:
    """x / rms(x) in float32, times the weight in the gate's dtype, times silu(gate) in float32."""
    x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    x = (weight_V * x.astype(gate.dtype)).astype(jnp.float32)
    return (x * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)


def l2_norm(x: Array) -> Array:
    return x * lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def rope_frequencies(config: Config) -> np.ndarray:
    """One frequency for each pair of the R numbers of a head that rotate, float32 [R / 2]."""
    R = int(config.head_dim * config.partial_rotary_factor)
    exponent = np.arange(0, R, 2, dtype=np.float32) / R
    frequency: np.ndarray = np.power(config.rope_theta, exponent, dtype=np.float64)
    return 1 / frequency.astype(np.float32)


def rotary(position_BT: Array, config: Config) -> tuple[Array, Array]:
    """cos and sin of the angles of each position, float32 [B, T, 1, R / 2]."""
    angle = position_BT[..., None, None].astype(jnp.float32) * rope_frequencies(config)
    # Without the barrier, XLA on CPU recomputes cos and sin in every layer, for every head.
    return lax.optimization_barrier((jnp.cos(angle), jnp.sin(angle)))


def rotate(x_BTNH: Array, step: Step) -> Array:
    """Rotates each pair of elements i and i + R / 2 of a head by the angle of its position. What is
    behind the first R numbers stays."""
    cos, sin = step.cos.astype(x_BTNH.dtype), step.sin.astype(x_BTNH.dtype)
    a, b, rest = jnp.split(x_BTNH, (cos.shape[-1], 2 * cos.shape[-1]), axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def embed(table_VD: Matrix, tokens_BT: Array, dtype: DTypeLike) -> Array:
    """Each device looks up the ids that it holds. Other ids, and -1, give zeros."""
    first = lax.axis_index(MODEL) * out_features(table_VD)
    local_BT = jnp.where(tokens_BT < 0, -1, tokens_BT - first)
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
    x_BTD: Array, w: Attention, cache: LayerCache, step: Step, config: Config
) -> tuple[Array, LayerCache]:
    """Appends T tokens to the cache. Each attends to all positions up to its own. Returns the
    output [B, T, D], summed over the device's heads, and the cache."""
    (B, T, _), H = x_BTD.shape, config.head_dim
    q_BTNH, gate_BTNH = jnp.split(linear(x_BTD, w.wq).reshape(B, T, -1, 2 * H), 2, axis=-1)
    k_BTKH, v_BTKH = (linear(x_BTD, m).reshape(B, T, -1, H) for m in (w.wk, w.wv))
    q_BTNH = rotate(rms_norm(q_BTNH, w.q_norm, config.rms_norm_eps), step)
    k_BTKH = rotate(rms_norm(k_BTKH, w.k_norm, config.rms_norm_eps), step)
    cache = append(cache, k_BTKH, v_BTKH, step.end_B - T)
    o_BTNH = attend(q_BTNH, cache, step.end_B, step.implementation, attend_slot, scale=H**-0.5)
    o_BTNH = o_BTNH * jax.nn.sigmoid(gate_BTNH)
    return linear(o_BTNH.reshape(B, T, -1), w.wo), cache


def delta_step(S_KGHV: Array, x: Tokens) -> tuple[Array, Array]:
    """The definition of the gated delta rule, in float32: one token of one slot changes the state
    and reads it. The kernel computes the same, and implementation="reference" runs this."""
    S_KGHV = S_KGHV * jnp.exp(x.decay)[..., None, None]
    u_KGV = x.strength[..., None] * (x.v - jnp.einsum("kghv,kh->kgv", S_KGHV, x.k))
    S_KGHV = S_KGHV + jnp.einsum("kh,kgv->kghv", x.k, u_KGV)
    return S_KGHV, jnp.einsum("kghv,kh->kgv", S_KGHV, x.q)


def linear_attention(
    x_BTD: Array, w: Linear, cache: Recurrent, step: Step, config: Config
) -> tuple[Array, Recurrent]:
    """Appends T tokens. Returns what they read, [B, T, D], summed over the device's heads, and the
    cache. If T is at most PENDING (8), the tokens may be drafts, which are taken back if they were
    wrong. So the state does not take them yet: the next step applies those that were right
    (common/recurrent.py). A slot that begins at 0 forgets its state: `past` gives it a log decay of
    -inf. Padding changes no state: its strength and log decay are 0."""
    (B, T, _), H, V = x_BTD.shape, config.linear_key_head_dim, config.linear_value_head_dim
    W, start_B, N = config.linear_conv_kernel_dim, step.end_B - T, cache.state.shape[1]
    K = (cache.inputs.shape[1] - N * V) // (2 * H)
    before = past(cache, start_B)

    def tokens(inputs_BCT: Array, decay_BTN: Array, strength_BTN: Array) -> Tokens:
        """q, k, v and gates of n tokens. A convolution takes W - 1 inputs before them, too."""
        n = inputs_BCT.shape[-1] - W + 1
        tap = lambda i: w.conv[:, :, i].astype(jnp.float32) * inputs_BCT[..., i : i + n]
        mixed = sum(map(tap, range(W)))
        q, k, v = jnp.split(jax.nn.silu(mixed).swapaxes(1, 2), (K * H, 2 * K * H), axis=-1)
        q, k = (l2_norm(a.reshape(B, n, K, H)) for a in (q, k))
        shape = (B, n, K, N // K)
        gates = decay_BTN.reshape(shape), strength_BTN.reshape(shape)
        return Tokens(q * H**-0.5, k, v.reshape(*shape, V), *gates)

    new_BCT = linear(x_BTD, w.w_qkv).astype(jnp.float32).swapaxes(1, 2)
    new_BCT = jnp.concatenate([from_each(before.inputs, before.count_B, W - 1), new_BCT], axis=-1)
    a_BTN, b_BTN = (linear(x_BTD, m).astype(jnp.float32) for m in (w.w_decay, w.w_strength))
    rate_BTN = jnp.exp(w.a_log.astype(jnp.float32)) * jax.nn.softplus(a_BTN + w.dt_bias)
    real_BT1 = step.real_BT[..., None]
    decay_BTN = jnp.where(real_BT1, -rate_BTN, 0)
    strength_BTN = jnp.where(real_BT1, jax.nn.sigmoid(b_BTN), 0)
    old = tokens(before.inputs, before.decay.swapaxes(1, 2), before.strength.swapaxes(1, 2))
    new = tokens(new_BCT, decay_BTN, strength_BTN)
    rule = partial(delta_rule, implementation=step.implementation, definition=delta_step)
    S = cache.state.reshape(B, K, N // K, H, V)
    if T <= PENDING:
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), old, new)
        S, o = rule(S, both, PENDING)
        o, length_B = o[:, PENDING:], start_B
        room = [(0, 0), (0, 0), (0, PENDING - T)]
        inputs = jnp.pad(new_BCT, room)
        gates_BN2T = jnp.stack([decay_BTN, strength_BTN], axis=2).swapaxes(1, 3)
        gates = jnp.pad(gates_BN2T, [(0, 0), *room])
    else:
        S, _ = rule(S, old, PENDING)
        S, o = rule(S, new, T)
        count_B = step.real_BT.sum(axis=1)
        length_B = start_B + count_B
        inputs = jnp.pad(from_each(new_BCT, count_B, W - 1), [(0, 0), (0, 0), (0, PENDING)])
        gates = jnp.zeros_like(cache.gates[:, :, 0])
    length = jnp.broadcast_to(length_B[:, None], (B, N))
    # No token changes the state of a skipped slot; its inputs, gates and length stay, too.
    is_on = lambda a: (step.end_B > 0).reshape(-1, *(1,) * (a.ndim - 1))
    keep = lambda new, old: jnp.where(is_on(old), new[:, :, None], old)
    cache = cache._replace(
        state=S.reshape(cache.state.shape),
        inputs=keep(inputs, cache.inputs),
        gates=keep(gates, cache.gates),
        length=keep(length, cache.length),
    )
    gate = linear(x_BTD, w.w_gate).reshape(B, T, N, V)
    o_BTNV = gated_norm(o.reshape(B, T, N, V), w.norm, gate, config.rms_norm_eps)
    return linear(o_BTNV.reshape(B, T, -1), w.w_out), cache


def mlp(x_BTD: Array, w: Mlp) -> Array:
    """Partial sums over own F."""
    h_BTF = jax.nn.silu(linear(x_BTD, w.w_gate)) * linear(x_BTD, w.w_up)
    return linear(h_BTF, w.w_down)


def route(x_MD: Array, w: Moe, config: Config) -> tuple[Array, Array]:
    """The X experts of each token: their weights and their indices in the router, both [M, X]."""
    p_ME = jax.nn.softmax(linear(x_MD, w.router).astype(jnp.float32))
    weight_MX, expert_MX = lax.top_k(p_ME, config.num_experts_per_tok)
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
    """The shared MLP times its gate, plus the weighted sum of each token's experts: a partial sum,
    over the device's own experts and F. The M * X rows are sorted by expert; rows of other devices'
    experts come out as zeros."""
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
    weight_MX, expert_MX = route(x_MD, w, config)
    if step.implementation == Impl.REFERENCE:
        y_MD = mixture(x_MD, weight_MX, expert_MX, w.experts)
    else:
        groups = group_by_expert(expert_MX, num_experts(w.experts))
        dot = partial(ragged_dot, group_sizes_E=groups.sizes, implementation=step.implementation)
        y_MXD = experts(x_MD[groups.token], w.experts, dot)[groups.row]
        y_MD = (y_MXD * weight_MX[..., None]).sum(axis=1)
    shared_BTD = jax.nn.sigmoid(linear(x_BTD, w.shared_gate)) * mlp(x_BTD, w.shared)
    return y_MD.reshape(x_BTD.shape) + shared_BTD


@partial(jax.jit, static_argnames="config")
def block(
    x_BTD: Array, layer: Layer, cache: LayerCache | Recurrent, step: Step, config: Config
) -> tuple[Array, LayerCache | Recurrent]:
    h_BTD = rms_norm(x_BTD, layer.attn_norm, config.rms_norm_eps)
    mix: Any = attention if isinstance(layer.mixer, Attention) else linear_attention
    o_BTD, cache = mix(h_BTD, layer.mixer, cache, step, config)
    x_BTD = x_BTD + lax.psum(o_BTD, MODEL)  # partial sums over own heads -> replicated
    h_BTD = rms_norm(x_BTD, layer.mlp_norm, config.rms_norm_eps)
    w = layer.mlp
    o_BTD = moe(h_BTD, w, step, config) if isinstance(w, Moe) else mlp(h_BTD, w)
    x_BTD = x_BTD + lax.psum(o_BTD, MODEL)  # partial sums over own experts and F -> replicated
    return x_BTD, cache


def forward(
    weights: Weights,
    cache: tuple[LayerCache | Recurrent, ...],
    tokens_BT: Array,
    end_B: Array,
    config: Config,
    implementation: str = AUTO,
    last_B: Array | None = None,
) -> tuple[Array, tuple[LayerCache | Recurrent, ...]]:
    """Appends T tokens to each slot, the last at position end_B - 1; skips a slot if its end_B is
    0. Tokens of -1, behind the others, are padding. Returns float32 logits [B, T, V] and the cache;
    V is the device's part of the vocabulary, with padding. With last_B, only token last_B[b] of
    each slot gets logits, [B, V].

    For a loss (docs/library.md), call `logits` of common/serving/score.py with
    implementation="reference", which is differentiable if the weights are floats."""
    position_BT = end_B[:, None] + jnp.arange(-tokens_BT.shape[1], 0)
    real_BT = (tokens_BT >= 0) & (end_B > 0)[:, None]
    step = Step(end_B, real_BT, *rotary(position_BT, config), Impl(implementation))
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
    steps overwrite them. Past the capacity they are dropped. Padding changes no state."""

    def run(weights: Weights, state: DecodeState, tokens_BT: Array, count_B: Array) -> DecodeState:
        end_B = jnp.where(count_B > 0, state.length_B + tokens_BT.shape[1], 0)
        tokens_BT = real_tokens(tokens_BT, count_B)
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
DENSE = dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"), 0) | dict(
    shared_expert_intermediate_size=0
)
# Either all of these are published in fp8, or none.
PROJECTIONS = {
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    *("in_proj_qkv", "in_proj_z", "out_proj"),
}


def config_from_hf(hf: dict[str, Any]) -> Config:
    """Config of a config.json. A field unknown here and in common/config.py is a ValueError."""
    is_multimodal = hf.get("model_type") in ("qwen3_5", "qwen3_5_moe")
    text = text_config(hf, tied=(False, True)) if is_multimodal else hf
    # A position in an image is three numbers, and each rotates a section. In a text they are equal.
    sections = ("mrope_section", "mrope_interleaved")
    fields = read_rope(Config, text, theta=10000.0, rotated=0.25, ignored=sections)
    packing = read_packing(text, others=("fp8",))
    fields |= dict(packing=packing, fp8=packing is None and is_fp8(text, PROJECTIONS))
    fields |= DENSE if text.get("model_type") == "qwen3_5_text" else dict(intermediate_size=0)
    # Refused: other activations; biases on q, k, v and o; attention without its gate; states in
    # another dtype; dense layers between sparse ones.
    accepted: dict[str, Any] = dict(hidden_act=SILU, output_gate_type=SILU, attention_bias=False)
    accepted |= dict(attn_output_gate=True, mamba_ssm_dtype="float32", mlp_only_layers=[])
    return read_config(
        Config,
        text,
        model_types=("qwen3_5_text", "qwen3_5_moe_text"),
        fields_read=fields | dict(multimodal=is_multimodal),
        accepted=accepted,
        ignored=(
            "full_attention_interval",
            "mtp_num_hidden_layers",
            "mtp_use_dedicated_embeddings",
        ),
    )


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

    def whole(F: int, parts: int) -> int:
        return round_up(F, parts * FP8_BLOCK if fp8 and parts > 1 else parts)

    def dense(F: int) -> Mlp:
        F = whole(F, n)
        return Mlp(matrix((F, D), out, fp8), matrix((F, D), out, fp8), matrix((D, F), into, fp8))

    mlp: Any = dense(c.intermediate_size)
    if E:
        F = whole(c.moe_intermediate_size, shards.tensor)
        rows = stack((E, F, D), P(EXPERT, TENSOR, None), fp8)
        of_experts = Mlp(rows, rows, stack((E, D, F), P(EXPERT, None, TENSOR), fp8))
        shared = dense(c.shared_expert_intermediate_size)
        mlp = Moe(array((E, D)), of_experts, shared, array((1, D)))
    attention = Attention(
        wq=matrix((2 * q, D), out, fp8),
        wk=matrix((kv, D), out, fp8),
        wv=matrix((kv, D), out, fp8),
        q_norm=norm(c.head_dim, initial=0.0),
        k_norm=norm(c.head_dim, initial=0.0),
        wo=matrix((D, q), into, fp8),
    )
    K, N = (len(x) for x in reversed(split_linear(c, n)))
    C = 2 * K * c.linear_key_head_dim + N * c.linear_value_head_dim
    values = N * c.linear_value_head_dim
    recurrent = Linear(
        w_qkv=matrix((C, D), out, fp8),
        conv=array((C, 1, c.linear_conv_kernel_dim), P(MODEL, None, None)),
        w_gate=matrix((values, D), out, fp8),
        w_decay=array((N, D), out),
        w_strength=array((N, D), out),
        a_log=bias((N,), P(MODEL)),
        dt_bias=bias((N,), P(MODEL)),
        norm=norm(c.linear_value_head_dim),
        w_out=matrix((D, values), into, fp8),
    )
    mixers: Any = dict(full_attention=attention, linear_attention=recurrent)
    at = norm(D, initial=0.0)
    return Weights(
        embed=vocab_rows((V, D), out),
        layers=tuple(Layer(at, mixers[kind], at, mlp) for kind in c.layer_types),
        norm=norm(D, initial=0.0),
        head=None if c.tie_word_embeddings else vocab_rows((V, D), out),
    )


def split_linear(config: Config, n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The value heads and the key heads of linear layers, as n devices hold them."""
    return split_heads(config.linear_num_value_heads, config.linear_num_key_heads, n)


def init_state(
    config: Config, slots: int, capacity: int, dtype: DTypeLike, shards: Shards = UNSPLIT
) -> DecodeState:
    """Empty slots of `capacity` positions, with a cache of `dtype`: a float, fp8 or int8. States
    are float32."""
    c, n = config, shards.model
    heads = split_heads(c.num_attention_heads, c.num_key_value_heads, n)
    shape = (slots, len(heads.kv), capacity, c.head_dim)
    K, N = (len(x) for x in reversed(split_linear(c, n)))
    H, V = c.linear_key_head_dim, c.linear_value_head_dim
    recurrent = slots, N, H, V, 2 * K * H + N * V, c.linear_conv_kernel_dim
    return DecodeState(
        cache=tuple(
            empty_cache(shape, dtype) if kind == FULL else empty_recurrent(*recurrent)
            for kind in c.layer_types
        ),
        length_B=jnp.zeros(slots, jnp.int32),
        token_B=jnp.zeros(slots, jnp.int32),
        sampling=sampling_params(slots),
    )


def fused_order(config: Config, n: int) -> tuple[int, tuple[int, ...]]:
    """The files hold w_qkv as all queries, all keys, all values; each of n devices holds its own of
    the three. Returns how many rows are a block, and each block's place in the file (-1: zeros)."""
    c = config
    size = math.gcd(c.linear_key_head_dim, c.linear_value_head_dim)
    wide = [width // size for width in (c.linear_key_head_dim,) * 2 + (c.linear_value_head_dim,)]
    values, keys = split_linear(c, n)
    first = [0, c.linear_num_key_heads * wide[0], 2 * c.linear_num_key_heads * wide[0]]
    blocks = list[int]()
    for i in range(n):
        for heads, at, width in zip((keys, keys, values), first, wide, strict=True):
            count = len(heads) // n
            for head in heads[i * count : (i + 1) * count]:
                blocks += [at + head * width + j if head >= 0 else -1 for j in range(width)]
    return size, tuple(blocks)


def checkpoint_table(config: Config, shards: Shards = UNSPLIT) -> Table:
    """Published name -> its weight. An unknown tensor is an error; so is a weight that no tensor
    fills. An Order lists the heads along an axis, device by device, copies included. None: not
    loaded. `Same("x")`: equal to x, or absent. `prefix.**`: all names with that prefix."""
    c, n = config, shards.model
    heads = split_heads(c.num_attention_heads, c.num_key_value_heads, n)
    query, kv = (partial(Order, size=c.head_dim, blocks=blocks) for blocks in heads)
    values = partial(Order, size=c.linear_value_head_dim, blocks=split_linear(c, n)[0])
    of_heads = values(axis=0, size=1)
    fused = Order(0, *fused_order(c, n))
    table: Table = {
        "model.embed_tokens.weight": "embed",
        "model.layers.*.input_layernorm.weight": "layers.*.attn_norm",
        "model.layers.*.self_attn.q_proj.weight": (
            "layers.*.mixer.wq",
            query(axis=0, size=2 * c.head_dim),
        ),
        "model.layers.*.self_attn.k_proj.weight": ("layers.*.mixer.wk", kv(axis=0)),
        "model.layers.*.self_attn.v_proj.weight": ("layers.*.mixer.wv", kv(axis=0)),
        "model.layers.*.self_attn.q_norm.weight": "layers.*.mixer.q_norm",
        "model.layers.*.self_attn.k_norm.weight": "layers.*.mixer.k_norm",
        "model.layers.*.self_attn.o_proj.weight": ("layers.*.mixer.wo", query(axis=1)),
        "model.layers.*.linear_attn.in_proj_qkv.weight": ("layers.*.mixer.w_qkv", fused),
        "model.layers.*.linear_attn.conv1d.weight": ("layers.*.mixer.conv", fused),
        "model.layers.*.linear_attn.in_proj_z.weight": ("layers.*.mixer.w_gate", values(axis=0)),
        "model.layers.*.linear_attn.in_proj_a.weight": ("layers.*.mixer.w_decay", of_heads),
        "model.layers.*.linear_attn.in_proj_b.weight": ("layers.*.mixer.w_strength", of_heads),
        "model.layers.*.linear_attn.A_log": ("layers.*.mixer.a_log", of_heads),
        "model.layers.*.linear_attn.dt_bias": ("layers.*.mixer.dt_bias", of_heads),
        "model.layers.*.linear_attn.norm.weight": "layers.*.mixer.norm",
        "model.layers.*.linear_attn.out_proj.weight": ("layers.*.mixer.w_out", values(axis=1)),
        "model.layers.*.post_attention_layernorm.weight": "layers.*.mlp_norm",
        "model.layers.*.mlp.gate_proj.weight": "layers.*.mlp.w_gate",
        "model.layers.*.mlp.up_proj.weight": "layers.*.mlp.w_up",
        "model.layers.*.mlp.down_proj.weight": "layers.*.mlp.w_down",
        "model.layers.*.mlp.gate.weight": "layers.*.mlp.router",
        "model.layers.*.mlp.experts.*.gate_proj.weight": "layers.*.mlp.experts.w_gate",
        "model.layers.*.mlp.experts.*.up_proj.weight": "layers.*.mlp.experts.w_up",
        "model.layers.*.mlp.experts.*.down_proj.weight": "layers.*.mlp.experts.w_down",
        "model.layers.*.mlp.shared_expert.gate_proj.weight": "layers.*.mlp.shared.w_gate",
        "model.layers.*.mlp.shared_expert.up_proj.weight": "layers.*.mlp.shared.w_up",
        "model.layers.*.mlp.shared_expert.down_proj.weight": "layers.*.mlp.shared.w_down",
        "model.layers.*.mlp.shared_expert_gate.weight": "layers.*.mlp.shared_gate",
        "model.norm.weight": "norm",
        "lm_head.weight": Same("embed") if c.tie_word_embeddings else "head",
        "mtp.**": None,
    }
    if c.multimodal:
        inner = "model.language_model."
        table = {name.replace("model.", inner, 1): target for name, target in table.items()}
        table["model.visual.**"] = None
    # In fp8 each projection is stored as two tensors: values, and the scales of their blocks.
    return fp8_table(table, PROJECTIONS, shards) if c.fp8 else table

"""GPT-2 in one file: the decoder-only transformer from which all the others descend.

Language Models are Unsupervised Multitask Learners, Radford et al. 2019. Text is a sequence of
tokens. For each token the model computes a score (a logit) for each of the V tokens that may come
next. A token starts as a vector x of D numbers: one vector looked up by its id, plus one looked up
by its position. Each layer adds to x twice, and reads x through a norm each time:

    x += attention(norm(x))          N heads look at the tokens up to this one
    x += down(gelu(up(norm(x))))     looks at no other token

The logits are the products of norm(x) with the rows of the table in which ids were looked up. The
keys and values of earlier tokens are kept: they are the cache.

Dimensions: B slots, T query tokens (1 when decoding), S cache positions, D model, N query heads, K
= N key/value heads with G = 1 query each, H head dimension, F MLP width, V vocabulary, L layers.

Slots are split over the mesh axis `data`. Heads, MLP and vocabulary are split over MODEL, which is
the axes `expert` and `tensor` taken as one. Shapes in classes are of whole, padded arrays. In code
inside `shard_map`, and in the next paragraph, B, N, K, F and V count one device's part.

A greedy step has 2 L + 3 collectives over MODEL: [B, T, D] is all-reduced after the embedding, each
attention and each MLP (2 B T D bytes in bfloat16), and [B] twice in `sample` (4 bytes a slot). If
any temperature is above 0, `sample` has up to 36 more, of at most 12 bytes a slot each.
"""

from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from common.cache import LayerCache, append, attend, capacity_of, copy_slots, empty_cache
from common.config import head_dim, read_config
from common.kernels.dispatch import AUTO, KERNEL_FREE, Impl
from common.kernels.reference import Slot
from common.names import Order, Same, Table
from common.products import embed_rows, linear
from common.quant import Matrix, Transposed, out_features
from common.sampling import Sampling, sample, sampling_params
from common.sharding import DATA, MODEL, UNSPLIT, P, Shards, round_up, split_fused, split_heads
from common.weights import array, bias, matrix, norm, specs_like, vocab_rows


class Config(NamedTuple):
    """The fields of config.json that shape the computation, with GPT-2's own names in quotes."""

    vocab_size: int
    hidden_size: Annotated[int, "n_embd"]
    intermediate_size: Annotated[int, "n_inner"]  # 4 n_embd if missing or null
    num_hidden_layers: Annotated[int, "n_layer"]
    num_attention_heads: Annotated[int, "n_head"]
    head_dim: int  # n_embd / n_head
    max_position_embeddings: Annotated[int, "n_positions"]
    layer_norm_epsilon: float = 1e-5


class Layer(NamedTuple):
    """The loader decides how a Matrix is stored (bfloat16, int8, ...); products take any form."""

    attn_norm: Array  # [D]
    attn_norm_bias: Array  # [D]
    w_qkv: Matrix  # [3 * N * H, D]: a device's queries, then its keys, then its values
    b_qkv: Array  # [3 * N * H]
    wo: Matrix  # [D, N * H]
    bo: Array  # [D]
    mlp_norm: Array  # [D]
    mlp_norm_bias: Array  # [D]
    w_up: Matrix  # [F, D]
    b_up: Array  # [F]
    w_down: Matrix  # [D, F]
    b_down: Array  # [D]


class Weights(NamedTuple):
    embed: Matrix  # [V, D]; the head too
    positions: Array  # [max_position_embeddings, D]
    layers: tuple[Layer, ...]
    norm: Array  # [D]
    norm_bias: Array  # [D]


class DecodeState(NamedTuple):
    """B slots, decoded together. A slot of length 0 is empty. When a request ends, `serve` sets its
    slot's length to 0 and clears nothing: attention hides what is past the length, even NaN."""

    # For each layer two arrays of [B, K, S, H]: keys, and values. If H is not a multiple of
    # 128, they share one array, [B, K, S, 2 * H].
    cache: tuple[LayerCache, ...]
    length_B: Array  # int32: tokens in the cache
    token_B: Array  # int32: the newest token, which is not in the cache yet
    sampling: Sampling  # arrays of [B]: settings and a seed; a draw is made from seed and length


class Step(NamedTuple):
    """What all layers of one step share, on one device."""

    end_B: Array  # int32: the old length + T, padding included; 0 in a skipped slot
    implementation: Impl  # of the kernels; static in jit


# ---- the mathematics: from here to `forward`, what each device computes inside `shard_map`


def layer_norm(x: Array, weight_D: Array, bias_D: Array, eps: float) -> Array:
    """(x - mean) / deviation, then weight and bias; all in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * weight_D + bias_D).astype(x.dtype)


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
    sum over the device's heads, [B, T, D] and without the bias; and the cache.
    `attend` also takes a `window` (see gpt_oss) or a `chunk` (see llama4)."""
    (B, T, _), H = x_BTD.shape, config.head_dim
    projections = jnp.split(linear(x_BTD, layer.w_qkv) + layer.b_qkv, 3, axis=-1)
    q_BTNH, k_BTKH, v_BTKH = (x.reshape(B, T, -1, H) for x in projections)
    cache = append(cache, k_BTKH, v_BTKH, step.end_B - T)
    o_BTNH = attend(q_BTNH, cache, step.end_B, step.implementation, attend_slot, scale=H**-0.5)
    return linear(o_BTNH.reshape(B, T, -1), layer.wo), cache


def mlp(x_BTD: Array, layer: Layer) -> Array:
    """Partial sums over own F, without the bias."""
    h_BTF = jax.nn.gelu(linear(x_BTD, layer.w_up) + layer.b_up, approximate=True)  # tanh
    return linear(h_BTF, layer.w_down)


@partial(jax.jit, static_argnames="config")
def block(
    x_BTD: Array, layer: Layer, cache: LayerCache, step: Step, config: Config
) -> tuple[Array, LayerCache]:
    h_BTD = layer_norm(x_BTD, layer.attn_norm, layer.attn_norm_bias, config.layer_norm_epsilon)
    o_BTD, cache = attention(h_BTD, layer, cache, step, config)
    # Keep the brackets. Without them, XLA on CPU repeats the additions wherever the new x is used.
    x_BTD = x_BTD + (lax.psum(o_BTD, MODEL) + layer.bo)  # partial sums over own heads -> replicated
    h_BTD = layer_norm(x_BTD, layer.mlp_norm, layer.mlp_norm_bias, config.layer_norm_epsilon)
    o_BTD = mlp(h_BTD, layer)
    x_BTD = x_BTD + (lax.psum(o_BTD, MODEL) + layer.b_down)  # partial sums over own F -> replicated
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
    # A skipped slot has positions below 0, and padding may lie past the end of the table.
    position_BT = jnp.clip(position_BT, 0, len(weights.positions) - 1)
    x_BTD = embed(weights.embed, tokens_BT, weights.norm.dtype) + weights.positions[position_BT]
    step, caches = Step(end_B, Impl(implementation)), []
    for layer, layer_cache in zip(weights.layers, cache, strict=True):
        x_BTD, layer_cache = block(x_BTD, layer, layer_cache, step, config)
        caches.append(layer_cache)
    x = x_BTD if last_B is None else x_BTD[jnp.arange(len(last_B)), last_B]
    x = layer_norm(x, weights.norm, weights.norm_bias, config.layer_norm_epsilon)
    return linear(x, weights.embed, jnp.float32), tuple(caches)


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
    scaling = dict(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    return read_config(
        Config,
        hf,
        model_types=("gpt2",),
        if_missing=dict(intermediate_size=lambda c: 4 * c["hidden_size"], head_dim=head_dim),
        # Refused: another activation, a head that is not the embedding, other scales of scores.
        accepted=dict(activation_function="gelu_new", tie_word_embeddings=True) | scaling,
        ignored=("n_ctx", "reorder_and_upcast_attn"),  # scores are in float32 anyway
    )


# Slots are split over `data`, and the cache of each layer also over MODEL, by heads.
STATE_SPEC = DecodeState(cache=P(DATA, MODEL), length_B=P(DATA), token_B=P(DATA), sampling=P(DATA))


def weight_layout(config: Config, shards: Shards = UNSPLIT) -> Weights:
    """Shape and partition of every weight. If `shards` has several parts, zeros pad each split
    dimension until its parts are equal. `Transposed` holds [out, in] matrices as [in, out]."""
    c, n = config, shards.model
    NH = len(split_heads(c.num_attention_heads, c.num_attention_heads, n).query) * c.head_dim
    D, F, V = c.hidden_size, round_up(c.intermediate_size, n), round_up(c.vocab_size, n)
    out, into = P(MODEL, None), P(None, MODEL)  # split by output, or by input
    layer = Layer(
        attn_norm=norm(D),
        attn_norm_bias=bias((D,)),
        w_qkv=matrix((3 * NH, D), out, Transposed),
        b_qkv=bias((3 * NH,), P(MODEL)),
        wo=matrix((D, NH), into, Transposed),
        bo=bias((D,)),
        mlp_norm=norm(D),
        mlp_norm_bias=bias((D,)),
        w_up=matrix((F, D), out, Transposed),
        b_up=bias((F,), P(MODEL)),
        w_down=matrix((D, F), into, Transposed),
        b_down=bias((D,)),
    )
    return Weights(
        embed=vocab_rows((V, D), out),
        positions=array((c.max_position_embeddings, D)),
        layers=(layer,) * c.num_hidden_layers,
        norm=norm(D),
        norm_bias=bias((D,)),
    )


def init_state(
    config: Config, slots: int, capacity: int, dtype: DTypeLike, shards: Shards = UNSPLIT
) -> DecodeState:
    """Empty slots of `capacity` positions, with a cache of `dtype`: a float, fp8 or int8."""
    heads = split_heads(config.num_attention_heads, config.num_attention_heads, shards.model)
    shape = (slots, len(heads.kv), capacity, config.head_dim)
    return DecodeState(
        cache=tuple(empty_cache(shape, dtype) for _ in range(config.num_hidden_layers)),
        length_B=jnp.zeros(slots, jnp.int32),
        token_B=jnp.zeros(slots, jnp.int32),
        sampling=sampling_params(slots),
    )


def checkpoint_table(config: Config, shards: Shards = UNSPLIT) -> Table:
    """Published name -> its weight. An unknown tensor is an error; so is a weight that no tensor
    fills. An Order lists the heads along an axis, device by device. None: not loaded. `Same("x")`:
    equal to x, or absent."""
    blocks = split_fused(config.num_attention_heads, shards.model)
    qkv = partial(Order, size=config.head_dim, blocks=blocks)
    table: Table = {
        "wte.weight": "embed",
        "wpe.weight": "positions",
        "h.*.ln_1.weight": "layers.*.attn_norm",
        "h.*.ln_1.bias": "layers.*.attn_norm_bias",
        "h.*.attn.c_attn.weight": ("layers.*.w_qkv.values", qkv(axis=1)),
        "h.*.attn.c_attn.bias": ("layers.*.b_qkv", qkv(axis=0)),
        "h.*.attn.c_proj.weight": "layers.*.wo.values",
        "h.*.attn.c_proj.bias": "layers.*.bo",
        "h.*.ln_2.weight": "layers.*.mlp_norm",
        "h.*.ln_2.bias": "layers.*.mlp_norm_bias",
        "h.*.mlp.c_fc.weight": "layers.*.w_up.values",
        "h.*.mlp.c_fc.bias": "layers.*.b_up",
        "h.*.mlp.c_proj.weight": "layers.*.w_down.values",
        "h.*.mlp.c_proj.bias": "layers.*.b_down",
        "ln_f.weight": "norm",
        "ln_f.bias": "norm_bias",
        "h.*.attn.bias": None,  # the causal mask
        "h.*.attn.masked_bias": None,  # the score of a masked position
    }
    # Files on the hub have these names. In files that transformers writes, they have a prefix.
    prefixed = {f"transformer.{name}": row for name, row in table.items()}
    return prefixed | table | {"lm_head.weight": Same("embed")}

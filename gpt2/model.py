"""GPT-2 in one file: the decoder-only transformer from which all the others descend.

Language Models are Unsupervised Multitask Learners, Radford et al. 2019. Text is a row of tokens,
and for every token the model scores each of the V tokens that may come next (its logits). A token
starts as a vector of D numbers: one looked up by what it is, plus one looked up by where it stands.
Each layer adds to that vector twice, and each time reads it through a norm:

    x += attention(norm(x))          N heads look at the tokens up to this one
    x += down(gelu(up(norm(x))))     looks at no other token

The logits are the products of norm(x) with the table in which tokens were looked up. Norms, and the
matrices of the layers, have biases. The other models here rotate queries and keys instead of adding
positions, drop means and biases, gate the MLP, and share keys and values among heads.

Each new token reads all weights, and the keys and values of all tokens before it, which are
therefore kept: the cache, one array per layer. `block` is a jitted function, so that it is traced
once and not once per layer.

Dimensions: B batch or slots, T query tokens, S positions, D model, N heads, K the same heads where
they are keys or values, H head dimension, F MLP width, V vocabulary. Inside `shard_map`, N, K, F
and V are what one device holds and B is its slots.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from common.cache import append, attend, empty
from common.checkpoint import Order, Table
from common.quant import Int8, Transposed, embed_rows, linear, out_features, specs_like
from common.sampling import Sampling, sample, sampling_params
from common.sharding import DATA, MODEL, UNSPLIT, Shards, round_up, split_heads

Array = jax.Array

KERNEL_FREE = ("reference", "blocked")  # shard_map's check covers these; no Pallas call passes it


class Config(NamedTuple):
    """The fields of config.json that shape the computation, under the names that all models of
    this library use; GPT-2's own are older."""

    vocab_size: int
    hidden_size: int  # n_embd
    intermediate_size: int  # n_inner, 4 n_embd where that is null
    num_hidden_layers: int  # n_layer
    num_attention_heads: int  # n_head
    head_dim: int  # n_embd / n_head
    layer_norm_epsilon: float
    max_position_embeddings: int  # n_positions


IMPLEMENTED = dict(
    activation_function="gelu_new",
    scale_attn_weights=True,
    scale_attn_by_inverse_layer_idx=False,
    add_cross_attention=False,
    tie_word_embeddings=True,
)  # and reorder_and_upcast_attn either way: scores and softmax are in float32 here anyway


def config_from_hf(hf: dict[str, Any]) -> Config:
    """Config from a parsed config.json; ValueError names a setting that this file does not
    implement."""
    for name, expected in IMPLEMENTED.items():
        if hf.get(name, expected) != expected:
            raise ValueError(
                f"config.json: {name}={hf[name]!r} is not implemented, only {expected!r}"
            )
    width, heads = hf["n_embd"], hf["n_head"]
    if width % heads:
        raise ValueError(f"config.json: n_embd={width} is not a multiple of n_head={heads}")
    return Config(
        vocab_size=hf["vocab_size"],
        hidden_size=width,
        intermediate_size=hf.get("n_inner") or 4 * width,
        num_hidden_layers=hf["n_layer"],
        num_attention_heads=heads,
        head_dim=width // heads,
        layer_norm_epsilon=hf["layer_norm_epsilon"],
        max_position_embeddings=hf["n_positions"],
    )


class Layer(NamedTuple):
    attn_norm: Any  # [D]
    attn_norm_bias: Any  # [D]
    w_qkv: Any  # [3 * N * H, D]: a device's queries, then its keys, then its values
    b_qkv: Any  # [3 * N * H]
    wo: Any  # [D, N * H]
    bo: Any  # [D]
    mlp_norm: Any  # [D]
    mlp_norm_bias: Any  # [D]
    w_up: Any  # [F, D]
    b_up: Any  # [F]
    w_down: Any  # [D, F]
    b_down: Any  # [D]


class Weights(NamedTuple):
    embed: Any  # [V, D], and the head
    positions: Any  # [S, D]
    layers: tuple[Layer, ...]
    norm: Any  # [D]
    norm_bias: Any  # [D]


def weight_shapes(config: Config, shards: Shards = UNSPLIT) -> Weights:
    """Shapes as published, the matrices of the layers the other way round than elsewhere; with
    `shards`, padded so that every split dimension divides."""
    c, n = config, shards.model
    NH = len(split_heads(c.num_attention_heads, c.num_attention_heads, n).query) * c.head_dim
    D, F, V = c.hidden_size, round_up(c.intermediate_size, n), round_up(c.vocab_size, n)
    qkv, out = (Transposed((D, 3 * NH)), (3 * NH,)), (Transposed((NH, D)), (D,))
    up, down = (Transposed((D, F)), (F,)), (Transposed((F, D)), (D,))
    layer = Layer((D,), (D,), *qkv, *out, (D,), (D,), *up, *down)
    layers = (layer,) * c.num_hidden_layers
    return Weights((V, D), (c.max_position_embeddings, D), layers, (D,), (D,))


def weight_specs(config: Config) -> Weights:
    """Matrices that read the residual stream are split by output, with their biases, those that
    write it by input."""
    out, bias, into = P(MODEL, None), P(MODEL), P(None, MODEL)
    layer = Layer(P(), P(), out, bias, into, P(), P(), P(), out, bias, into, P())
    return Weights(out, P(), (layer,) * config.num_hidden_layers, P(), P())


class KVCache(NamedTuple):
    """Keys and values by layer; what lies at or past a slot's length is stale."""

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
    heads = split_heads(config.num_attention_heads, config.num_attention_heads, shards.model)
    shape = (batch, len(heads.kv), capacity, config.head_dim)
    k, v = (tuple(empty(shape, dtype) for _ in range(config.num_hidden_layers)) for _ in "kv")
    return KVCache(k, v)


def init_state(
    config: Config, slots: int, capacity: int, dtype: Any, shards: Shards = UNSPLIT
) -> DecodeState:
    length_B, token_B = jnp.zeros(slots, jnp.int32), jnp.zeros(slots, jnp.int32)
    cache = init_cache(config, slots, capacity, dtype, shards)
    return DecodeState(cache, length_B, token_B, sampling_params(slots))


def layer_norm(x: Array, weight_D: Array, bias_D: Array, eps: float) -> Array:
    """(x - mean) / deviation, then weight and bias; all in float32."""
    x32 = x.astype(jnp.float32)
    x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    x32 = x32 * lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * weight_D + bias_D).astype(x.dtype)


def embed(table_VD: Any, tokens_BT: Array, dtype: Any) -> Array:
    """Each device looks up the ids it owns; the others contribute zeros."""
    local_BT = tokens_BT - lax.axis_index(MODEL) * out_features(table_VD)
    x_BTD = embed_rows(table_VD, local_BT, dtype)
    return lax.psum(x_BTD, MODEL)  # own ids only -> replicated


def attention(x_BTD, layer, k_cache, v_cache, length_B, config, implementation):
    """Appends T tokens to the cache and attends to it: (output [B, T, D], k_cache, v_cache)."""
    B, T, _ = x_BTD.shape
    projections = jnp.split(linear(x_BTD, layer.w_qkv) + layer.b_qkv, 3, axis=-1)
    q_BTNH, k_BTKH, v_BTKH = (x.reshape(B, T, -1, config.head_dim) for x in projections)
    k_cache = append(k_cache, k_BTKH, length_B - T)
    v_cache = append(v_cache, v_BTKH, length_B - T)
    scale = config.head_dim**-0.5
    o_BTNH = attend(q_BTNH, k_cache, v_cache, length_B, scale=scale, implementation=implementation)
    o_BTD = linear(o_BTNH.reshape(B, T, -1), layer.wo)
    o_BTD = lax.psum(o_BTD, MODEL)  # partial: own heads only -> replicated
    return o_BTD + layer.bo, k_cache, v_cache  # added once, not by every device


def mlp(x_BTD: Array, layer: Layer) -> Array:
    # GPT-2's gelu is the tanh approximation, which moves logits by far more than rounding does.
    h_BTF = jax.nn.gelu(linear(x_BTD, layer.w_up) + layer.b_up, approximate=True)
    o_BTD = lax.psum(linear(h_BTF, layer.w_down), MODEL)  # partial: own part of F -> replicated
    return o_BTD + layer.b_down


@partial(jax.jit, static_argnames=("config", "implementation"))
def block(x_BTD, layer, k_cache, v_cache, length_B, config, implementation):
    eps = config.layer_norm_epsilon
    h_BTD = layer_norm(x_BTD, layer.attn_norm, layer.attn_norm_bias, eps)
    o_BTD, *caches = attention(h_BTD, layer, k_cache, v_cache, length_B, config, implementation)
    x_BTD = x_BTD + o_BTD
    x_BTD = x_BTD + mlp(layer_norm(x_BTD, layer.mlp_norm, layer.mlp_norm_bias, eps), layer)
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
    # Tokens of an empty row stand before the table of positions, padding may stand past its end.
    at_BT = jnp.clip(length_B[:, None] - T + jnp.arange(T), 0, len(weights.positions) - 1)
    x_BTD = embed(weights.embed, tokens_BT, weights.norm.dtype) + weights.positions[at_BT]
    keys, values = [], []
    for layer, k, v in zip(weights.layers, *cache, strict=True):
        x_BTD, k, v = block(x_BTD, layer, k, v, length_B, config, implementation)
        keys.append(k)
        values.append(v)
    x = x_BTD if at_B is None else x_BTD[jnp.arange(len(at_B)), at_B]
    x = layer_norm(x, weights.norm, weights.norm_bias, config.layer_norm_epsilon)
    return linear(x, weights.embed, jnp.float32), KVCache(tuple(keys), tuple(values))


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


def qkv_blocks(heads: int, shards: int) -> tuple[int, ...]:
    """Published c_attn holds all queries, all keys, all values, in 3 * heads blocks of H: their
    order when each device has its queries, its keys, its values; -1 for a block of zeros."""
    order = split_heads(heads, heads, shards).query
    size = len(order) // shards
    devices = (order[i : i + size] for i in range(0, len(order), size))
    return tuple(h + q * heads if h >= 0 else -1 for d in devices for q in range(3) for h in d)


def checkpoint_table(config: Config, shards: Shards = UNSPLIT) -> Table:
    """Published name -> its place in Weights (None: not needed), and the order of its heads (None:
    as published, then heads of zeros)."""
    N, H = config.num_attention_heads, config.head_dim
    qkv = partial(Order, size=H, blocks=qkv_blocks(N, shards.model))
    table: Table = {
        "wte.weight": ("embed", None),
        "wpe.weight": ("positions", None),
        "h.*.ln_1.weight": ("layers.*.attn_norm", None),
        "h.*.ln_1.bias": ("layers.*.attn_norm_bias", None),
        "h.*.attn.c_attn.weight": ("layers.*.w_qkv.values", qkv(axis=1)),
        "h.*.attn.c_attn.bias": ("layers.*.b_qkv", qkv(axis=0)),
        "h.*.attn.c_proj.weight": ("layers.*.wo.values", None),
        "h.*.attn.c_proj.bias": ("layers.*.bo", None),
        "h.*.ln_2.weight": ("layers.*.mlp_norm", None),
        "h.*.ln_2.bias": ("layers.*.mlp_norm_bias", None),
        "h.*.mlp.c_fc.weight": ("layers.*.w_up.values", None),
        "h.*.mlp.c_fc.bias": ("layers.*.b_up", None),
        "h.*.mlp.c_proj.weight": ("layers.*.w_down.values", None),
        "h.*.mlp.c_proj.bias": ("layers.*.b_down", None),
        "ln_f.weight": ("norm", None),
        "ln_f.bias": ("norm_bias", None),
        "h.*.attn.bias": (None, None),  # the causal mask, as is the next
        "h.*.attn.masked_bias": (None, None),
    }
    # Hub files use the bare names, files that transformers writes the prefixed ones.
    prefixed = {f"transformer.{name}": row for name, row in table.items()}
    return prefixed | table | {"lm_head.weight": (None, None)}

"""Multi-token prediction: Qwen3.5 with the layer that drafts the token after the next.

DeepSeek-V3 Technical Report, arXiv 2412.19437, section 2.2. The published files hold one layer of
attention more. For each token it takes the model's hidden vector x and the token that came next:

    draft logits = head(norm(block(proj [norm(embed(next token)) | norm(x)])))

This module has the names of a model file and is used in its place. `generate` appends the newest
token and its draft in one step. It keeps the draft if the model would have produced that token
(`common.speculate`), so a step gives one token or two, and the text is that of model.py. A draft
that was wrong stays pending in the linear layers, and the next step does not apply it. The extra
layer has a cache of its own, behind those of the other layers.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.typing import DTypeLike

from common.cache import LayerCache, capacity_of, copy_slots, real_tokens
from common.config import show
from common.kernels.dispatch import AUTO, KERNEL_FREE, Impl
from common.names import Table, weight_of
from common.products import linear
from common.quant import Matrix
from common.recurrent import Recurrent
from common.sampling import Sampling, sample
from common.sharding import DATA, MODEL, UNSPLIT, P, Shards
from common.speculate import NO_TOKEN, counting, verify
from common.weights import matrix, norm, specs_like
from qwen3_5 import model
from qwen3_5.model import Attention, Config, Layer

Cache = tuple[LayerCache | Recurrent, ...]


class Mtp(NamedTuple):
    """The layer that drafts. It uses the embedding and the head of the model."""

    embed_norm: Array  # [D], for the embedding of the next token
    hidden_norm: Array  # [D]
    proj: Matrix  # [D, 2 * D]
    layer: Layer
    norm: Array  # [D], before the head


class Weights(NamedTuple):
    """The weights of model.py, and the layer that drafts."""

    embed: Matrix
    layers: tuple[Layer, ...]
    norm: Array
    head: Matrix | None
    mtp: Mtp


class DecodeState(NamedTuple):
    """The state of model.py, with one more cache and a draft."""

    cache: Cache
    length_B: Array
    token_B: Array
    sampling: Sampling
    draft_B: Array  # int32: the draft of the token that follows the newest one
    new_BT: Array  # int32 [B, 2]: the one or two tokens of the last step; NO_TOKEN after one


STATE_SPEC = DecodeState(*model.STATE_SPEC, draft_B=P(DATA), new_BT=P(DATA))


def without_mtp(weights: Weights) -> model.Weights:
    return model.Weights(*weights[:-1])


def hidden(
    weights: model.Weights,
    cache: Cache,
    tokens_BT: Array,
    end_B: Array,
    config: Config,
    implementation: str,
) -> tuple[Array, Cache]:
    """`forward` of model.py before its head: x [B, T, D], normalised; and the cache."""
    x_BTD, caches = model.embed(weights.embed, tokens_BT, weights.norm.dtype), []
    step = step_of(tokens_BT, end_B, config, implementation)
    for layer, layer_cache in zip(weights.layers, cache, strict=True):
        x_BTD, layer_cache = model.block(x_BTD, layer, layer_cache, step, config)
        caches.append(layer_cache)
    return model.rms_norm(x_BTD, weights.norm, config.rms_norm_eps), tuple(caches)


def step_of(tokens_BT: Array, end_B: Array, config: Config, implementation: str) -> model.Step:
    position_BT = end_B[:, None] + jnp.arange(-tokens_BT.shape[1], 0)
    real_BT = (tokens_BT >= 0) & (end_B > 0)[:, None]
    return model.Step(end_B, real_BT, *model.rotary(position_BT, config), Impl(implementation))


def head(x: Array, weights: model.Weights) -> Array:
    """float32 logits [.., V] of the device's part of the vocabulary."""
    return linear(x, weights.embed if weights.head is None else weights.head, jnp.float32)


def draft(
    x_BTD: Array,
    next_BT: Array,
    weights: Weights,
    cache: LayerCache | Recurrent,
    end_B: Array,
    config: Config,
    implementation: str,
) -> tuple[Array, LayerCache | Recurrent]:
    """The input [B, T, D] of the head for drafts, from each token's hidden x and the token after
    it. Appends the T tokens to the cache."""
    w, eps = weights.mtp, config.rms_norm_eps
    e_BTD = model.rms_norm(model.embed(weights.embed, next_BT, x_BTD.dtype), w.embed_norm, eps)
    h_BTD = model.rms_norm(x_BTD, w.hidden_norm, eps)
    x_BTD = linear(jnp.concatenate([e_BTD, h_BTD], axis=-1), w.proj)
    step = step_of(next_BT, end_B, config, implementation)
    x_BTD, cache = model.block(x_BTD, w.layer, cache, step, config)
    return model.rms_norm(x_BTD, w.norm, eps), cache


def forward(
    weights: Weights,
    cache: Cache,
    tokens_BT: Array,
    end_B: Array,
    config: Config,
    implementation: str = AUTO,
    last_B: Array | None = None,
) -> tuple[Array, Cache]:
    """`forward` of model.py, which drafts nothing."""
    logits, own = model.forward(
        without_mtp(weights), cache[:-1], tokens_BT, end_B, config, implementation, last_B
    )
    return logits, (*own, cache[-1])


def both_logits(
    weights: Weights,
    cache: Cache,
    tokens_BT: Array,
    end_B: Array,
    config: Config,
    implementation: str = AUTO,
) -> tuple[tuple[Array, Array], Cache]:
    """The logits and the draft logits [B, T, V] of the first T of T + 1 tokens; each draft knows
    the token after its own. For training and tests. Called inside `shard_map`; end_B counts T
    tokens."""
    main = without_mtp(weights)
    x_BTD, own = hidden(main, cache[:-1], tokens_BT[:, :-1], end_B, config, implementation)
    y_BTD, last = draft(x_BTD, tokens_BT[:, 1:], weights, cache[-1], end_B, config, implementation)
    return (head(x_BTD, main), head(y_BTD, main)), (*own, last)


def append(
    weights: Weights,
    state: DecodeState,
    tokens_BT: Array,
    count_B: Array,
    config: Config,
    implementation: str,
    drafted: bool,
) -> DecodeState:
    """One device's part of `prefill` and `generate`. A count of 0 leaves a slot as it is. `prefill`
    appends the first count_B of T tokens. `generate` sets `drafted`: the T = 2 tokens are the
    newest one and its draft, and the draft is kept only if the model samples the same token."""
    main, T = without_mtp(weights), tokens_BT.shape[1]
    is_on_B = count_B > 0
    end_B, row_B = jnp.where(is_on_B, state.length_B + T, 0), jnp.arange(len(tokens_BT))
    real_BT = tokens_BT if drafted else real_tokens(tokens_BT, count_B)
    x_BTD, own = hidden(main, state.cache[:-1], real_BT, end_B, config, implementation)
    if drafted:
        new_BT, count_B = verify(
            head(x_BTD, main),
            state.draft_B[:, None],
            state.sampling,
            state.length_B,
            config.vocab_size,
        )
        count_B = jnp.where(is_on_B, count_B, 0)
        length_B = state.length_B + count_B
        token_B = new_BT[row_B, count_B - 1]
        last_BT = counting(new_BT, count_B)
    else:
        length_B = state.length_B + count_B
        logits_BV = head(x_BTD[row_B, count_B - 1], main)
        token_B = sample(logits_BV, state.sampling, length_B, config.vocab_size, MODEL)
        new_BT = jnp.roll(tokens_BT, -1, axis=1).at[row_B, count_B - 1].set(token_B)
        last_BT = jnp.stack([token_B, jnp.full_like(token_B, NO_TOKEN)], axis=1)
    y_BTD, last = draft(x_BTD, new_BT, weights, state.cache[-1], end_B, config, implementation)
    logits_BV = head(y_BTD[row_B, count_B - 1], main)
    draft_B = sample(logits_BV, state.sampling, length_B + 1, config.vocab_size, MODEL)
    return DecodeState(
        cache=(*own, last),
        length_B=length_B,
        token_B=jnp.where(is_on_B, token_B, state.token_B),
        sampling=state.sampling,
        draft_B=jnp.where(is_on_B, draft_B, state.draft_B),
        new_BT=last_BT,
    )


@partial(jax.jit, static_argnames=("config", "mesh", "implementation"), donate_argnames="state")
def prefill(
    weights: Weights,
    state: DecodeState,
    tokens_BT: Array,
    count_B: Array,
    *,
    config: Config,
    mesh: Mesh,
    implementation: str = AUTO,
) -> DecodeState:
    """`prefill` of model.py, which also drafts a token. If a prompt takes several calls, the last
    token of a call is paired with the token that the model samples there, not with the next prompt
    token. This may make later drafts worse; the text does not change."""
    run = partial(append, config=config, implementation=implementation, drafted=False)
    specs = (specs_like(weights, weight_layout(config)), STATE_SPEC, P(DATA), P(DATA))
    check = implementation in KERNEL_FREE
    run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=STATE_SPEC, check_vma=check)
    return run(weights, state, tokens_BT, count_B)


def insert(state: DecodeState, prefilled: DecodeState, slot_B: Array, *, mesh: Mesh) -> DecodeState:
    """`insert` of model.py."""
    return copy_slots(state, prefilled, slot_B, STATE_SPEC, mesh)


@partial(jax.jit, static_argnames=("config", "mesh", "implementation"), donate_argnames="state")
def generate(
    weights: Weights, state: DecodeState, *, config: Config, mesh: Mesh, implementation: str = AUTO
) -> DecodeState:
    """Appends the newest token of each slot, and its draft if that is right: a length grows by 1 or
    2. Empty slots and full ones stay as they are. A draft that no longer fits is not cached, so the
    caller must not take tokens beyond the capacity. `state` is donated."""
    is_on_B = (state.length_B > 0) & (state.length_B < capacity_of(state.cache))
    tokens_BT = jnp.stack([state.token_B, state.draft_B], axis=1)
    run = partial(append, config=config, implementation=implementation, drafted=True)
    specs = (specs_like(weights, weight_layout(config)), STATE_SPEC, P(DATA), P(DATA))
    check = implementation in KERNEL_FREE
    run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=STATE_SPEC, check_vma=check)
    return run(weights, state, tokens_BT, is_on_B.astype(jnp.int32))


# ---- what a loader needs


def config_from_hf(hf: dict[str, Any]) -> Config:
    """`config_from_hf` of model.py; ValueError also if the files do not hold one layer that
    drafts."""
    config, name = model.config_from_hf(hf), "mtp_num_hidden_layers"
    if (layers := hf.get("text_config", hf).get(name)) != 1:
        what = f"{name}={show(layers)}, but drafting takes one such layer"
        raise ValueError(f"config.json: {what}")
    return config


def weight_layout(config: Config, shards: Shards = UNSPLIT) -> Weights:
    """`weight_layout` of model.py, and the layer that drafts, which is like those of attention."""
    main, D = model.weight_layout(config, shards), config.hidden_size
    mtp = Mtp(
        embed_norm=norm(D, initial=0.0),
        hidden_norm=norm(D, initial=0.0),
        proj=matrix((D, 2 * D), P(None, None)),
        layer=next(layer for layer in main.layers if isinstance(layer.mixer, Attention)),
        norm=norm(D, initial=0.0),
    )
    return Weights(*main, mtp=mtp)


def init_state(
    config: Config, slots: int, capacity: int, dtype: DTypeLike, shards: Shards = UNSPLIT
) -> DecodeState:
    """`init_state` of model.py, with one more cache."""
    main = model.init_state(config, slots, capacity, dtype, shards)
    like = next(layer for layer in main.cache if not isinstance(layer, Recurrent))
    cache = jax.tree.map(jnp.copy, like)
    none_B = jnp.zeros(slots, jnp.int32)
    new_BT = jnp.zeros((slots, 2), jnp.int32)
    return DecodeState((*main.cache, cache), *main[1:], draft_B=none_B, new_BT=new_BT)


def checkpoint_table(config: Config, shards: Shards = UNSPLIT) -> Table:
    """`checkpoint_table` of model.py, with rows for the layer that drafts. It has the embedding and
    the head of the model."""
    table = model.checkpoint_table(config, shards)
    del table["mtp.**"]
    rows = [(name.split(".layers.*."), weight_of(target)) for name, target in table.items()]
    for (_, *end), row in rows:
        if end and row is not None and not end[0].startswith("linear_attn"):
            path, order = row
            table[f"mtp.layers.0.{end[0]}"] = path.replace("layers.*.", "mtp.layer."), order
    own = dict(fc="proj", norm="norm", pre_fc_norm_embedding="embed_norm")
    own |= dict(pre_fc_norm_hidden="hidden_norm")
    return table | {f"mtp.{name}.weight": f"mtp.{path}" for name, path in own.items()}

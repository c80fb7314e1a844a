"""Multi-token prediction: DeepSeek V3 with the layer that drafts the token after the next.

DeepSeek-V3 Technical Report, arXiv 2412.19437, section 2.2. The layer that the files hold after the
last one sees, for each token, what the model made of it and which token came next:

    draft logits = head(norm(block(W [norm(embed(next token)) | norm(hidden)])))

This module has the names of a model file, and stands in its place: `generate` appends the newest
token and its draft in one step, and keeps the draft if it is what the model would have produced
(`common.speculate`). So a step yields one token or two, and the text is that of model.py. The layer
has a cache of its own, after those of the others.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from common.cache import RowCache, check_insert, copy_rows
from common.kernels.dispatch import KERNEL_FREE, Impl
from common.names import Table, fp8_table
from common.quant import Matrix, linear
from common.sampling import Sampling, sample
from common.sharding import DATA, MODEL, UNSPLIT, P, Shards
from common.speculate import verify
from common.weights import matrix, norm, specs_like
from deepseek_r1 import model
from deepseek_r1.model import Config, Layer

Array = jax.Array


class Mtp(NamedTuple):
    """The layer that drafts; embedding and head are those of the model."""

    embed_norm: Array  # [D], of the next token's embedding
    hidden_norm: Array  # [D]
    proj: Matrix  # [D, 2 * D]
    layer: Layer
    norm: Array  # [D], before the head


class Weights(NamedTuple):
    """Those of model.py, and the layer that drafts."""

    embed: Matrix
    layers: tuple[Layer, ...]
    norm: Array
    head: Matrix | None
    mtp: Mtp


class DecodeState(NamedTuple):
    """That of model.py, with a cache more and a draft."""

    cache: tuple[RowCache, ...]
    length_B: Array
    token_B: Array
    sampling: Sampling
    draft_B: Array  # int32: what may come after the newest token


STATE_SPEC = DecodeState(*model.STATE_SPEC, draft_B=P(DATA))


def without_mtp(weights: Weights) -> model.Weights:
    return model.Weights(*weights[:-1])


def draft(
    x_BTD: Array,
    next_BT: Array,
    weights: Weights,
    cache: RowCache,
    end_B: Array,
    config: Config,
    implementation: Impl,
) -> tuple[Array, RowCache]:
    """What the head makes drafts of, [B, T, D]: of each token's hidden x and of the token after it.
    And the cache with the T tokens appended."""
    w, eps = weights.mtp, config.rms_norm_eps
    e_BTD = model.rms_norm(model.embed(weights.embed, next_BT, x_BTD.dtype), w.embed_norm, eps)
    h_BTD = model.rms_norm(x_BTD, w.hidden_norm, eps)
    x_BTD = linear(jnp.concatenate([e_BTD, h_BTD], axis=-1), w.proj)
    step = model.Step(end_B, *model.rotary(model.positions(next_BT, end_B), config))
    x_BTD, cache = model.block(x_BTD, w.layer, cache, step, config, implementation)
    return model.rms_norm(x_BTD, w.norm, eps), cache


def forward(
    weights: Weights,
    cache: tuple[RowCache, ...],
    tokens_BT: Array,
    end_B: Array,
    config: Config,
    implementation: Impl = None,
    last_B: Array | None = None,
) -> tuple[Array, tuple[RowCache, ...]]:
    """That of model.py, which drafts nothing."""
    logits, own = model.forward(
        without_mtp(weights), cache[:-1], tokens_BT, end_B, config, implementation, last_B
    )
    return logits, (*own, cache[-1])


def both_logits(
    weights: Weights,
    cache: tuple[RowCache, ...],
    tokens_BT: Array,
    end_B: Array,
    config: Config,
    implementation: Impl = None,
) -> tuple[tuple[Array, Array], tuple[RowCache, ...]]:
    """Of T + 1 tokens, the logits and the draft logits [B, T, V] at all but the last, each of which
    knows the token after it: for training and tests. Inside `shard_map`; end_B counts T tokens."""
    main = without_mtp(weights)
    x_BTD, own = model.hidden(main, cache[:-1], tokens_BT[:, :-1], end_B, config, implementation)
    y_BTD, last = draft(x_BTD, tokens_BT[:, 1:], weights, cache[-1], end_B, config, implementation)
    return (model.logits(x_BTD, main), model.logits(y_BTD, main)), (*own, last)


def append(
    weights: Weights,
    state: DecodeState,
    tokens_BT: Array,
    count_B: Array | None,
    config: Config,
    implementation: Impl,
) -> DecodeState:
    """One device's part of `prefill`, whose first count_B tokens are known; and of `generate`,
    whose tokens are the newest and its draft."""
    main, T = without_mtp(weights), tokens_BT.shape[1]
    is_on = state.length_B > 0 if count_B is None else count_B > 0
    end_B, row_B = jnp.where(is_on, state.length_B + T, 0), jnp.arange(len(tokens_BT))
    x_BTD, own = model.hidden(main, state.cache[:-1], tokens_BT, end_B, config, implementation)
    if count_B is None:
        new_BT, count_B = verify(
            model.logits(x_BTD, main),
            state.draft_B[:, None],
            state.sampling,
            state.length_B,
            config.vocab_size,
        )
        count_B = jnp.where(is_on, count_B, 0)
        length_B = state.length_B + count_B
        token_B = new_BT[row_B, count_B - 1]
    else:
        length_B = state.length_B + count_B
        logits_BV = model.logits(x_BTD[row_B, count_B - 1], main)
        token_B = sample(logits_BV, state.sampling, length_B, config.vocab_size, MODEL)
        new_BT = jnp.roll(tokens_BT, -1, axis=1).at[row_B, count_B - 1].set(token_B)
    y_BTD, last = draft(x_BTD, new_BT, weights, state.cache[-1], end_B, config, implementation)
    logits_BV = model.logits(y_BTD[row_B, count_B - 1], main)
    draft_B = sample(logits_BV, state.sampling, length_B + 1, config.vocab_size, MODEL)
    return DecodeState(
        cache=(*own, last),
        length_B=length_B,
        token_B=jnp.where(is_on, token_B, state.token_B),
        sampling=state.sampling,
        draft_B=jnp.where(is_on, draft_B, state.draft_B),
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
    implementation: Impl = None,
) -> DecodeState:
    """That of model.py, and a draft. Where a prompt takes several calls, the last token of a call
    is taken to be followed by what the model expects there: drafts suffer a little, not the text.
    """
    run = partial(append, config=config, implementation=implementation)
    specs = (specs_like(weights, weight_layout(config)), STATE_SPEC, P(DATA), P(DATA))
    check = implementation in KERNEL_FREE
    step = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=STATE_SPEC, check_vma=check)
    return step(weights, state, tokens_BT, count_B)


def insert(state: DecodeState, prompt: DecodeState, slot_B: Array, *, mesh: Mesh) -> DecodeState:
    """That of model.py."""
    check_insert(state, prompt, slot_B, mesh)
    return copy_rows(state, prompt, slot_B, specs=STATE_SPEC, mesh=mesh)


@partial(jax.jit, static_argnames=("config", "mesh", "implementation"), donate_argnames="state")
def generate(
    weights: Weights, state: DecodeState, *, config: Config, mesh: Mesh, implementation: Impl = None
) -> DecodeState:
    """Appends the newest token of every filled slot and its draft, if that is right: a length grows
    by 1 or by 2. `state` is donated."""

    def run(weights: Weights, state: DecodeState) -> DecodeState:
        tokens_BT = jnp.stack([state.token_B, state.draft_B], axis=1)
        return append(weights, state, tokens_BT, None, config, implementation)

    specs = (specs_like(weights, weight_layout(config)), STATE_SPEC)
    check = implementation in KERNEL_FREE
    step = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=STATE_SPEC, check_vma=check)
    return step(weights, state)


# ---- what a loader needs


def config_from_hf(hf: dict[str, Any]) -> Config:
    """That of model.py; ValueError also where the files hold no layer that drafts, or several."""
    config = model.config_from_hf(hf)
    if (layers := config.num_nextn_predict_layers) != 1:
        raise ValueError(
            f"config.json: num_nextn_predict_layers={layers}, but drafting takes one such layer"
        )
    return config


def weight_layout(config: Config, shards: Shards = UNSPLIT) -> Weights:
    """That of model.py, and the layer that drafts: like the last one."""
    main, D = model.weight_layout(config, shards), config.hidden_size
    mtp = Mtp(
        embed_norm=norm(D),
        hidden_norm=norm(D),
        proj=matrix((D, 2 * D), P(None, None)),
        layer=main.layers[-1],
        norm=norm(D),
    )
    return Weights(*main, mtp=mtp)


def init_state(
    config: Config, slots: int, capacity: int, dtype: DTypeLike, shards: Shards = UNSPLIT
) -> DecodeState:
    """That of model.py, with a cache more."""
    main = model.init_state(config, slots, capacity, dtype, shards)
    cache = jax.tree.map(jnp.copy, main.cache[0])
    return DecodeState((*main.cache, cache), *main[1:], draft_B=jnp.zeros(slots, jnp.int32))


def checkpoint_table(config: Config, shards: Shards = UNSPLIT) -> Table:
    """That of model.py, with rows for the layer that drafts. Its embedding and its head repeat the
    model's, and are dropped."""
    table = model.checkpoint_table(config._replace(fp8=False))
    at = f"model.layers.{config.num_hidden_layers}."
    del table[f"{at}**"]
    rows: Table = {
        name.replace("model.layers.*.", at): path.replace("layers.*.", "mtp.layer.")
        for name, path in table.items()
        if isinstance(path, str) and name.startswith("model.layers.*.")
    }
    own: Table = {
        f"{at}embed_tokens.weight": None,
        f"{at}enorm.weight": "mtp.embed_norm",
        f"{at}hnorm.weight": "mtp.hidden_norm",
        f"{at}eh_proj.weight": "mtp.proj",
        f"{at}shared_head.norm.weight": "mtp.norm",
        f"{at}shared_head.head.weight": None,
    }
    table |= rows | own
    return fp8_table(table, model.PROJECTIONS, shards) if config.fp8 else table

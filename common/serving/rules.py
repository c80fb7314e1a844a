"""What requests ask of single tokens: grammars, biases and penalties, as the arrays of `Rules`.

What a grammar allows next is computed by llguidance (https://github.com/guidance-ai/llguidance)
from the tokens so far. So a slot with a grammar needs its newest token before the next step.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from common.sampling import PENALTIES, RULES_SPEC, Rules
from common.serving.load import Model
from common.serving.session import BIASES, Session, Work
from common.sharding import model_shards, round_up


def check_grammar(model: Model, grammar: str) -> None:
    """ValueError if a grammar of llguidance cannot be followed."""
    try:
        error = error_in(vocabulary_of(model), grammar)
    except ImportError:
        raise ValueError("a grammar needs llguidance: pip install -e '.[serve]'") from None
    if error:
        raise ValueError(f"the grammar cannot be followed: {' '.join(error.split())[:500]}")


@lru_cache(maxsize=64)  # a request is checked when it is read, and again when it is submitted
def error_in(vocabulary: Any, grammar: str) -> str:
    guide = start_guide(vocabulary, grammar)
    guide.compute_bitmask()
    return guide.get_error().partition("<state>")[0].replace("NoExtensionBias", "no text fits it")


def vocabulary_of(model: Model) -> Any:
    """The model's tokens, as llguidance wants them. ValueError if it has no tokenizer."""
    if (tok := model.tokenizer) is None:
        raise ValueError("a grammar needs a tokenizer")
    size = max(model.config.vocab_size, tok.vocab_size)
    return _vocabulary(tok.backend, size, tok.stop_ids)


@lru_cache(maxsize=4)  # it takes a second for a large vocabulary
def _vocabulary(backend: Any, size: int, stop_ids: frozenset[int]) -> Any:
    from llguidance import LLTokenizer

    return LLTokenizer(backend.to_str(), size, [*stop_ids] or None)


def start_guide(vocabulary: Any, grammar: str) -> Any:
    """A matcher, which follows a reply in its grammar."""
    from llguidance import LLMatcher

    return LLMatcher(vocabulary, grammar, log_level=0)


def allowed_words(model: Model, works: Mapping[int, Work], rows: int) -> np.ndarray:
    """The bits of `Rules.allowed_BW`. A stop token may come where the grammar may end. If a matcher
    has failed, nothing may come, and the reply ends as invalid."""
    guides = [(row, work) for row, work in works.items() if work.guide is not None]
    size = vocabulary_of(model).vocab_size if guides else model.config.vocab_size
    allowed_BW = np.full((rows, -(-size // 32)), -1, np.int32)
    if guides:
        from llguidance.numpy import fill_next_token_bitmask_par

        fill_next_token_bitmask_par(executor(), [(w.guide, row) for row, w in guides], allowed_BW)
    allowed_BW = allowed_BW.view(np.uint32)
    for row, work in guides:
        for i in filter(lambda i: i < size, work.request.stop_ids):
            allowed_BW[row, i // 32] &= ~np.uint32(1 << i % 32)
            if work.guide.is_accepting():
                allowed_BW[row, i // 32] |= np.uint32(1 << i % 32)
        if work.guide.is_error():
            allowed_BW[row] = 0
    return allowed_BW


@lru_cache(maxsize=1)
def executor() -> Any:
    """The threads that compute masks."""
    from llguidance import LLExecutor

    return LLExecutor()


def seen_tokens(model: Model, works: Mapping[int, Work], rows: int) -> np.ndarray:
    """`Rules.seen_BV`, of the whole vocabulary."""
    parts = model_shards(model.mesh).model
    seen_BV = np.zeros((rows, round_up(model.config.vocab_size, parts)), np.int32)
    for row, work in works.items():
        n = len(work.request.prompt)
        np.add.at(seen_BV[row], work.tokens[n:], 2)
        seen_BV[row, work.tokens[:n]] |= 1
    return seen_BV


def rules_of(
    session: Session, works: Mapping[int, Work], rows: int, seen_BV: Any = None
) -> Rules | None:
    """The rules of requests by their row; None if no request has any. `seen_BV` is what the texts
    have seen so far, if that is not to be counted."""
    works = {row: work for row, work in works.items() if work.request.is_ruled}
    if not works:
        return None
    model, penalties = session.model, [np.full(rows, off, np.float32) for off in (1, 0, 0)]
    bias_id_BN = np.full((rows, BIASES), -1, np.int32)
    bias_BN = np.zeros((rows, BIASES), np.float32)
    for row, work in works.items():
        for i, (id_, bias) in enumerate(dict(work.request.logit_bias).items()):
            bias_id_BN[row, i], bias_BN[row, i] = id_, bias
        for value_B, name in zip(penalties, PENALTIES, strict=True):
            value_B[row] = getattr(work.request, name)
    if any(work.request.has_penalty for work in works.values()):
        seen_BV = seen_tokens(model, works, rows) if seen_BV is None else seen_BV
        seen_BV = jax.device_put(seen_BV, NamedSharding(model.mesh, RULES_SPEC.seen_BV))
    else:
        seen_BV = None
    new = allowed_words(model, works, rows), bias_id_BN, bias_BN, *penalties
    placed: Any = *jax.device_put(new, session.by_shard), seen_BV
    return Rules(*placed)

"""The serving loop: prompts in, tokens out. Prompts for which no slot is free wait in a queue.

Step t + 1 is dispatched before step t's tokens are fetched, so host work overlaps device work.
"""

import time
from collections import deque
from collections.abc import Collection, Generator, Sequence
from typing import Any, NamedTuple

import jax

from common.sampling import INVALID
from common.serving.load import Model
from common.serving.session import (
    NO_TOKEN,
    PROMPT_CHUNK,
    Event,
    Request,
    Session,
    buckets,
    capacity_for,
    check_request,
    empty_others,
    fetch,
    insert_prompts,
    read_prompts,
    start_session,
    step,
    timed,
)
from common.sharding import DATA, round_up
from common.text.tokenizer import decode, encode


class Running(NamedTuple):
    """The request in a slot."""

    request: int
    left: int  # tokens that it may still produce
    length: int  # tokens of prompt and reply so far


def admit(
    requests: Sequence[Request],
    waiting: deque[int],
    running: dict[int, Running],
    rows: int,
    per_row: int,
) -> dict[int, tuple[int, int]]:
    """Takes waiting requests in order, one per data shard with a free slot. Returns {shard:
    (request, slot)}.

    Prompts are read together only if they take the same buckets. So how a prompt is read does not
    depend on the others.
    """
    entering: dict[int, tuple[int, int]] = {}
    for row in range(rows):
        free = [s for s in range(row * per_row, (row + 1) * per_row) if s not in running]
        together = [request for request, _ in entering.values()] + ([waiting[0]] if waiting else [])
        lengths = {tuple(buckets(len(requests[i].prompt))) for i in together}
        if free and waiting and len(lengths) == 1:
            entering[row] = (waiting.popleft(), free[0])
    return entering


def serve(
    session: Session,
    requests: Sequence[Request],
    stop_ids: Collection[int] = (),
    reuse_multiple: int = PROMPT_CHUNK,
) -> Generator[Event, None, None]:
    """Yields the tokens of all requests as they are made. ValueError if a request cannot be served.

    If a prompt begins like the previous prompt on its data shard, that part of the cache is reused,
    in multiples of `reuse_multiple` tokens. With the default, a prompt is read in the same chunks
    whatever came before, so its reply does not depend on that, not even by a rounding error. A
    conversation passes 1.
    """
    for i, request in enumerate(requests):
        limit = session.model.config.max_position_embeddings
        check_request(request, session.capacity, limit, f"prompt {i + 1}")
    rows, stats, began = len(session.held), session.stats, time.perf_counter()
    waiting, running = deque(range(len(requests))), dict[int, Running]()
    ahead: tuple[jax.Array, dict[int, int]] | None = None  # tokens to fetch, {slot: request}

    def book(slot: int, token: int) -> Event:
        request, left, length = running.pop(slot)
        finish = "stop" if token in stop_ids else "length" if left == 1 else None
        finish = "invalid" if token == INVALID else finish
        if finish is None:
            running[slot] = Running(request, left - 1, length + 1)
        return Event(request, token, finish)

    try:
        while waiting or running:
            while waiting and (
                entering := admit(requests, waiting, running, rows, session.slots // rows)
            ):
                tokens = read_prompts(session, requests, entering, reuse_multiple)
                stats.first_token_s = stats.first_token_s or time.perf_counter() - began
                for row, (i, slot) in entering.items():
                    length = len(requests[i].prompt)
                    room = session.capacity - length + 1  # the last token is never cached
                    left = min(requests[i].max_new_tokens, room)
                    running[slot] = Running(i, left, length)
                    yield book(slot, int(tokens[row]))
                insert_prompts(session, entering)
                empty_others(session, running)
            produced: list[tuple[int, int]] = []
            with timed(stats, "decode_s"):
                behind, ahead = ahead, None
                if running:
                    ahead = step(session), {slot: r.request for slot, r in running.items()}
                    filled = sum(r.length + 1 for r in running.values())
                    stats.filled += filled / (session.slots * session.capacity)
                if behind:
                    tokens = fetch(behind[0])
                    produced = [
                        (slot, int(token))
                        for slot, i in behind[1].items()
                        for token in tokens[slot]
                        if slot in running and running[slot].request == i
                    ]
                    if tokens.shape[1] > 1:
                        stats.drafts += len(produced) // 2
                        stats.drafts_right += sum(token != NO_TOKEN for _, token in produced[1::2])
            for slot, token in produced:
                if token != NO_TOKEN and slot in running:  # skips what follows a stop token
                    stats.decode_tokens += 1
                    yield book(slot, token)
            if any(slot not in running for slot, _ in produced):
                empty_others(session, running)
    finally:  # also if the caller stops early
        empty_others(session, {})


def complete(
    model: Model,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int,
    slots: int = 8,
    seed: int = 0,
    **sampling: Any,
) -> list[str]:
    """Returns the text that follows each prompt. A prompt is raw text, or ids such as those that
    `encode_chat` returns. Prompt i is sampled with seed (`seed` + i) mod 2**32. `sampling` sets
    further fields of `Request`."""
    if (tok := model.tokenizer) is None:
        raise ValueError("this model has no tokenizer: use `serve`, which takes and yields ids")
    ids = [encode(tok, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    requests = [
        Request(prompt, max_new_tokens, seed=(seed + i) % 2**32, **sampling)
        for i, prompt in enumerate(ids)
    ]
    need = max(map(len, ids), default=0) + max_new_tokens
    capacity = capacity_for(need, model.config.max_position_embeddings)
    slots = round_up(max(1, min(slots, len(ids))), model.mesh.shape[DATA])
    session = start_session(model, slots, capacity)
    tokens: list[list[int]] = [[] for _ in ids]
    for event in serve(session, requests, tok.stop_ids):
        if event.finish not in ("stop", "invalid"):
            tokens[event.request].append(event.token)
    return [decode(tok, each) for each in tokens]

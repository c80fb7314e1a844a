"""The serving loop: requests in, tokens out.

A session takes requests at any time (`submit`), gives them up (`cancel`), and does one step of work
(`step`), which returns what came of it. One thread does all of this.

Step t + 1 is dispatched before step t's tokens are fetched, so host work overlaps device work.
"""

import json
import time
from collections.abc import Collection, Generator, Sequence
from typing import Any

import jax
import numpy as np

from common.machines.hosts import share
from common.sampling import INVALID
from common.serving.drafts import PROBE, measure
from common.serving.kept import begin, find_beginning, release, settle
from common.serving.load import Model
from common.serving.session import (
    PROMPT_CHUNK,
    Ahead,
    Chunk,
    Event,
    Request,
    Score,
    Session,
    Work,
    capacity_for,
    check_request,
    empty_others,
    generate,
    newest,
    next_chunk,
    read_chunk,
    score_of,
    start_session,
    timed,
)
from common.sharding import DATA, round_up
from common.speculate import NO_TOKEN
from common.text.tokenizer import encode, stream_flush, stream_push, stream_start

LEAST_COST = PROMPT_CHUNK // 4  # a read of fewer tokens takes as long: it reads all weights


def submit(session: Session, request: Request) -> int:
    """Adds a request. Returns its number, which its events carry. ValueError if it cannot be
    served."""
    check_request(request, session.capacity, session.model.config.max_position_embeddings)
    most = -1 if session.likeliest is None else session.likeliest
    if request.logprobs is not None and not 0 <= request.logprobs <= most:
        gives = f"at most {most}" if most >= 0 else "none"
        raise ValueError(f"logprobs={request.logprobs}, but this session gives {gives}")
    session.began = session.began or time.perf_counter()
    session.arrived.append((session.ids, request))
    session.ids += 1
    return session.ids - 1


def cancel(session: Session, number: int) -> None:
    """Gives up a request, if it has not ended. There will be no more events of it, and its slot is
    free before the next step."""
    session.arrived.append((number, None))


def is_busy(session: Session) -> bool:
    """Whether `step` has anything to do."""
    s = session
    return bool(s.arrived or s.waiting or s.reading or s.read or s.running or s.freed)


def step(session: Session) -> list[Event]:
    """Does one step of work: reads a chunk of prompts, or decodes a token of every running text.
    Returns the tokens that became ready.

    Between two steps of decoding, prompts of at most PROMPT_CHUNK tokens are read. So no running
    text ever waits for more than one chunk, and no prompt waits for ever.
    """
    stats, began = session.stats, time.perf_counter()
    receive(session)
    if session.fresh is not None:
        return book_first(session)
    with timed(stats, "prefill_s"):
        settle(session)
    admit(session)
    if session.freed:
        empty_others(session, session.running)
        session.freed = False
    behind, session.ahead = session.ahead, None
    chunk = next_chunk(next(iter(session.reading.values()))) if session.reading else None
    cost = max(chunk.bucket, LEAST_COST) if chunk else 0
    if chunk and (cost <= session.budget or not session.running):
        session.budget -= cost
        with timed(stats, "prefill_s"):
            read(session, chunk)
    else:
        session.budget = PROMPT_CHUNK
        with timed(stats, "decode_s"):
            decode(session)
    return book(session, behind, began) if behind else []


def close(session: Session) -> None:
    """Tells the other processes, at the next step, that no more requests will come."""
    session.closed = True


def agree(session: Session) -> None:
    """Takes over what process 0 was told, which decides for all processes. All else follows from
    that, and from the tokens, which all have."""
    gain, plain = session.gain, list[Any]()
    for number, request in session.arrived:
        fields = request and [*request[:7], [*request.stop_ids], *request[8:]]
        plain.append((number, fields))
    told = share(json.dumps([plain, session.closed, gain is not None and gain.drafting]))
    arrived, session.closed, drafting = json.loads(told)
    session.arrived = [(n, request and Request(*request)) for n, request in arrived]
    if gain is not None:
        gain.drafting = drafting


def receive(session: Session) -> None:
    """Lets the requests in that have arrived, and drops those that were given up."""
    if jax.process_count() > 1:
        agree(session)
    arrived, session.arrived = session.arrived, []
    for number, request in arrived:
        if request is not None:
            session.waiting[number] = Work(number, request, list(request.prompt))
            continue
        session.waiting.pop(number, None)
        session.reading = {row: w for row, w in session.reading.items() if w.number != number}
        for work in session.read.values():
            work.ended = work.ended or work.number == number
        for slot in [slot for slot, work in session.running.items() if work.number == number]:
            release(session, slot)


def admit(session: Session) -> None:
    """Assigns waiting requests to data shards that read no prompt and have a free slot: strictly in
    the order in which they came, so none can starve. Of several such shards, a request goes to the
    one that holds the longest beginning of its prompt, or else to the one with the most free
    slots."""
    while session.waiting:
        taken = [slot // session.per_row for slot in session.running]
        rows = [row for row in range(session.rows) if row not in session.reading]
        rows = [row for row in rows if taken.count(row) < session.per_row]
        if not rows:
            return
        _, work = session.waiting.popitem(last=False)
        found = {row: find_beginning(session, row, work) for row in rows}
        row = max(rows, key=lambda row: (found[row][1], -taken.count(row)))
        begin(session, row, work, *found[row])


def read(session: Session, chunk: Chunk) -> None:
    """Dispatches a chunk of a prompt on each data shard. Shards take turns: the one that waits
    longest goes first, and those join it whose next chunk is like it. So how a prompt is read does
    not depend on the others."""
    together = {row: w for row, w in session.reading.items() if next_chunk(w) == chunk}
    read_chunk(session, together, chunk)
    for row, work in together.items():
        del session.reading[row]  # and back in, behind the others
        work.cached = min(work.cached + chunk.bucket, len(work.tokens))
        (session.read if work.cached == len(work.tokens) else session.reading)[row] = work
    if session.read:
        session.fresh = newest(session.prompts)


def book_first(session: Session) -> list[Event]:
    """Fetches the first tokens of the prompts that are complete."""
    with timed(session.stats, "prefill_s"):
        new, session.fresh = jax.tree.map(np.asarray, session.fresh), None
    if session.gain is not None:
        session.gain.left = min(session.gain.left, PROBE)  # a new text, another chance
    works = {row: work for row, work in session.read.items() if not work.ended}
    events = [event for row, work in works.items() for event in add(session, work, new, row)]
    if events and not session.stats.first_token_s:
        session.stats.first_token_s = time.perf_counter() - session.began
    return events


def decode(session: Session) -> None:
    """Dispatches a step of all running texts."""
    if session.running:
        session.ahead = generate(session)
        filled = sum(len(work.tokens) for work in session.running.values())
        session.stats.filled += filled / (session.slots * session.capacity)


def book(session: Session, behind: Ahead, began: float) -> list[Event]:
    """Fetches the tokens of a decode step. `began` is the time at which this step began."""
    stats, running, events = session.stats, session.running, list[Event]()
    # A step that was dispatched behind a chunk of a prompt had to wait for it.
    with timed(stats, "prefill_s" if behind.mixed else "decode_s"):
        new = jax.tree.map(np.asarray, behind.new)
    seconds = time.perf_counter() - began
    for slot in filter(running.get, behind.slots):
        events += add(session, running[slot], new, slot)
        if running[slot].ended:
            release(session, slot)
    stats.decode_tokens += len(events)
    if session.gain is not None and events and not behind.mixed and not session.reading:
        measure(session.gain, behind.drafted, seconds, len(events) / len(behind.slots))
    return events


def add(session: Session, work: Work, new: Any, row: int) -> list[Event]:
    """Adds the tokens of a row of `newest` to a request, up to its end."""
    (new_BT, scores), events, request = new, list[Event](), work.request
    drafted_T = new_BT.reshape(len(new_BT), -1)[row]
    tokens = drafted_T[drafted_T != NO_TOKEN].tolist()
    if work.made:
        session.stats.drafts += len(drafted_T) - 1
        session.stats.drafts_right += len(tokens) - 1
    for t, token in enumerate(tokens):
        first, finish = not work.made, None
        work.tokens.append(token)
        if token == INVALID:
            finish = "invalid"
        elif token in request.stop_ids:
            finish = "stop"
        # The newest token is not in the cache.
        elif work.made == request.max_new_tokens or len(work.tokens) > session.capacity:
            finish = "length"
        if request.logprobs is None:
            score, echo = None, list[Score]()
        elif first:
            *echo, score = work.scores
        else:
            score, echo = score_of(scores, row, t, request), []
        events.append(Event(work.number, token, finish, score, echo if request.echo else ()))
        if finish is not None:
            work.ended = True
            break
    return events


def serve(
    session: Session, requests: Sequence[Request], stop_ids: Collection[int] = ()
) -> Generator[Event, None, None]:
    """Yields the tokens of all requests as they are made, in a session that has no others. An
    event's `request` is an index into `requests`, which end with `stop_ids`, too. ValueError if a
    request cannot be served."""
    limit = session.model.config.max_position_embeddings
    for i, request in enumerate(requests):
        check_request(request, session.capacity, limit, f"prompt {i + 1}")
    requests = [r._replace(stop_ids={*r.stop_ids, *stop_ids}) for r in requests]
    numbers = {submit(session, request): i for i, request in enumerate(requests)}
    try:
        while is_busy(session):
            for event in step(session):
                yield event._replace(request=numbers[event.request])
    finally:  # also if the caller stops early
        for number in numbers:
            cancel(session, number)


def complete(
    model: Model,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int,
    slots: int = 8,
    seed: int = 0,
    stop: Sequence[str] = (),
    **sampling: Any,
) -> list[str]:
    """Returns the text that follows each prompt, up to any of the texts `stop`. A prompt is raw
    text, or ids such as those that `encode_chat` returns. Prompt i is sampled with seed
    (`seed` + i) mod 2**32. `sampling` sets further fields of `Request`."""
    if (tok := model.tokenizer) is None:
        raise ValueError("this model has no tokenizer: use `serve`, which takes and yields ids")
    ids = [encode(tok, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    need = max(map(len, ids), default=0) + max_new_tokens
    capacity = capacity_for(need, model.config.max_position_embeddings)
    slots = round_up(max(1, min(slots, len(ids))), model.mesh.shape[DATA])
    session, texts = start_session(model, slots, capacity), [""] * len(ids)
    streams = [stream_start(tok, stop=stop) for _ in ids]
    for i, prompt in enumerate(ids):
        known: Any = dict(stop_ids=tok.stop_ids, **sampling)
        submit(session, Request(prompt, max_new_tokens, seed=(seed + i) % 2**32, **known))
    while is_busy(session):
        for event in step(session):
            i, text = event.request, ""
            if event.finish not in ("stop", "invalid"):
                streams[i], text = stream_push(tok, streams[i], event.token)
            texts[i] += text + (stream_flush(tok, streams[i]) if event.finish else "")
            if streams[i].stopped:
                cancel(session, i)
    return texts

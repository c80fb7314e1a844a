"""The serving loop: requests in, tokens and their text out.

A session takes requests at any time (`submit`), gives them up (`cancel`), and does one step of work
(`step`), which returns what came of it. One thread does all of this.

Step t + 1 is dispatched before step t's tokens are fetched, so host work overlaps device work.
"""

import json
import time
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any

import jax
import numpy as np

from common.machines.hosts import share
from common.sampling import INVALID
from common.serving.drafts import pays
from common.serving.kept import begin, find_beginning, release, settle
from common.serving.load import Model
from common.serving.session import (
    PROMPT_CHUNK,
    Ahead,
    Chunk,
    Counts,
    Event,
    Request,
    Session,
    Work,
    capacity_for,
    check_request,
    empty_others,
    generate,
    next_chunk,
    publish,
    read_chunk,
    score_of,
    start_session,
    timed,
)
from common.sharding import DATA, round_up
from common.speculate import NO_DRAFT, NO_TOKEN
from common.text.harmony import say, start_speech
from common.text.tokenizer import encode, stream_flush

LEAST_COST = PROMPT_CHUNK // 4  # a read of fewer tokens takes as long: it reads all weights


def submit(session: Session, request: Request) -> int:
    """Adds a request. Returns its number, which its events carry. ValueError if it cannot be
    served."""
    check_request(request, session.capacity, session.model.config)
    if request.logprobs is not None and not session.logprobs:
        raise ValueError("this session gives no log-probabilities")
    session.began = session.began or time.perf_counter()
    own = request._replace(prompt=[*map(int, request.prompt)])  # the caller may change the list
    session.arrived.append((session.ids, own))
    session.ids += 1
    return session.ids - 1


def cancel(session: Session, number: int) -> None:
    """Gives up a request, if it has not ended. There will be no more events of it, and its slot is
    free before the next step."""
    session.arrived.append((number, None))


def is_busy(session: Session) -> bool:
    """Whether `step` has anything to do."""
    s = session
    return bool(s.arrived or s.works or s.read or s.running)


def step(session: Session) -> list[Event]:
    """Does one step of work: reads a chunk of prompts, or decodes a token of every running text.
    Returns the tokens that became ready.

    Between two steps of decoding, prompts of at most PROMPT_CHUNK tokens are read. So no running
    text ever waits for more than one chunk, and no prompt waits for ever.
    """
    began = time.perf_counter()
    receive(session)
    first, session.first = session.first, None
    if first is not None:
        return book(session, first, began)
    drop_ended(session)
    with timed(session.stats, "prefill_s"):
        settle(session)
    drop_ended(session)  # a text may end with its first token
    admit(session)
    behind, session.ahead = session.ahead, None
    chunk = next_chunk(next(iter(session.reading.values()))) if session.reading else None
    cost = max(chunk.bucket, LEAST_COST) if chunk else 0
    if chunk and (cost <= session.budget or not session.running):
        session.budget -= cost
        read(session, chunk)
    else:
        session.budget = PROMPT_CHUNK
        decode(session)
    return book(session, behind, began) if behind else []


def close(session: Session) -> None:
    """Tells the other processes, at the next step, that no more requests will come."""
    session.closed = True


def agree(session: Session) -> None:
    """Replaces this process's new requests, cancellations and flags by those of process 0. All
    later decisions follow from these and from the tokens, so all processes decide alike."""
    arrived = [(n, r and r._replace(stop_ids=[*r.stop_ids])) for n, r in session.arrived]
    told = json.loads(share(json.dumps([arrived, session.closed, session.drafting])))
    arrived, session.closed, session.drafting = told
    session.arrived = [(n, r and Request(*r)) for n, r in arrived]


def receive(session: Session) -> None:
    """Lets the requests in that have arrived, and drops those that were given up."""
    session.drafting = session.gain is None or pays(session.gain)
    if jax.process_count() > 1:
        agree(session)
    arrived, session.arrived = session.arrived, []
    for number, request in arrived:
        if request is not None:
            prompt, tok = [*request.prompt], session.model.tokenizer
            speech = tok and start_speech(tok, prompt, request.is_chat, request.stop)
            session.works[number] = work = Work(number, request, prompt, speech)
            session.waiting.append(work)
        elif (given_up := session.works.pop(number, None)) is not None:
            given_up.ended = True
    if any(request is None for _, request in arrived):
        session.waiting = deque(work for work in session.waiting if not work.ended)
    session.reading = {row: work for row, work in session.reading.items() if not work.ended}


def drop_ended(session: Session) -> None:
    """Frees the slots of requests that have ended."""
    ended = [slot for slot, work in session.running.items() if work.ended]
    for slot in ended:
        release(session, slot)
    if ended:
        empty_others(session, session.running)


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
        work = session.waiting.popleft()
        found = {row: find_beginning(session, row, work) for row in rows}
        row = max(rows, key=lambda row: (found[row][1], -taken.count(row)))
        begin(session, row, work, *found[row])


def read(session: Session, chunk: Chunk) -> None:
    """Dispatches one program that reads a chunk of a prompt on the shard that has waited longest.
    All shards whose next chunk is equal to `chunk` take part. So the chunks in which a prompt is
    read do not depend on the other prompts."""
    together = {row: w for row, w in session.reading.items() if next_chunk(w) == chunk}
    stats, model = session.stats, session.model
    if model.on_cpu:  # otherwise compiling for this chunk would hide the time of the one before
        with timed(stats, "prefill_s"):
            jax.block_until_ready(session.prompts[0].token_B)
    before, compiled_s = sum(w.cached for w in together.values()), stats.compile_s
    with timed(stats, "prefill_s"):
        read_chunk(session, together, chunk)
        for row, work in together.items():
            del session.reading[row]  # and back in, behind the others
            (session.read if work.cached == len(work.tokens) else session.reading)[row] = work
        if session.read:
            session.first = Ahead(publish((session.prompts[0].token_B, None)), {**session.read})
    # A call for several CPU devices ends when they have computed, so a compilation hides that.
    if stats.compile_s == compiled_s or not model.on_cpu or model.mesh.size == 1:
        stats.prefill_timed += sum(w.cached for w in together.values()) - before


def decode(session: Session) -> None:
    """Dispatches a step of all running texts."""
    if session.running:
        with timed(session.stats, "decode_s"):
            session.ahead = generate(session)
        filled = sum(len(work.tokens) for work in session.running.values())
        session.stats.filled += filled / (session.slots * session.capacity)


def book(session: Session, behind: Ahead, began: float) -> list[Event]:
    """Fetches tokens. `began` is the time at which this step began."""
    stats, gain, events = session.stats, session.gain, list[Event]()
    # What was dispatched behind a chunk of a prompt had to wait for it.
    with timed(stats, "prefill_s" if behind.mixed else "decode_s"):
        new = jax.tree.map(np.asarray, behind.new)
    seconds = time.perf_counter() - began
    for row, work in behind.works.items():
        events += [] if work.ended else add(session, work, new, row)
    if events and not stats.first_token_s:
        stats.first_token_s = time.perf_counter() - session.began
    if events and gain is not None and not behind.mixed and not session.reading:
        gain.past[behind.drafted].append((len(events) / len(behind.works), seconds))
        gain.steps += 1
    return events


def add(session: Session, work: Work, new: Any, row: int) -> list[Event]:
    """Adds the tokens of a row to a request, up to its end."""
    (new_BT, scores), events, request = new, list[Event](), work.request
    drafted_T = new_BT.reshape(len(new_BT), -1)[row]
    tokens, stats = drafted_T[~np.isin(drafted_T, (NO_TOKEN, NO_DRAFT))].tolist(), session.stats
    if work.made:
        count(session, work, drafts=int((drafted_T[1:] != NO_DRAFT).sum()))
    for t, token in enumerate(tokens):
        is_first = not work.made
        count(session, work, right=min(t, 1))  # unless t is 0, it follows a draft that was right
        work.tokens.append(token)
        stats.decode_tokens += not is_first
        event = end_of(session, work, Event(work.number, token, counts=work.counts))
        if request.logprobs is not None and is_first:
            *echo, score = work.scores
            event = event._replace(score=score, echo=echo if request.echo else ())
        elif request.logprobs is not None:
            event = event._replace(score=score_of(scores, row, t, request))
        events.append(event)
        if event.finish is not None:
            work.ended = True
            del session.works[work.number]
            break
    return events


def count(session: Session, work: Work, drafts: int = 0, right: int = 0) -> None:
    """Counts drafts of a request, and those that became part of its reply."""
    session.stats.drafts += drafts
    session.stats.drafts_right += right
    cached, earlier, earlier_right = work.counts
    work.counts = Counts(cached, earlier + drafts, earlier_right + right)


def end_of(session: Session, work: Work, event: Event) -> Event:
    """The event of a request's newest token, with its text, and whether the reply ends there."""
    tok, finish, request, text = session.model.tokenizer, None, work.request, ""
    if event.token == INVALID:
        finish = "invalid"
    elif event.token in request.stop_ids:
        finish = "stop"
    # The newest token is not in the cache.
    elif work.made == request.max_new_tokens or len(work.tokens) > session.capacity:
        finish = "length"
    if tok is None or work.speech is None:
        return event._replace(finish=finish)
    if finish in (None, "length"):
        work.speech, text = say(tok, work.speech, event.token)
        finish = "stop" if work.speech.stream.stopped else finish
    text += stream_flush(tok, work.speech.stream) if finish else ""
    return event._replace(finish=finish, text=text, channel=work.speech.channel)


def serve(session: Session, requests: Sequence[Request]) -> Generator[Event, None, None]:
    """Yields the tokens of all requests as they are made, in a session that has no others. An
    event's `request` is an index into `requests`. ValueError if a request cannot be served."""
    for i, request in enumerate(requests):
        check_request(request, session.capacity, session.model.config, f"prompt {i + 1}")
    numbers = dict[int, int]()
    try:
        for i, request in enumerate(requests):
            numbers[submit(session, request)] = i
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
    **settings: Any,
) -> list[str]:
    """Returns the text that follows each prompt. A prompt is raw text, or ids such as those that
    `encode_chat` returns. Prompt i is sampled with seed (`seed` + i) mod 2**32. `settings` sets
    further fields of `Request`."""
    if (tok := model.tokenizer) is None:
        raise ValueError("this model has no tokenizer: use `serve`, which takes and yields ids")
    ids = [encode(tok, prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    need = max(map(len, ids), default=0) + max_new_tokens
    capacity = capacity_for(need, model.config.max_position_embeddings)
    slots = round_up(max(1, min(slots, len(ids))), model.mesh.shape[DATA])
    known: Any = dict(stop_ids=tok.stop_ids) | settings
    requests = [
        Request(prompt, max_new_tokens, seed=(seed + i) % 2**32, **known)
        for i, prompt in enumerate(ids)
    ]
    texts = [""] * len(ids)
    for event in serve(start_session(model, slots, capacity), requests):
        texts[event.request] += event.text
    return texts

"""The serving loop: requests in, tokens and their text out.

A session takes requests at any time (`submit`), gives them up (`cancel`), and does one step of work
(`step`), which returns what came of it. One thread does all of this.

Step t + 1 is dispatched before step t's tokens are fetched, so host work overlaps device work.
"""

import json
import time
from collections.abc import Generator, Mapping, Sequence
from numbers import Integral
from operator import index
from typing import Any

import jax
import numpy as np

from common.machines.hosts import share
from common.sampling import INVALID, WHY_INVALID
from common.serving import steps
from common.serving.load import Model
from common.serving.prefixes import Text, longest
from common.serving.rules import check_grammar, start_guide, vocabulary_of
from common.serving.score import score_of
from common.serving.session import (
    PROMPT_CHUNK,
    Ahead,
    Counts,
    Event,
    Request,
    Session,
    Work,
    capacity_for,
    check_request,
    start_session,
    timed,
)
from common.sharding import DATA, round_up
from common.speculate import NO_DRAFT, NO_TOKEN
from common.text.reply import end_speech, say, start_speech
from common.text.tokenizer import encode

# Tokens. A read of fewer takes as long as a read of this many, because both read all weights.
LEAST_COST = PROMPT_CHUNK // 4


def submit(session: Session, request: Request) -> int:
    """Adds a request. Returns its number, which its events carry. ValueError if it is refused."""
    check_request(request, session.capacity, session.model.config)
    if request.logprobs is not None and not session.logprobs:
        raise ValueError("this session gives no log-probabilities")
    if request.stop and session.model.tokenizer is None:
        raise ValueError("stop needs a tokenizer, and this model has none")
    if request.is_ruled and hasattr(session.states[0], "new_BT"):
        raise ValueError("--draft mtp goes with no grammar, no bias and no penalty")
    if request.grammar is not None:
        check_grammar(session.model, request.grammar)
    session.began = session.began or time.perf_counter()
    # Copies, because the caller may change what was given; and lists, because JSON has no sets.
    own = request._replace(prompt=[*map(int, request.prompt)], stop_ids=[*request.stop_ids])
    own = own._replace(logit_bias=[*dict(request.logit_bias).items()])
    if tok := session.model.tokenizer:  # a special token has no text in the reply
        ends = tok.special_ids & {tok.backend.token_to_id(text) for text in request.stop}
        own = own._replace(stop_ids=[*own.stop_ids, *ends])
    session.arrived.append((session.ids, own))
    session.ids += 1
    return session.ids - 1


def cancel(session: Session, number: int) -> None:
    """Gives up a request: no more events come of it, and its slot is free before the next step."""
    session.arrived.append((number, None))


def is_busy(session: Session) -> bool:
    """Whether `step` has anything to do."""
    return bool(session.arrived or session.works or session.read or session.running)


def step(session: Session) -> list[Event]:
    """Reads a chunk of prompts, or decodes a token of every running text. Returns the new tokens.
    Between two steps of decoding, prompts of at most PROMPT_CHUNK tokens are read. So no running
    text ever waits for more than one chunk, and no prompt waits for ever."""
    receive(session)
    behind, session.ahead = session.ahead, None
    # First tokens need not wait for what is dispatched next, and a grammar needs its newest token.
    if behind and (session.read or any(work.guide for work in behind.works.values())):
        return book(session, behind)
    with timed(session.stats, "prefill_s"):
        steps.settle(session)
    steps.drop_ended(session)
    admit(session)
    first = next(iter(session.reading.values()), None)
    cost = max(steps.bucket_for(first.left), LEAST_COST) if first else 0
    if first and (cost <= session.budget or not session.running):
        session.budget -= cost
        steps.prefill(session)
    else:
        session.budget = PROMPT_CHUNK
        if session.running:
            steps.generate(session)
    return book(session, behind) if behind else []


def close(session: Session) -> None:
    """Tells the other processes, at the next step, that no more requests will come."""
    session.closed = True


def receive(session: Session) -> None:
    """Lets the requests in that have arrived, and drops those that were given up. If there are
    several processes, these and the flags are those of process 0. All later decisions follow from
    them and from the tokens, so all processes decide alike."""
    told: Any = session.arrived, session.closed
    if jax.process_count() > 1:
        told = json.loads(share(json.dumps(told)))
    arrived, session.closed = told
    session.arrived = []
    for number, fields in arrived:
        if fields is not None:
            request = Request(*fields)
            prompt, tok = [*request.prompt], session.model.tokenizer
            settings = request.is_chat, request.stop, request.keep_special
            speech = tok and start_speech(tok, prompt, *settings)
            guide = request.grammar and start_guide(vocabulary_of(session.model), request.grammar)
            work = Work(number, request, prompt, speech, Text(salt=request.cache_salt), guide=guide)
            session.works[number] = session.waiting[number] = work
        else:
            session.works.pop(number, None)
            session.waiting.pop(number, None)
    session.reading = {row: x for row, x in session.reading.items() if x.number in session.works}


def admit(session: Session) -> None:
    """Assigns waiting requests, in the order in which they came, so none can starve, to data shards
    that read no prompt and have a free slot. Of several, a request goes to the one that holds the
    longest beginning of its prompt, or else to the one with the most free slots."""
    while session.waiting:
        taken = [slot // session.per_row for slot in session.running]
        free = [row for row in range(session.rows) if taken.count(row) < session.per_row]
        rows = [row for row in free if row not in session.reading]
        if not rows:
            return
        work = session.waiting.pop(next(iter(session.waiting)))
        # The last token is read for its logits, and all are if the prompt is scored.
        tokens = [] if work.request.echo else work.tokens[:-1]
        found = {row: longest(session.prefixes[row], tokens, work.text.salt) for row in rows}
        row = max(rows, key=lambda row: (found[row][1], -taken.count(row)))
        steps.begin(session, row, work, *found[row])


def book(session: Session, behind: Ahead) -> list[Event]:
    """Fetches tokens."""
    stats, events = session.stats, list[Event]()
    # What was dispatched behind a chunk of a prompt had to wait for it.
    with timed(stats, "prefill_s" if behind.mixed else "decode_s"):
        new = jax.tree.map(np.asarray, behind.new)
    for row, work in behind.works.items():
        events += add(session, work, new, row) if work.number in session.works else []
    if events and not stats.first_token_s:
        stats.first_token_s = time.perf_counter() - session.began
    return events


def add(session: Session, work: Work, new: Any, row: int) -> list[Event]:
    """Adds the tokens of a row to a request, up to its end."""
    (new_BT, scores), events, request, stats = new, list[Event](), work.request, session.stats
    drafted_T = new_BT.reshape(len(new_BT), -1)[row]
    tokens = drafted_T[~np.isin(drafted_T, (NO_TOKEN, NO_DRAFT))].tolist()
    drafts = int((drafted_T[1:] != NO_DRAFT).sum()) if work.made else 0
    stats.drafts, before = stats.drafts + drafts, work.counts
    for t, token in enumerate(tokens):  # each token but the first shows that a draft was right
        is_first = not work.made
        work.counts = Counts(before.cached, before.drafts + drafts, before.drafts_right + t)
        work.tokens.append(token)
        work.text.written = max(work.text.written, len(work.tokens))
        stats.decode_tokens += not is_first
        stats.drafts_right += min(t, 1)
        event = end_of(session, work, Event(work.number, token, counts=work.counts))
        if request.logprobs is not None and is_first:
            *echo, score = work.scores
            event = event._replace(score=score, echo=echo if request.echo else ())
        elif request.logprobs is not None:
            event = event._replace(score=score_of(scores, row, t, request.logprobs))
        events.append(event)
        if event.finish is not None:
            del session.works[work.number]
            break
    return events


def end_of(session: Session, work: Work, event: Event) -> Event:
    """The event of a request's newest token, with its text, and whether the reply ends there."""
    tok, request, guide, text = session.model.tokenizer, work.request, work.guide, ""
    # The newest token is not in the cache.
    is_full = work.made == request.max_new_tokens or len(work.tokens) > session.capacity
    finish = "length" if is_full else None
    if event.token == INVALID:
        finish = "invalid"
    elif event.token in request.stop_ids:
        finish = "stop"
    elif guide and not guide.consume_token(event.token):
        finish = "invalid"  # it has grown too large
    elif tok and work.speech:
        work.speech, text = say(tok, work.speech, event.token)
        if work.speech.stream.stopped or (guide and guide.is_stopped()):
            finish = "stop"
    if tok is None or work.speech is None:
        return event._replace(finish=finish)
    text += end_speech(tok, work.speech) if finish else ""
    return event._replace(finish=finish, text=text, channel=work.speech.channel)


def serve(session: Session, requests: Sequence[Request]) -> Generator[Event, None, None]:
    """Yields the tokens of all requests as they are made, in a session that has no others. An
    event's `request` is an index into `requests`. ValueError if a request cannot be served."""
    given_up = {number for number, request in session.arrived if request is None}
    if ({*session.works} | {number for number, _ in session.arrived}) - given_up:
        raise ValueError("this session has other requests: use step, or wait for their end")
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
    """Returns the text that follows each prompt: raw text, or ids, as of `encode_chat`. Prompt i is
    sampled with seed (`seed` + i) mod 2**32. `settings` sets further fields of `Request`. A text is
    shorter if the model's context is full. ValueError if a reply ends as invalid: see `Event`."""
    given = [*prompts]
    if isinstance(prompts, str | Mapping) or any(isinstance(x, Integral) for x in given):
        raise TypeError("complete takes a list of prompts, and each is a text or a list of ids")
    if (tok := model.tokenizer) is None:
        raise ValueError("this model has no tokenizer: use `serve`, which takes and yields ids")
    if any(map(settings.get, ("top_k", "top_p", "min_p"))) and not settings.get("temperature"):
        raise ValueError("top_k, top_p and min_p need a temperature above 0")
    ids = [encode(tok, prompt) if isinstance(prompt, str) else prompt for prompt in given]
    need = max(map(len, ids), default=0) + index(max_new_tokens)
    capacity = capacity_for(need, model.config.max_position_embeddings)
    slots = round_up(min(slots, max(1, len(ids))), model.mesh.shape[DATA])
    own: Any = dict(stop_ids=tok.stop_ids, max_new_tokens=max_new_tokens) | settings
    requests = [Request(x, seed=(index(seed) + i) % 2**32, **own) for i, x in enumerate(ids)]
    texts = [""] * len(ids)
    for event in serve(start_session(model, slots, capacity), requests):
        if event.finish == "invalid":
            raise ValueError(f"prompt {event.request + 1}: {WHY_INVALID}")
        texts[event.request] += event.text
    return texts

"""Shows replies as they come, from tokens to text, for prompts and for conversations.

stdout carries the text (or, with --json, one record per prompt) and nothing else.
"""

import argparse
import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, TextIO

from common.serving.load import Model
from common.serving.serve import cancel, is_busy, step, submit
from common.serving.session import Event, Request, Session
from common.text.harmony import ANALYSIS, FINAL, Place, follow, speaks_harmony
from common.text.tokenizer import (
    Stream,
    Tokenizer,
    encode,
    encode_chat,
    stream_flush,
    stream_push,
    stream_start,
)

Write = Callable[[str], None]
WAIT_S = 3.0  # seconds of waiting for standard input before a note says so
PROGRESS_S = 10.0  # seconds between notes of how many prompts are answered


def read_prompts(args: argparse.Namespace) -> list[str]:
    """Returns the texts to answer, from --prompt, --prompts or standard input."""
    prompts = list(args.prompt or [])
    if args.prompts:
        with open(args.prompts, encoding="utf-8-sig") as file:  # without a byte-order mark
            text = read_utf8(file, str(args.prompts))
        # Not splitlines, which also cuts at form feeds and at separators such as U+2028.
        prompts += [line for line in text.split("\n") if line.strip()]
    if not prompts and not args.prompts and not sys.stdin.isatty():
        prompts = [text] if (text := read_stdin()).strip() else []
    if not prompts and not args.prompts and args.ckpt is None:
        prompts = ["ACT I.\n\n"]
    if not prompts:
        raise ValueError(
            "no prompt: give --prompt, --prompts FILE, --chat, or text on standard input"
        )
    return prompts


def read_utf8(file: TextIO, name: str) -> str:
    try:
        return file.read()
    except UnicodeDecodeError:
        raise ValueError(f"{name} is not UTF-8 text") from None


def read_stdin() -> str:
    """Reads all of standard input. If that takes long, notes that the command is waiting."""
    note = threading.Timer(WAIT_S, sys.stderr.write, ["[waiting for a prompt on standard input]\n"])
    note.daemon = True
    note.start()
    try:
        return read_utf8(sys.stdin, "standard input").removeprefix("\ufeff")
    finally:
        note.cancel()


def encode_prompt(model: Model, args: argparse.Namespace, text: str) -> list[int]:
    """Encodes one prompt, through the chat template if the checkpoint has one."""
    tok, vocab_size = model.tokenizer, model.config.vocab_size
    if tok is None:  # random weights of a lone config: any ids will do
        return [byte % vocab_size for byte in text.encode()]
    if args.raw or tok.chat_template is None:
        if args.system:
            raise ValueError(
                "--system needs a chat template: this checkpoint has none, or --raw was given"
            )
        ids = encode(tok, text)
    else:
        ids = encode_chat(tok, messages(args, [("user", text)]))
    if max(ids, default=0) >= vocab_size:
        raise ValueError(f"the tokenizer made id {max(ids)}, but the model has {vocab_size}")
    return ids


def messages(args: argparse.Namespace, turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    system = [("system", args.system)] if args.system else []
    return [{"role": role, "content": content} for role, content in (*system, *turns)]


def make_request(
    args: argparse.Namespace, tok: Tokenizer | None, ids: Sequence[int], index: int
) -> Request:
    stop_ids = tok.stop_ids if tok else ()
    knobs = (args.temperature, args.top_k, args.top_p, args.min_p, (args.seed + index) % 2**32)
    return Request(ids, args.max_new_tokens, *knobs, stop_ids)


class Reply(NamedTuple):
    """The reply to one prompt so far."""

    tokens: list[int]
    text: list[str]  # all that is shown
    answer: list[str]  # the text without the analysis before it
    stream: Stream | None  # None without a tokenizer
    finish: str | None = None
    seconds: float = 0.0  # from the start of the run to its newest token
    place: Place | None = None  # None if the reply has no channels
    shown: str | None = None  # the channel of the newest text


def start_reply(
    tok: Tokenizer | None, args: argparse.Namespace, context: Sequence[int] = ()
) -> Reply:
    """Returns an empty reply. If its text continues the prompt, `context` is the prompt."""
    if tok is None:
        return Reply([], [], [], None)
    chat = tok.chat_template is not None and not args.raw
    place = Place() if chat and speaks_harmony(tok) else None
    return Reply([], [], [], stream_start(tok, context, stop=args.stop), place=place)


def extend(
    tok: Tokenizer | None, reply: Reply, event: Event, seconds: float, args: argparse.Namespace
) -> tuple[Reply, str]:
    """Adds a token to a reply; returns the reply, and the text to show for the token. The reply may
    be finished by a text of --stop, and its request is not."""
    stream, place, text = reply.stream, reply.place, ""
    channel: str | None = FINAL if place is None else place.channel
    if event.finish == "invalid":  # this event has no token
        text = stream_flush(tok, stream) if tok and stream else ""
    elif tok is None or stream is None:
        text = f"{event.token} "
    else:
        if event.token not in tok.stop_ids:
            if place is not None:
                place, channel = follow(tok, place, event.token)
            if channel == FINAL or (channel == ANALYSIS and args.show_analysis):
                stream, text = stream_push(tok, stream, event.token)
        if event.finish:
            text += stream_flush(tok, stream)
    shown = channel if text else reply.shown
    if channel == FINAL:
        reply.answer.append(text)
    if reply.shown not in (None, shown):
        text = f"\n\n{text}"
    if event.finish != "invalid":
        reply.tokens.append(event.token)
    reply.text.append(text)
    finish = "stop" if stream is not None and stream.stopped else event.finish
    new: Any = dict(stream=stream, finish=finish, seconds=seconds, place=place, shown=shown)
    return reply._replace(**new), text


def note_end(reply: Reply, max_new_tokens: int) -> None:
    """Says on stderr why a reply ended, unless it ended by itself or at --max-new-tokens."""
    if reply.finish == "invalid":
        sys.stderr.write("[the reply ends here: the model's logits are NaN or infinite]\n")
    if reply.finish == "length" and len(reply.tokens) < max_new_tokens:
        sys.stderr.write("[the reply ends here: its slot is full (see --max-len)]\n")
    if reply.place is not None and reply.finish == "length" and not any(reply.answer):
        sys.stderr.write("[no answer: the analysis before it took all of --max-new-tokens]\n")


@contextlib.contextmanager
def interruptible() -> Iterator[list[int]]:
    """Yields a list that gets the signal on Ctrl-C or SIGTERM. A second one interrupts at once."""
    pressed: list[int] = []
    signals = (signal.SIGINT, signal.SIGTERM)

    def handler(number: int, *_: Any) -> None:
        pressed.append(number)
        for number in signals:
            signal.signal(number, signal.default_int_handler)

    before = [(number, signal.signal(number, handler)) for number in signals]
    try:
        yield pressed
    finally:
        for number, old in before:
            signal.signal(number, old)


class Job(NamedTuple):
    """Prompts that were read and checked, with their requests."""

    texts: list[str]
    requests: list[Request]


def record(job: Job, i: int, reply: Reply) -> str:
    """Returns one line of JSON about prompt i."""
    fields = {
        "index": i,
        "prompt": job.texts[i],
        "text": "".join(reply.text),
        "prompt_tokens": len(job.requests[i].prompt),
        "tokens": reply.tokens,
        "finish_reason": reply.finish or "interrupted",
        "seconds": round(reply.seconds, 4),
    }
    return json.dumps(fields, ensure_ascii=False) + "\n"


def note_progress(replies: Sequence[Reply], told: float) -> float:
    """Says on a terminal, every PROGRESS_S seconds, how many prompts are answered. `told` is the
    time at which it last did so; returns the new one."""
    if (now := time.perf_counter()) - told < PROGRESS_S or not sys.stderr.isatty():
        return told
    done = sum(reply.finish is not None for reply in replies)
    sys.stderr.write(f"[{done} of {len(replies)} prompts answered]\n")
    return now


def events_of(
    session: Session, requests: Sequence[Request], replies: list[Reply]
) -> Generator[Event, None, None]:
    """Yields the tokens of requests as they are made, each with an index into `requests`. Gives up
    a request when its reply is finished, and all of them when the caller stops."""
    numbers = {submit(session, request): i for i, request in enumerate(requests)}
    try:
        while is_busy(session):
            for event in step(session):
                i = numbers[event.request]
                if replies[i].finish is None:
                    yield event._replace(request=i)
                if replies[i].finish is not None and event.finish is None:
                    cancel(session, event.request)
    finally:
        for number in numbers:
            cancel(session, number)


def answer_prompts(session: Session, args: argparse.Namespace, job: Job, write: Write) -> bool:
    """Answers all prompts, and writes the answers in their order. Returns True if interrupted."""
    tok, requests = session.model.tokenizer, job.requests
    raw = tok is not None and (args.raw or tok.chat_template is None)
    replies = [start_reply(tok, args, r.prompt if raw else ()) for r in requests]
    shown, began = 0, time.perf_counter()
    told = began
    events = events_of(session, requests, replies)
    with interruptible() as pressed, contextlib.closing(events):
        for event in events:
            i, seconds = event.request, time.perf_counter() - began
            replies[i], text = extend(tok, replies[i], event, seconds, args)
            if i == shown and not args.json:
                write(text)
            while shown < len(replies) and replies[shown].finish:
                write(record(job, shown, replies[shown]) if args.json else "\n")
                note_end(replies[shown], args.max_new_tokens)
                shown += 1
                if shown < len(replies) and not args.json:
                    # An empty line between answers; then the text of the next one so far.
                    write("\n" + "".join(replies[shown].text))
            if len(replies) > session.slots:
                told = note_progress(replies, told)
            if pressed:
                break
    for i in range(shown, len(replies)):  # interrupted
        if args.json:
            write(record(job, i, replies[i]))
        elif replies[i].tokens:
            write("\n" if i == shown else "\n" + "".join(replies[i].text) + "\n")
    return bool(pressed)


def converse(session: Session, args: argparse.Namespace, job: Job, write: Write) -> bool:
    """Holds a conversation on one slot; every turn reads only what is not cached yet. Ctrl-C ends a
    turn. Returns True if SIGTERM ended the conversation."""
    tok, turns = session.model.tokenizer, list[tuple[str, str]]()
    assert tok is not None
    while True:
        if sys.stdin.isatty():
            sys.stderr.write("> ")
            sys.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            return False
        if not line.strip():
            continue
        turns.append(("user", line.strip()))
        ids = encode_chat(tok, messages(args, turns))
        if len(ids) > session.capacity:
            have = f"the conversation has {len(ids)} tokens"
            raise ValueError(f"{have}, more than the cache's {session.capacity} (see --max-len)")
        replies, request = [start_reply(tok, args)], make_request(args, tok, ids, len(turns) // 2)
        events = events_of(session, [request], replies)
        with interruptible() as pressed, contextlib.closing(events):
            for event in events:
                replies[0], text = extend(tok, replies[0], event, 0.0, args)
                write(text)
                if pressed:
                    break
        write("\n")
        note_end(replies[0], args.max_new_tokens)
        turns.append(("assistant", "".join(replies[0].answer)))
        if signal.SIGTERM in pressed:
            return True

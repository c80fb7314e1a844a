"""Measures what a session gains on this machine by beginnings that are kept, by drafts, and by
reading prompts in chunks.

    python -m benchmarks.serving --model llama3 --ckpt DIR [--only prefix users drafts differ waits]

`prefix` times the first token of a prompt whose first 4,096 tokens were read before, and whose last
64 are new. With --against FILE.gguf it times llama.cpp too, which keeps the cache of its last
prompt. `users` runs 16 conversations of 8 turns on 4 slots. `drafts` decodes one text at a time, in
turns with and without drafts. `differ` counts the texts that drafts change. `waits` measures the
pauses of a running text while a long prompt arrives. Times of several rounds are medians.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import model_file
from benchmarks.prompts import PROMPTS, SAMPLED
from benchmarks.worker import prompt_ids
from common.command.cli import mistakes_on_one_line
from common.command.environment import configure_jax
from common.fields import with_layers
from common.serving.load import Model, load
from common.serving.serve import cancel, is_busy, serve, step, submit
from common.serving.session import Request, Session, Stats, start_session
from common.text.chat import encode_chat

SHARED, OWN = 4096, 64
USERS, TURNS, QUESTION, ANSWER = 16, 8, 48, 24
NEW = 256


def first_token(session: Session, prompt: list[int]) -> float:
    """The seconds to the first token."""
    began = time.perf_counter()
    number = submit(session, Request(prompt, 2))
    while not step(session):
        pass
    seconds = time.perf_counter() - began
    cancel(session, number)
    step(session)
    return seconds


def prefix(model: Model, args: argparse.Namespace) -> Iterator[str]:
    """Rows of a table: the seconds to the first token, and what share of reading all that is."""
    size, rng = model.config.vocab_size, np.random.default_rng(0)
    shared, rows = prompt_ids(0, SHARED, size), dict[str, list[float]]()
    on_device, on_host = (
        start_session(model, 2, 2 * SHARED, **options)
        for options in (dict(keep=2), dict(keep_host=1.0))
    )

    def own(count: int = OWN) -> list[int]:
        return rng.integers(1, size, count).tolist()

    for i in range(args.rounds + 1):
        seconds = {"all is read": first_token(on_device, own(SHARED + OWN))}
        first_token(on_device, shared + own())
        seconds["the beginning is in a slot"] = first_token(on_device, shared + own())
        first_token(on_host, shared + own())
        for session in (on_device, on_host):
            for _ in range(2):  # both slots are needed for something else
                first_token(session, own(600))
        seconds["it is kept in device memory"] = first_token(on_device, shared + own())
        seconds["it is kept in host memory"] = first_token(on_host, shared + own())
        for what, value in seconds.items() if i else ():  # the first round compiles
            rows.setdefault(what, []).append(value)
    if args.against:
        rows |= of_llama_cpp(args, shared, rng)
    yield "| prompt of 4,160 tokens, 4,096 of them shared | first token after, s | of reading all |"
    yield "|---|---|---|"
    for what, values in rows.items():
        whole = rows["llama.cpp, all is read" if "llama.cpp" in what else "all is read"]
        yield f"| {what} | {median(values):.3f} | {median(values) / median(whole):.3f} |"


def of_llama_cpp(args: argparse.Namespace, shared: list[int], rng: Any) -> dict[str, list[float]]:
    """The same for llama.cpp, from a GGUF file of the checkpoint."""
    from llama_cpp import Llama

    llama = Llama(str(args.against), n_ctx=2 * SHARED, n_threads=2, verbose=False)
    rows = dict[str, list[float]]()
    for _ in range(args.rounds):
        for what in ("llama.cpp, all is read", "llama.cpp, the beginning is in its cache"):
            if what.endswith("read"):
                llama.reset()
            began = time.perf_counter()
            next(llama.generate(shared + rng.integers(1, 40_000, OWN).tolist(), temp=0.0))
            rows.setdefault(what, []).append(time.perf_counter() - began)
    return rows


def users(model: Model, args: argparse.Namespace) -> Iterator[str]:
    """Rows of a table: conversations of 16 users, whose turns come in a random order."""
    yield f"| {USERS} users, {TURNS} turns, 4 slots | prompt tokens read | of all | seconds |"
    yield "|---|---|---|---|"
    for what, options in {
        "nothing kept": dict(),
        "12 kept slots": dict(keep=12),
        "host memory": dict(keep_host=4.0),
    }.items():
        session = start_session(model, 4, 1024, reuse_multiple=1, **options)
        for seed in (1, 2):  # the first time compiles
            session.stats, began = Stats(), time.perf_counter()
            converse(session, np.random.default_rng(seed))
            seconds = time.perf_counter() - began
        stats = session.stats
        share = stats.prefill_tokens / (stats.prefill_tokens + stats.cached_tokens)
        yield f"| {what} | {stats.prefill_tokens:,} | {share:.2f} | {seconds:.1f} |"


def converse(session: Session, rng: Any) -> None:
    """Each user asks again when the answer has come."""
    size = session.model.config.vocab_size
    system = rng.integers(1, size, QUESTION).tolist()
    texts, turns = [list(system) for _ in range(USERS)], [0] * USERS
    asking, waiting = dict[int, int](), list(range(USERS))
    while waiting or is_busy(session):
        while waiting and len(asking) < 8:
            user = waiting.pop(int(rng.integers(len(waiting))))
            texts[user] += rng.integers(1, size, QUESTION).tolist()
            asking[submit(session, Request(list(texts[user]), ANSWER))] = user
            turns[user] += 1
        for event in step(session):
            user = asking[event.request]
            texts[user].append(event.token)
            if event.finish:
                del asking[event.request]
                waiting += [user] if turns[user] < TURNS else []


def drafts(model: Model, args: argparse.Namespace) -> Iterator[str]:
    """Rows of a table: tokens per second with drafts, and how many times as many that is."""
    half = with_layers(model.config, model.config.num_hidden_layers // 4)
    weights = model.weights._replace(layers=model.weights.layers[: half.num_hidden_layers])
    sources: dict[str, Any] = {
        "none": None,
        "lookup": "lookup",
        "the first quarter of its layers": model._replace(config=half, weights=weights),
    }
    sources = {name: x for name, x in sources.items() if name == "none" or args.draft in name}
    sessions = {name: start_session(model, 1, 2048, draft=x) for name, x in sources.items()}
    yield "| prompt | drafts | tokens/s | of none | tokens a step |"
    yield "|---|---|---|---|---|"
    for what, prompt in ((what, x) for what, x in PROMPTS.items() if args.prompt in what):
        speeds, per_step = {name: list[float]() for name in sources}, dict[str, float]()
        ids = encode_chat(model.tokenizer, [dict(role="user", content=prompt)])
        for i in range(args.rounds + 1):
            request = Request(ids, NEW, temperature=1.0 if what in SAMPLED else 0.0, seed=i)
            for name, session in sessions.items():
                session.stats = Stats()
                list(serve(session, [request]))
                stats = session.stats
                speeds[name] += [stats.decode_tokens / stats.decode_s] if i else []
                per_step[name] = stats.decode_tokens / stats.decode_steps
        for name, values in speeds.items():
            gain = median(x / y for x, y in zip(values, speeds["none"], strict=True))
            yield f"| {what} | {name} | {median(values):.1f} | {gain:.2f} | {per_step[name]:.2f} |"


def differ(model: Model, args: argparse.Namespace) -> Iterator[str]:
    """Rows of a table: how many of 32 greedy texts of 64 tokens are not those without drafts."""
    size = model.config.vocab_size
    requests = [Request(prompt_ids(i, 48, size), 64) for i in range(32)]
    texts = []
    for draft in (None, "lookup"):
        texts.append([list[int]() for _ in requests])
        for event in serve(start_session(model, 8, 128, draft=draft), requests):
            texts[-1][event.request].append(event.token)
    changed = sum(a != b for a, b in zip(*texts, strict=True))
    yield f"| {args.dtype} | {changed} of {len(requests)} texts differ with drafts |"


def waits(model: Model, args: argparse.Namespace) -> Iterator[str]:
    """Rows of a table: the seconds between two tokens of a text that runs."""
    size, capacity = model.config.vocab_size, model.config.max_position_embeddings
    session, rows = start_session(model, 4, capacity), list[str]()
    for arriving in (0, 512, capacity):
        for turn in range(2):  # the first time compiles
            prompts = [prompt_ids(10 * turn + i, 40, size) for i in range(3)]
            first, *_ = [submit(session, Request(prompt, 60)) for prompt in prompts]
            times = list[float]()
            while is_busy(session):
                events = [event for event in step(session) if event.request == first]
                times += [time.perf_counter()] * len(events)
                if arriving and len(times) == 10 and events:
                    submit(session, Request(prompt_ids(5 + turn, arriving, size), 1))
        gaps = np.diff(times)
        rows.append(f"| {arriving:,} | {median(gaps):.3f} | {max(gaps):.3f} |")
    yield "| tokens of the arriving prompt | seconds between two tokens, median | longest |"
    yield "|---|---|---|"
    yield from rows


MEASURES = dict(prefix=prefix, users=users, drafts=drafts, differ=differ, waits=waits)


@mistakes_on_one_line()
def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.formatter_class = argparse.RawDescriptionHelpFormatter
    ap.add_argument("--model", default="llama3")
    ap.add_argument("--ckpt", required=True)
    ap.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--against", type=Path, metavar="GGUF", help="llama.cpp's file of the model")
    ap.add_argument("--only", nargs="+", choices=[*MEASURES], default=[*MEASURES])
    ap.add_argument("--draft", default="", help="only drafts with this word in their name")
    ap.add_argument("--prompt", default="", help="only prompts with this word in their name")
    args = ap.parse_args()
    configure_jax({}, processes=1)
    model = load(model_file(args.model), args.ckpt, dtype=args.dtype)
    for name in args.only:
        print("\n".join(MEASURES[name](model, args)), end="\n\n", flush=True)


if __name__ == "__main__":
    main()

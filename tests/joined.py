"""What each of several processes does in test_hosts.py:

python tests/joined.py answers|arrivals FAMILY VARIANT AXES --coordinator HOST:PORT --process I/N
"""

import random
import sys

import jax
from engine import CAPACITY, goldens, load
from golden import SLOTS, assert_golden, prompt_logits

from common.command.arguments import read_host_options
from common.machines.hosts import find_rank, join
from common.serving.load import Model
from common.serving.serve import cancel, close, is_busy, serve, step, submit
from common.serving.session import Request, start_session


def answers(engine, model):
    """The logits are those of transformers. So are greedy texts of three families: with dense
    layers, with 4-bit experts, with latents."""
    assert_golden(prompt_logits(engine), engine, atol=1e-4)
    if engine.family in ("llama3", "gpt_oss", "deepseek_r1"):
        prompts = goldens(engine.family, engine.variant)
        requests = [Request(p.tokens.tolist(), len(p.greedy)) for p in prompts]
        tokens = [[] for _ in requests]
        for event in serve(start_session(model, SLOTS, CAPACITY, "float32"), requests):
            tokens[event.request].append(event.token)
        assert tokens == [p.greedy.tolist() for p in prompts]


def arrivals(engine, model):
    """Requests come and are given up at any time, which only process 0 knows. Prefixes, host memory
    and drafts are on. Every text is what it is alone."""
    rng = random.Random(5)
    options = dict(keep=4, keep_host=1e-3, reuse_multiple=1, draft="lookup", draft_tokens=2)
    pool = [[1 + (i * j) % 90 for j in range(1, 40 + 7 * i)] for i in range(1, 6)]
    requests = [
        Request(pool[i % 5][: 20 + 3 * i], 2 + i % 9, 0.9 * (i % 2), seed=i) for i in range(24)
    ]
    alone = start_session(model, 4, 128, "float32", reuse_multiple=1)
    want = [[e.token for e in serve(alone, [request])] for request in requests]
    session, got, given_up = start_session(model, 4, 128, "float32", **options), {}, set()
    if jax.process_index() == 0:
        while len(got) < len(requests) or is_busy(session):
            if len(got) < len(requests) and rng.random() < 0.4:
                got[submit(session, requests[len(got)])] = []
            if got and rng.random() < 0.05:
                given_up.add(rng.choice(list(got)))
                cancel(session, max(given_up))
            for event in step(session):
                got[event.request].append(event.token)
        close(session)
        step(session)
        for i, tokens in enumerate(want):
            assert got[i] == (tokens[: len(got[i])] if i in given_up else tokens), i
        assert session.stats.cached_tokens and session.stats.drafts
    while not session.closed:
        step(session)


if __name__ == "__main__":
    what, family, variant, axes, *place = sys.argv[1:]
    join(find_rank(read_host_options(place)))
    module, config, weights, mesh, *_ = engine = load(family, variant, axes)
    assert {device.process_index for device in mesh.devices.flat} == {0, 1}
    model = Model(module, config, mesh, weights, None, "float32", None, None)
    dict(answers=answers, arrivals=arrivals)[what](engine, model)
    print("equal")

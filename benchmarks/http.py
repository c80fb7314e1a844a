"""Compares a server with the session alone, and soaks a server.

    python -m benchmarks.http --model llama3 [--ckpt DIR] [--rounds 3] [--soak 10000]

With 8 slots busy: tokens per second, and seconds to the first token of a text alone; the session in
this process and the server take turns. The session also decodes 8 texts that all follow a JSON
schema. `--soak N` sends N requests, of which some are given up, and prints the server's memory as
it goes.
"""

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks import model_file
from common.command.cli import mistakes_on_one_line
from common.command.environment import configure_jax
from common.serving.load import load
from common.serving.serve import is_busy, serve, step, submit
from common.serving.session import Request, Session, start_session
from common.text.grammar import json_grammar
from common.text.tokenizer import encode

SLOTS, CAPACITY, NEW = 8, 512, 200
PROMPT = "ACT I."
PERSON = dict(name=dict(type="string", maxLength=20), age=dict(type="integer"))
PEOPLE = dict(
    type="array",
    minItems=NEW,  # more than a text has room for
    items=dict(type="object", properties=PERSON, required=["name", "age"]),
)


def start(args: argparse.Namespace) -> tuple[subprocess.Popen[str], int]:
    """Starts a server; returns its process and its port."""
    options = ["--slots", SLOTS, "--max-len", CAPACITY, "--dtype", args.dtype, "--queue", 10_000]
    options += ["--serve", "127.0.0.1:0", *(["--ckpt", args.ckpt] if args.ckpt else [])]
    command = [sys.executable, "-m", f"{args.model}.main", *map(str, options)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    while not (found := re.search(r"http://127.0.0.1:(\d+)", line := server.stderr.readline())):
        sys.stderr.write(line)
        if not line:  # it has ended
            raise SystemExit(server.wait())
    return server, int(found[1])


async def ask(port: int, new: int, leave: bool = False) -> tuple[float, int]:
    """Streams a text; returns the seconds to its first piece, and the pieces."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps(dict(prompt=PROMPT, max_tokens=new, temperature=0, stream=True))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
    began, first, told = time.perf_counter(), 0.0, b""
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    while part := await reader.read(1 << 16):
        told += part
        first = first or (time.perf_counter() - began if b"data: {" in told else 0.0)
        if leave and told.count(b"data: {") >= 2:
            break
    writer.close()
    return first, told.count(b"data: {")


async def together(port: int) -> None:
    await asyncio.gather(*(ask(port, NEW) for _ in range(SLOTS)))


def alone(session: Session, prompt: list[int]) -> float:
    """The seconds to the first token in a session that has no other text."""
    began = time.perf_counter()
    submit(session, Request(prompt, 2))
    seconds = 0.0
    while is_busy(session):
        seconds = (time.perf_counter() - began) if step(session) and not seconds else seconds
    return seconds


async def soak(port: int, pid: int, count: int) -> None:
    rng, gate = random.Random(1), asyncio.Semaphore(64)

    async def one(i: int) -> None:
        async with gate:
            await ask(port, rng.randrange(1, 12), leave=i % 5 == 0)

    for done in range(0, count, 1000):
        end = min(done + 1000, count)
        await asyncio.gather(*(one(i) for i in range(done, end)))
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        print(f"| {end:,} requests | {pages * 4096 / 1e6:.0f} MB |", flush=True)


@mistakes_on_one_line()
def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--model", default="llama3")
    ap.add_argument("--ckpt")
    ap.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--soak", type=int, default=0)
    args = ap.parse_args()
    if args.rounds < 1:
        ap.error("--rounds must be at least 1")
    configure_jax({}, processes=1)
    model = load(model_file(args.model), args.ckpt, dtype=args.dtype)
    session = start_session(model, SLOTS, CAPACITY, logprobs=True)
    assert model.tokenizer is not None
    prompt, seconds_of, firsts = encode(model.tokenizer, PROMPT), ([], [], []), ([], [])
    grammar = json_grammar(PEOPLE)
    server, port = start(args)
    try:
        for i in range(args.rounds + 1):
            began = time.perf_counter()
            list(serve(session, [Request(prompt, NEW)] * SLOTS))
            middle = time.perf_counter()
            asyncio.run(together(port))
            seconds = [middle - began, time.perf_counter() - middle]
            began = time.perf_counter()
            list(serve(session, [Request(prompt, NEW, grammar=grammar)] * SLOTS))
            seconds.append(time.perf_counter() - began)
            first = alone(session, prompt), asyncio.run(ask(port, 2))[0]
            if i:  # the first round compiles
                for of_kind, x in zip((*seconds_of, *firsts), (*seconds, *first), strict=True):
                    of_kind.append(x)
        print("| | session | server | |\n|---|---|---|---|")
        a, b, ruled = (SLOTS * NEW / median(x) for x in seconds_of)
        print(f"| tokens/s, {SLOTS} texts | {a:.0f} | {b:.0f} | {b / a:.3f} of the session |")
        print(f"| the same, with a schema | {ruled:.0f} | | {ruled / a:.3f} of it without |")
        a, b = (1e3 * median(x) for x in firsts)
        print(f"| first token, ms | {a:.1f} | {b:.1f} | {b - a:.1f} more |")
        if args.soak:
            asyncio.run(soak(port, server.pid, args.soak))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()

"""Times chunks of a prompt: how they depend on the slot's capacity and on its filled positions.

    python -m benchmarks.contexts llama3 DIR
    python -m benchmarks.contexts deepseek_r1 benchmarks/small_latent.json --plot latent.svg

The weights are random. The first chunk, of 512 tokens, is timed in turns in a slot of 2,048
positions and in one of 65,536. With --plot, a prompt of 32,768 tokens is read into the larger slot,
and the seconds of its chunks are drawn, with the straight line that fits them best: a chunk costs a
constant, and something for each token before it.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import model_file
from common.command.cli import mistakes_on_one_line
from common.serving.load import Model, init_state, open_model, read_weights
from common.serving.session import PROMPT_CHUNK
from common.sharding import DATA

CAPACITIES = (2048, 65_536)
PROMPT = 32_768  # tokens
ROUNDS = 9


def chunk_seconds(model: Model, state: Any) -> tuple[float, Any]:
    """Reads the next chunk of a slot, on each shard of the data. Returns the seconds, and the state
    after it."""
    rows, vocab = len(state.length_B), model.config.vocab_size
    tokens = np.random.default_rng(0).integers(1, vocab, (rows, PROMPT_CHUNK), np.int32)
    count = np.full(rows, PROMPT_CHUNK, np.int32)
    began = time.perf_counter()
    static: Any = dict(config=model.config, mesh=model.mesh)
    state = model.module.prefill(model.weights, state, tokens, count, **static)
    jax.block_until_ready(state)
    return time.perf_counter() - began, state


def empty(model: Model, capacity: int) -> Any:
    slots = model.mesh.shape[DATA]
    return init_state(model.module, model.config, slots, capacity, model.dtype, model.mesh)


def first_chunks(model: Model) -> dict[int, float]:
    """Returns the median seconds of the first chunk, for each capacity."""
    took: dict[int, list[float]] = {capacity: [] for capacity in CAPACITIES}
    states = {capacity: empty(model, capacity) for capacity in CAPACITIES}
    for turn in range(ROUNDS + 1):
        for capacity, state in states.items():
            state = state._replace(length_B=state.length_B * 0)
            seconds, states[capacity] = chunk_seconds(model, state)
            took[capacity] += [seconds] if turn else []  # the first round compiles
    return {capacity: statistics.median(seconds) for capacity, seconds in took.items()}


def all_chunks(model: Model) -> list[float]:
    """Returns the seconds of each chunk of a prompt of PROMPT tokens."""
    state, took = empty(model, CAPACITIES[1]), []
    chunk_seconds(model, empty(model, CAPACITIES[1]))
    for _ in range(PROMPT // PROMPT_CHUNK):
        seconds, state = chunk_seconds(model, state)
        took.append(seconds)
    return took


def picture(seconds: list[float], name: str) -> str:
    """Draws the seconds of chunks, and the straight line that fits them best."""
    wide, high, left, bottom, top = 640, 300, 60, 260, max(seconds) * 1.1
    slope, start = np.polyfit(np.arange(len(seconds)), seconds, 1)

    def at(i: int, y: float) -> tuple[str, str]:
        x = left + i * (wide - left - 20) / len(seconds)
        return f"{x:.1f}", f"{bottom - y / top * 230:.1f}"

    places = [at(i, y) for i, y in enumerate(seconds)]
    dots = "".join(f'<circle cx="{x}" cy="{y}" r="3"/>' for x, y in places)
    last = len(seconds) - 1
    ends = [",".join(at(i, start + slope * i)) for i in (0, last)]
    x, y = wide - 20, bottom
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img">
<title>{name}: seconds to read {PROMPT_CHUNK} tokens, by the tokens that are read before</title>
<style>text {{ font: 12px system-ui, sans-serif; fill: #1f2328 }} circle {{ fill: #0969da }}
line, polyline {{ stroke: #59636e; fill: none }}
@media (prefers-color-scheme: dark) {{ text {{ fill: #f0f6fc }} }}</style>
<line x1="{left}" y1="{y}" x2="{x}" y2="{y}"/><line x1="{left}" y1="20" x2="{left}" y2="{y}"/>
<text x="8" y="14">{name}: seconds for {PROMPT_CHUNK} tokens</text>
<text x="8" y="34">{top:.2f}</text><text x="8" y="{y}">0</text>
<text x="{left}" y="{y + 18}">0</text>
<text x="{x}" y="{y + 18}" text-anchor="end">{PROMPT:,} tokens before them</text>
<polyline points="{ends[0]} {ends[1]}"/>
{dots}
</svg>
"""


@mistakes_on_one_line()
def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("family")
    parser.add_argument("shape", help="a published size, a config.json or a directory with one")
    parser.add_argument("--plot", type=Path, help="the SVG file to write")
    args = parser.parse_args(argv)
    module = model_file(args.family)
    if args.plot:
        args.plot.open("a").close()  # found out now, not after the measurements
    model = read_weights(open_model(module, args.shape, dtype="float32", random=True))
    times = first_chunks(model)
    for capacity, seconds in times.items():
        print(f"{PROMPT_CHUNK} tokens into an empty slot of {capacity:,}: {seconds:.3f} s")
    print(f"ratio {times[CAPACITIES[1]] / times[CAPACITIES[0]]:.3f}")
    if args.plot:
        took = all_chunks(model)
        slope, start = np.polyfit(np.arange(len(took)), took, 1)
        print(f"{start:.3f} s a chunk, and {1e3 * slope:.2f} ms for each chunk before it")
        args.plot.write_text(picture(took, Path(args.shape).stem), encoding="utf-8")


if __name__ == "__main__":
    main()

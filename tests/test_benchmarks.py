"""The benchmarks run on the embedded model and report what they promise. Speed is not tested."""

import importlib
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from engine import ENVIRONMENT

from benchmarks import contexts, gpu
from benchmarks.folio import multiply_all
from benchmarks.worker import rows_of_experts
from common.cache import capacity_of
from common.machines.bandwidth import experts_read, step_bytes
from common.serving.load import load


class Stack(NamedTuple):
    w_up: Any


class Tree(NamedTuple):
    embed: Any
    head: Any
    experts: Stack
    by_head: Any  # three axes, but not a stack of experts


ROOT = Path(__file__).parent.parent


def run(module, *words):
    argv = [sys.executable, "-m", f"benchmarks.{module}", *map(str, words)]
    return subprocess.run(
        argv, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=600
    )


@pytest.mark.full
def test_generation_is_measured_at_every_point_and_against_the_floor(tmp_path):
    sizes = ["--batch", 1, 2, "--steps", 4, "--prefill", 32, "--rounds", 2]
    sizes += ["--products", "--overhead"]
    done = run("generate", "--ckpt", "llama3/embedded", *sizes, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stderr
    rows = ("decode, batch 1", "decode, batch 2", "prefill 32", "load", "peak memory")
    rows += ("products alone, 1 rows", "products alone, 32 rows")
    for row in (*rows, "decode with widths of 64, batch 1"):
        assert re.search(rf"\| {row}.*\| [\d.]+", done.stdout), done.stdout
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    for name, point in result["points"].items():
        (measured,) = point["settings"].values()
        assert measured["low"] <= measured["median"] <= measured["high"]
        assert ("of_floor" in measured) == name.startswith("decode")
    rounds = result["rounds"]["decode, batch 2"]["folio"]
    assert len(rounds) == 2 and all(len(r["tokens"]) == 4 + 2 for r in rounds)


@pytest.mark.full
def test_chunks_are_timed_by_the_room_of_a_slot_and_by_what_was_read_before(
    tmp_path, monkeypatch, capsys
):
    read, lengths = contexts.chunk_seconds, []

    def chunk_seconds(model, state):
        lengths.append((capacity_of(state.cache), int(state.length_B[0])))
        return read(model, state)

    monkeypatch.setattr(contexts, "chunk_seconds", chunk_seconds)
    for name, value in dict(CAPACITIES=(1024, 2048), PROMPT=1536, ROUNDS=1).items():
        monkeypatch.setattr(contexts, name, value)
    contexts.main(["llama3", "llama3/embedded", "--plot", str(tmp_path / "chunks.svg")])
    # Empty slots in turns, of which the first round compiles; then one that fills.
    assert lengths == [(1024, 0), (2048, 0)] * 2 + [(2048, n) for n in (0, 0, 512, 1024)]
    printed = capsys.readouterr().out
    assert re.search(r"of 1,024: [\d.]+ s\n.* of 2,048: [\d.]+ s\nratio [\d.]+\n", printed)
    assert (tmp_path / "chunks.svg").read_text().count("<circle") == 3


def test_the_line_through_the_seconds_of_chunks_is_the_one_that_fits_best():
    drawn = contexts.picture([1.0, 2.0, 3.0], "model")
    dots = re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', drawn)
    assert f'points="{",".join(dots[0])} {",".join(dots[2])}"' in drawn


@pytest.mark.full
def test_perplexity_of_the_embedded_model_grows_a_little_as_precision_falls(tmp_path):
    text = "KING.\nWhat is the matter, and where is he?\n\nDUKE.\nI am here, my lord.\n\n" * 20
    (tmp_path / "play.txt").write_text(text)
    options = ["--text", tmp_path / "play.txt", "--tokens", 256, "--window", 128]
    done = run("perplexity", "--ckpt", "llama3/embedded", *options)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| (\S.*?) \| ([\d.]+) \|", done.stdout, re.MULTILINE)
    assert rows[0][0] == "float32" and len(rows) == 7
    exact, *others = (float(value) for _, value in rows)
    assert 1 < exact < 2048 and all(0.98 < x / exact < 1.1 for x in others)
    assert "254 tokens scored" in done.stdout


@pytest.mark.full
def test_kernels_are_compared_and_measured_and_what_is_too_large_is_named():
    sizes = ["--batch", 1, "--length", 128, "--prompt", 64, "--tokens", 1, "--repeats", 1]
    sizes += ["--dtype", "int8"]
    done = run("kernels", *sizes, "--gigabytes", 0.21)
    assert done.returncode == 0, done.stderr
    rows = re.findall(
        r"^\| (.*), (?:batch 1, length 128|prompt of 64|1 tokens) \| int8 \|", done.stdout, re.M
    )
    assert {"llama3.1-8b", "deepseek-r1", "qwen3-30b-a3b down"} <= set(rows)
    assert re.search(r"left out: .*deepseek-r1 gate, 1 tokens, int8 \(3.5 GiB\)", done.stdout)


def test_a_mistake_is_one_line(tmp_path):
    for done in (
        run("generate", "--ckpt", tmp_path, "--rounds", 1),
        run("perplexity", "--ckpt", "llama3/embedded", "--text", tmp_path / "none.txt"),
    ):
        assert done.returncode == 2
        assert re.fullmatch(r"((?!error).*\n)*error: [^\n]+\n", done.stderr), done.stderr


def test_a_step_reads_the_experts_that_some_token_chose_and_not_the_table_beside_a_head():
    """Two tokens that choose one of 4 experts each read 7/16 of the experts."""
    share = experts_read(SimpleNamespace(num_experts_per_tok=1), 2)
    assert share(4) == pytest.approx(7 / 16) and experts_read(SimpleNamespace(), 2)(4) == 0
    stack = Stack(jnp.ones((4, 2, 2)))
    tree = Tree(jnp.ones((5, 3)), jnp.ones((5, 3)), stack, jnp.ones((3, 1, 2)))
    cache = jnp.ones(10, jnp.int8)
    assert step_bytes(tree, cache, 0.5, share) == pytest.approx(15 * 4 + 64 * 7 / 16 + 24 + 5)
    assert step_bytes(tree._replace(head=None), cache, 0, share) == pytest.approx(60 + 28 + 24)
    packed = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.int4), tree)
    assert step_bytes(packed, (), 0, share) < step_bytes(tree, (), 0, share) / 4


@pytest.mark.parametrize("rows, of_head", [(8, 8), (24, 1)])
def test_the_products_alone_are_those_of_every_matrix_and_of_a_prompts_last_token(rows, of_head):
    model = load(importlib.import_module("llama3.model"), "llama3/embedded", dtype="bfloat16")
    weights = model.weights.layers, model.weights.embed
    x = jax.ShapeDtypeStruct((rows, 1), "bfloat16")
    program = jax.jit(partial(multiply_all, rows=rows, chosen=0)).lower(weights, x).compile()
    matrices = sum(w.size for w in jax.tree.leaves(weights[0]) if w.ndim == 2)
    products = 2 * (rows * matrices + of_head * model.weights.embed.size)
    assert products <= program.cost_analysis()["flops"] < 1.1 * products


def test_rows_are_spread_evenly_over_the_experts_that_are_chosen():
    assert rows_of_experts(3, 8, 2) == [1] * 6 + [0] * 2
    assert rows_of_experts(5, 4, 2) == [3, 3, 2, 2]


def test_loading_is_measured_beside_reading_the_files():
    shape = ROOT / "deepseek_r1" / "embedded" / "config.json"
    done = run("load", "deepseek_r1", "--shape", shape, "--layers", 2)
    assert done.returncode == 0, done.stderr
    speed, memory = done.stdout.splitlines()
    assert re.fullmatch(r"0\.00 GB in [\d.]+ s: \d+% of the file's read speed, [\d.]+ GB/s", speed)
    assert re.fullmatch(r"memory beyond 0\.00 GB of arrays: -?\d+ MiB", memory)


@pytest.mark.full
@pytest.mark.parametrize("word", ["int8", "times"])
def test_what_runs_on_a_gpu_runs_here_with_tiny_shapes_errors_first(word, tmp_path):
    done = run("gpu", "--tiny", "--only", word, "--json", tmp_path / "gpu.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    parts = [row["part"] for row in rows]
    assert parts == sorted(parts, key=["errors", "times", "models"].index)
    assert {row["group"] for row in rows} == {name for name in gpu.GROUPS if word in name}
    for row in rows:
        assert row["part"] != "errors" or (row["right"] and row["error"] < 0.01)
        assert row["part"] != "times" or row.get("of_floor", row.get("bandwidth", 0)) > 0
        assert row["part"] != "models" or row["tokens_per_s"] > 0
    table = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(table) == len(rows) + 2


@pytest.mark.parametrize(
    "ending, said",
    [
        ("sys.exit('out of memory')", "ended with status 1: out of memory"),
        ("os.kill(os.getpid(), 11)", "ended with status -11: no message"),
        ("time.sleep(60)", "stopped after 2 s"),
    ],
)
def test_a_process_that_fails_or_hangs_keeps_its_rows_and_is_named(ending, said):
    program = f"import os, sys, time; print('{{\"case\": 1}}', flush=True); {ending}"
    rows = list(gpu.rows_of([sys.executable, "-c", program], 2))
    assert rows == [dict(case=1), dict(failed=said)]


LATE = """
import time
from benchmarks.gpu import Group, work

def fails():
    raise RuntimeError("no such\\ninstruction")

def fine():
    print("a warning, which is no row")
    return dict(case="fine")

rows = [fails, fine, lambda: time.sleep(1) or {}, dict, dict]
work(Group("times", lambda tiny: iter(rows), 1.0), tiny=True, seconds=0.5)
"""


def test_a_row_that_fails_is_named_and_those_that_are_late_are_counted():
    device, *rows = gpu.rows_of([sys.executable, "-c", LATE], 60)
    late = dict(left_out="2 rows, for want of time")
    assert device["platform"] == "cpu"
    assert rows == [dict(failed="no such instruction"), dict(case="fine"), {}, late]


def test_a_wrong_kernel_is_said_to_be_wrong():
    def run(x, implementation):
        return x * (1.1 if implementation == "reference" else 1.0)

    row = gpu.error_row("a case", "bf16", run, lambda: (jnp.ones(3),))
    assert not row["right"] and row["error"] == pytest.approx(1 / 11)
    assert gpu.show("group", row, cpu=True).endswith("| 0.091 WRONG |")


def test_without_a_gpu_the_command_says_so(tmp_path):
    done = run("gpu", "--json", tmp_path / "gpu.json")
    assert done.returncode == 2
    assert done.stderr == "error: JAX finds no GPU, only cpu: try --tiny, which needs no GPU\n"

"""Several processes on one machine, as on many hosts. They compute what one process computes,
report errors before they load, and when one ends, all end."""

import contextlib
import http.client
import importlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from compare import refused
from engine import ENVIRONMENT, ROOT
from families import FAMILIES
from test_families import fixtures, meshes

from common.command.arguments import parser, read_host_options
from common.machines.hosts import Rank, differences, facts_of, find_rank
from common.sharding import parse_mesh

EMBEDDED = ROOT / "llama3" / "embedded"
JOINED = ROOT / "tests" / "joined.py"


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def start():
    """Starts processes, each with CPU devices of its own, and kills them after the test. `mine` has
    the options of each one alone, and `stdin` its open file."""
    running = []

    def call(command, devices=2, mine=((), ()), stdin=None):
        where = ["--coordinator", f"127.0.0.1:{free_port()}", "--process"]
        flags = f"--xla_force_host_platform_device_count={devices} {ENVIRONMENT['XLA_FLAGS']}"
        kept = dict(
            cwd=ROOT, env=ENVIRONMENT | dict(XLA_FLAGS=flags, PYTHONPATH=str(ROOT)), text=True
        )
        kept |= dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        for i, options in enumerate(mine):
            words = [sys.executable, *command, *where, f"{i}/{len(mine)}", *options]
            file = stdin[i] if stdin else subprocess.DEVNULL
            running.append(subprocess.Popen([*map(str, words)], stdin=file, **kept))
        return running[-len(mine) :]

    yield call
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def pair(start):
    """Starts processes of the command line on a mesh of four devices."""
    command = ["-m", "llama3.main", "--mesh", "tensor=4"]
    return lambda *options, **more: start([*command, *options], **more)


def ends(processes):
    """Waits for the processes, and returns (exit code, stdout, stderr) of each."""
    out = []
    for process in processes:
        text, errors = process.communicate(timeout=120)
        assert "Traceback" not in errors, errors
        out.append((process.returncode, text, errors))
    return out


# ---- the same numbers


def on_all_eight(family):
    """Returns a variant, and a mesh of all eight devices that can split it."""
    for variant in (*FAMILIES[family].precise, *fixtures(family)):
        for axes in meshes(family, variant):
            if np.prod([*parse_mesh(axes).values()]) == 8:
                return variant, axes
    raise AssertionError(f"no variant of {family} fits eight devices")


def both_find_equal(processes):
    first, second = ends(processes)
    assert first[0] == second[0] == 0, (first, second)
    assert first[1].endswith("equal\n") and second[1] == ""


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama3", "gpt_oss", "deepseek_r1"])
def test_two_processes_give_the_logits_of_transformers(start, family):
    """Greedy texts, too, of dense layers, of 4-bit experts, and of latents.
    test_families asserts the same for one process."""
    both_find_equal(start([JOINED, "answers", family, *on_all_eight(family)], devices=4))


@pytest.mark.full
def test_requests_that_come_to_process_0_at_any_time_are_served_by_both(start):
    """Only process 0 knows what comes when. Prefixes, host memory and drafts are on."""
    both_find_equal(start([JOINED, "arrivals", "llama3", "scaled", "data=2,tensor=2"]))


@pytest.mark.full
@pytest.mark.parametrize("count", [4])
def test_prompts_on_the_standard_input_of_process_0_reach_all(start, count, tmp_path):
    """The stdout of process 0 holds only the text, which is that of a single process. The stdout of
    the others holds nothing."""
    options = ["--max-new-tokens", "8", "--max-len", "64", "--json", "--dtype", "float32"]
    command, files = ["-m", "llama3.main", *options], [tmp_path / f"{i}" for i in range(count)]
    for i, file in enumerate(files):
        file.write_text("another" if i else "KING.")
    more = dict(devices=4 // count, mine=[()] * count, stdin=[file.open() for file in files])
    all_ = ends(start([*command, "--mesh", "tensor=4"], **more))
    assert [code for code, *_ in all_] == [0] * count, all_
    assert [text for _, text, _ in all_[1:]] == [""] * (count - 1)
    record = json.loads(all_[0][1])
    alone = [sys.executable, *command, "--prompt", "KING."]
    one = subprocess.run(alone, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT)
    assert record["prompt"] == "KING." and record["tokens"] == json.loads(one.stdout)["tokens"]


@pytest.mark.full
def test_process_0_listens_and_all_serve(pair):
    options = ["--dtype", "float32", "--max-new-tokens", "20", "--raw"]
    (_, text, _), _ = ends(pair(*options, "--prompt", "ACT I."))
    port = free_port()
    both = pair("--serve", f"127.0.0.1:{port}", "--dtype", "float32", "--max-len", "512")
    while "serving" not in (told := both[0].stderr.readline()):
        assert told
    body = dict(prompt="ACT I.", max_tokens=20, temperature=0)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, 60)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = json.loads(connection.getresponse().read())
        assert answer["choices"][0]["text"] == text.removesuffix("\n")
        body |= dict(structured_outputs=dict(regex="([a-z]{2} ){6}"), presence_penalty=1)
        connection.request("POST", "/v1/completions", json.dumps(body))
        ruled = json.loads(connection.getresponse().read())["choices"][0]["text"]
        assert re.fullmatch("([a-z]{2} ){6}", ruled)
        body = dict(prompt="ACT I.", temperature=0, max_tokens=300, stream=True)
        connection.request("POST", "/v1/completions", json.dumps(body))
        stream = connection.getresponse()
        assert stream.readline().startswith(b"data: {")
        for process in both:  # as a cluster's scheduler does
            process.send_signal(signal.SIGTERM)
        assert stream.read().endswith(b"data: [DONE]\n\n")
    assert [code for code, *_ in ends(both)] == [0, 0]


# ---- what is wrong is said before anything is loaded


def refused_by_all(processes):
    """Asserts that all processes end soon, with exit code 2 and the same line. Returns it."""
    began = time.monotonic()
    out = ends(processes)
    said = {(code, text, errors.splitlines()[-1]) for code, text, errors in out}
    assert len(said) == 1, out
    ((code, text, line),) = said
    assert (code, text) == (2, "") and line.startswith("error: ")
    assert time.monotonic() - began < 20, "most of it for a busy machine"
    return line.removeprefix("error: ")


def test_all_that_differs_is_said_on_every_process(pair, tmp_path):
    for i in range(2):
        shutil.copytree(EMBEDDED, tmp_path / f"{i}")
    config = tmp_path / "1" / "config.json"
    config.write_text(config.read_text().replace("{", "{ ", 1))
    weights = tmp_path / "1" / "model.safetensors"
    os.truncate(weights, size := weights.stat().st_size - 8)
    mine = [["--ckpt", tmp_path / f"{i}", "--seed", i] for i in range(2)]
    seed, small, large = sorted(refused_by_all(pair("--prompt", "x", mine=mine)).split("; "))
    assert seed == "--seed differs: 0 in process 0, 1 in process 1"
    assert small.startswith("config.json differs: ")
    sizes = f"{size + 8} bytes in process 0, {size} bytes in process 1"
    assert large == f"model.safetensors differs: {sizes}"


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("mine", "message"),
    [
        ([["--bogus"], []], "unrecognized arguments: --bogus (see --help) (in process 0)"),
        ([[], ["--keep", "-1"]], "must be at least 0, got -1 (see --help) (in process 1)"),
        ([[], ["--ckpt", "/no/where"]], "nor a hub id like org/name (in process 1)"),
        ([["--chat"]] * 4, "--prompt does not go with --chat (in processes 0, 1, 2, 3)"),
        (
            [["--mesh", "tensor=2"]] * 2,
            "leaves a process without work: give a --mesh of all 4 devices",
        ),
    ],
)
def test_a_mistake_in_one_process_ends_all_with_a_line_that_names_it(pair, mine, message):
    assert refused_by_all(pair("--prompt", "x", mine=mine)).endswith(message)


def test_what_is_told_to_other_processes_has_no_key():
    args = parser("llama3").parse_args(["--serve", "127.0.0.1:1", "--api-key", "secret"])
    told = facts_of(importlib.import_module("llama3.model"), args)
    assert "--seed" in told and "secret" not in told.values()


def test_a_difference_names_all_processes():
    reports = [{"jax": "1" if i == 3 else "2", "file": "5 bytes"} for i in range(4)]
    del reports[2]["file"]
    assert differences(reports) == [
        "jax differs: 2 in processes 0, 1, 2, 1 in process 3",
        "file differs: 5 bytes in processes 0, 1, 3, missing in process 2",
    ]


# ---- none outlives another


@pytest.mark.full
@pytest.mark.parametrize(
    "victim, number", [(0, signal.SIGKILL), (1, signal.SIGKILL), (0, signal.SIGINT)]
)
def test_when_a_process_ends_in_the_middle_of_a_text_all_end(pair, victim, number):
    """JAX's service says so in its own words."""
    both = pair("--prompt", "KING.", "--max-new-tokens", "400")
    assert both[0].stdout.read(2)
    both[victim].send_signal(number)
    for process in both:
        process.communicate(timeout=60)
    assert all(process.returncode for process in both)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_process_that_waits_for_the_others_ends_at_a_signal(number):
    where = ["--coordinator", f"127.0.0.1:{free_port()}", "--process", "0/2"]
    command = [sys.executable, "-m", "llama3.main", "--prompt", "A", *where]
    kept = dict(cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, **kept) as process:
        try:
            assert "waiting for 2 processes" in process.stderr.readline()
            process.send_signal(number)
            assert process.wait(20) == -number
        finally:
            process.kill()


@pytest.mark.full
def test_damage_that_one_process_finds_while_it_loads_ends_the_others_too(pair, tmp_path):
    """All files have the same sizes, so the check before loading finds no difference."""
    for i in range(2):
        shutil.copytree(EMBEDDED, tmp_path / f"{i}")
    weights = tmp_path / "1" / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"embed_tokens", b"embed_jokers", 1))
    both = pair("--prompt", "x", mine=[["--ckpt", tmp_path / f"{i}"] for i in range(2)])
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert all(process.returncode for process in both) and "embed_jokers" in errors[1]


# ---- the rank of a process


SLURM = dict(SLURM_JOB_ID="70001", SLURM_STEP_NODELIST="node[007-009],other", SLURM_NTASKS="4")
SLURM |= dict(SLURM_PROCID="2", SLURM_LOCALID="1")


def test_a_rank_is_found_by_options_or_by_a_slurm_step_of_several_tasks(monkeypatch):
    """JAX computes the port from the number of the job."""
    for name in os.environ:
        if name.startswith(("SLURM", "OMPI", "KUBE", "TPU_")):
            monkeypatch.delenv(name)
    rank = lambda *options: find_rank(read_host_options(options))
    assert rank() is None and rank("--coordinator", "a:1", "--process", "0/1") is None
    for options in (["--distributed"], ["--coordinator", "a:1"]):
        refused(ValueError, "nothing says which of several processes this is", rank, *options)
    for name, value in (SLURM | dict(SLURM_STEP_NUM_TASKS="1")).items():
        monkeypatch.setenv(name, value)
    assert rank() is None, "an allocation of four tasks, a step of one"
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert rank() == Rank(f"node007:{70001 % 4096 + 61440}", 4, 2)
    assert rank("--coordinator", "other:99") == Rank("other:99", 4, 2)
    assert rank("--no-distributed") is None

"""Several processes on one machine, as on many hosts. They compute what one process computes,
report errors before they load, and when one ends, all end."""

import contextlib
import http.client
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from engine import ENVIRONMENT, ROOT
from families import FAMILIES
from test_families import fixtures, meshes

from common.command.arguments import parser, read_host_options
from common.machines import cluster
from common.machines.preflight import differences, report
from common.sharding import parse_mesh

EMBEDDED = ROOT / "llama3" / "embedded"
PROMPTLY = 20  # seconds, most of them for a busy machine; without our code it takes minutes


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@pytest.fixture
def start():
    """Starts a Python process with its own CPU devices, and kills it after the test. Its standard
    input stays open if `stdin` is None."""
    running = []

    def call(command, devices=2, stdin="", **environment):
        flags = f"--xla_force_host_platform_device_count={devices} {ENVIRONMENT['XLA_FLAGS']}"
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=ROOT,
            env={**ENVIRONMENT, "XLA_FLAGS": flags, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        if stdin is not None:
            with process.stdin:
                process.stdin.write(stdin)
            process.stdin = None
        return process

    yield call
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def pair(start):
    """Starts two processes of the command line. `mine` has the options of each one alone."""

    def call(*options, mine=((), ()), stdin=("", "")):
        where = ["--coordinator", f"127.0.0.1:{free_port()}", "--mesh", "tensor=4"]
        return [
            start(
                ["-m", "llama3.main", *where, "--process", f"{i}/2", *options, *mine[i]],
                stdin=stdin[i],
            )
            for i in range(2)
        ]

    return call


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


ANSWERS = """
import sys
sys.path.insert(0, "tests")
from common.command.arguments import read_host_options
from common.machines.hosts import joined
from common.serving.load import Model
from common.serving.serve import serve
from common.serving.session import Request, start_session
from engine import CAPACITY, goldens, load
from golden import SLOTS, assert_golden, prompt_logits

family, variant, axes, texts, *place = sys.argv[1:]
with joined(read_host_options(place)) as group:
    group.start()
    engine, prompts = load(family, variant, axes), goldens(family, variant)
    module, config, weights, mesh, *_ = engine
    assert len({d.process_index for d in mesh.devices.flat}) == 2 and mesh.size == 8
    assert_golden(prompt_logits(engine), engine, atol=1e-4)
    if texts:
        model = Model(module, config, mesh, weights, None, "float32", None, None)
        requests = [Request(p.tokens.tolist(), len(p.greedy)) for p in prompts]
        tokens = [[] for _ in requests]
        for event in serve(start_session(model, SLOTS, CAPACITY, "float32"), requests):
            tokens[event.request].append(event.token)
        assert tokens == [p.greedy.tolist() for p in prompts]
    print("equal")
"""


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f == "llama3" else pytest.mark.full) for f in FAMILIES]
)
def test_two_processes_give_the_logits_of_transformers(start, family):
    """Greedy texts, too, for three families: with dense layers, with 4-bit experts, with latents.
    test_families asserts the same for one process."""
    variant, axes = on_all_eight(family)
    place = ["--coordinator", f"127.0.0.1:{free_port()}", "--process"]
    texts = "texts" if family in ("llama3", "gpt_oss", "deepseek_r1") else ""
    command = ["-c", ANSWERS, family, variant, axes, texts, *place]
    first, second = ends([start([*command, f"{i}/2"], devices=4) for i in range(2)])
    assert (first[0], first[2]) == (0, "") and first[1].endswith("equal\n"), first
    assert second == (0, "", "")


ARRIVALS = """
import random, sys
sys.path.insert(0, "tests")
import jax
from common.command.arguments import read_host_options
from common.machines.hosts import joined
from common.serving.load import Model
from common.serving.serve import cancel, close, is_busy, serve, step, submit
from common.serving.session import Request, start_session
from engine import load

family, variant, axes, *place = sys.argv[1:]
with joined(read_host_options(place)) as group:
    group.start()
    module, config, weights, mesh, *_ = load(family, variant, axes)
    model = Model(module, config, mesh, weights, None, "float32", None, None)
    rng = random.Random(5)
    options = dict(keep=4, keep_host=1e-3, reuse_multiple=1, draft="auto", draft_tokens=2)
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
        assert session.stats.cached_tokens and session.gain.past[True]  # some steps drafted
        print("equal")
    while not session.closed:
        step(session)
"""


@pytest.mark.full
@pytest.mark.parametrize("family", ["llama3", "deepseek_r1"])
def test_requests_that_come_to_process_0_at_any_time_are_served_by_both(start, family):
    """Only process 0 knows what comes when. Prefixes, host memory and drafts are on."""
    variant = {"llama3": "scaled", "deepseek_r1": "yarn"}[family]
    place = ["--coordinator", f"127.0.0.1:{free_port()}", "--process"]
    command = ["-c", ARRIVALS, family, variant, "data=2,tensor=2", *place]
    first, second = ends([start([*command, f"{i}/2"]) for i in range(2)])
    assert (first[0], first[2]) == (0, "") and first[1].endswith("equal\n"), first
    assert second == (0, "", "")


@pytest.mark.full
def test_prompts_on_the_standard_input_of_process_0_reach_all(pair):
    """The stdout of process 0 holds only the text, which is that of a single process. The stdout of
    process 1 holds nothing."""
    options = ["--max-new-tokens", "8", "--max-len", "64", "--json", "--dtype", "float32"]
    first, second = ends(pair(*options, stdin=("KING.", "another")))
    assert (first[0], second) == (0, (0, "", ""))
    assert first[2].startswith("[mesh tensor=4; load") and first[2].count("\n") == 1
    record = json.loads(first[1])
    alone = [sys.executable, "-m", "llama3.main", *options, "--prompt", "KING."]
    one = subprocess.run(alone, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT)
    assert record["prompt"] == "KING." and record["tokens"] == json.loads(one.stdout)["tokens"]


@pytest.mark.full
def test_process_0_listens_and_all_serve(pair):
    options = ["--dtype", "float32", "--max-new-tokens", "20", "--raw", "--temperature", "0"]
    (_, text, _), _ = ends(pair(*options, "--prompt", "ACT I."))
    port = free_port()
    processes = pair("--serve", f"127.0.0.1:{port}", "--dtype", "float32", "--max-len", "512")
    while "serving" not in (told := processes[0].stderr.readline()):
        assert told
    body = json.dumps(dict(prompt="ACT I.", max_tokens=20, temperature=0))
    for _ in range(2):
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, 60)) as connection:
            connection.request("POST", "/v1/completions", body)
            answer = json.loads(connection.getresponse().read())
        assert answer["choices"][0]["text"] == text.removesuffix("\n")
    body = json.dumps(dict(prompt="ACT I.", max_tokens=300, temperature=0, stream=True))
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, 60)) as connection:
        connection.request("POST", "/v1/completions", body)
        stream = connection.getresponse()
        assert stream.readline().startswith(b"data: {")
        for process in processes:  # as a cluster's scheduler does
            process.send_signal(signal.SIGTERM)
        assert stream.read().endswith(b"data: [DONE]\n\n")
    assert [code for code, *_ in ends(processes)] == [0, 0]


# ---- what is wrong is said before anything is loaded


def refused(processes):
    """Asserts that all processes end soon with exit code 2, and returns each one's error lines."""
    began = time.monotonic()
    out = ends(processes)
    assert [(code, text) for code, text, _ in out] == [(2, "")] * len(out), out
    print(f"{time.monotonic() - began:.1f} s until all had ended")
    assert time.monotonic() - began < PROMPTLY
    return [errors.splitlines() for *_, errors in out]


@pytest.mark.full
def test_a_process_that_does_not_come_is_named_within_the_time_given(start):
    where = ["--coordinator", f"127.0.0.1:{free_port()}", "--join-timeout", "5"]
    command = ["-m", "llama3.main", *where, "--process"]
    first, second = refused([start([*command, f"{i}/4"]) for i in (0, 2)])
    assert first == second and len(first) == 1
    assert first[0].startswith("error: processes 1, 3 of 4 did not come within 5 s (--join-timeout")


@pytest.mark.full
def test_process_0_that_does_not_come_is_named_with_its_address(start):
    where = f"127.0.0.1:{free_port()}"
    command = ["-m", "llama3.main", "--coordinator", where, "--join-timeout", "3"]
    ((line,),) = refused([start([*command, "--process", "1/2"])])
    assert line.startswith(f"error: process 0 of 2 did not answer at {where} within 3 s (")


def test_what_is_told_to_other_processes_has_no_key():
    args = parser("llama3").parse_args(["--serve", "127.0.0.1:1", "--api-key", "secret"])
    told = report(importlib.import_module("llama3.model"), args)
    assert "--seed" in told and "secret" not in told.values()


def test_all_that_differs_is_said_a_line_each_on_every_process(pair, tmp_path):
    """The options differ, config.json differs, and so do two files of weights: one is cut off in
    process 1, the other is missing there."""
    for i in range(2):
        shutil.copytree(EMBEDDED, tmp_path / f"{i}")
    config = tmp_path / "1" / "config.json"
    config.write_text(config.read_text().replace("{", "{ ", 1))
    weights = tmp_path / "1" / "model.safetensors"
    os.truncate(weights, size := weights.stat().st_size - 8)
    (tmp_path / "0" / "model-2.safetensors").write_bytes(b"12345")
    mine = [["--ckpt", tmp_path / f"{i}"] for i in range(2)]
    first, second = refused(pair("--prompt", "x", mine=(mine[0], [*mine[1], "--seed", "3"])))
    assert first == second
    a, b, *rest = sorted(first)
    assert a == "error: --seed differs: 0 in process 0; 3 in process 1"
    assert b.startswith("error: config.json differs: ") and " bytes (" in b
    assert rest == [
        "error: model-2.safetensors differs: 5 bytes in process 0; missing in process 1",
        "error: model.safetensors differs: "
        f"{size + 8} bytes in process 0; {size} bytes in process 1",
    ]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("process", "options", "message"),
    [
        (0, ["--bogus"], "unrecognized arguments: --bogus (see --help)"),
        (1, ["--max-new-tokens", "x"], "argument --max-new-tokens: invalid int value: 'x'"),
        (1, ["--ckpt", "/nowhere/at/all"], "'/nowhere/at/all' is neither a directory nor a hub id"),
    ],
)
def test_a_mistake_in_one_process_ends_the_others_with_a_line_that_names_it(
    pair, process, options, message
):
    mine = [options if i == process else [] for i in range(2)]
    lines = refused(pair("--prompt", "x", mine=mine))
    assert len(lines[process]) == len(lines[1 - process]) == 1
    assert lines[process][0].startswith(f"error: {message}")
    here = socket.gethostname()
    assert lines[1 - process][0].startswith(f"error: process {process} on {here}: {message}")


@pytest.mark.full
def test_damage_that_one_process_finds_while_it_loads_ends_the_others_too(pair, tmp_path):
    """All files have the same sizes, so the check before loading finds no difference."""
    for i in range(2):
        shutil.copytree(EMBEDDED, tmp_path / f"{i}")
    weights = tmp_path / "1" / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b"embed_tokens", b"embed_jokers", 1))
    lines = refused(pair("--prompt", "x", mine=[["--ckpt", tmp_path / f"{i}"] for i in range(2)]))
    here = f"error: process 1 on {socket.gethostname()}: "
    assert len(lines[0]) > 0 and all(line.startswith(here) for line in lines[0])
    assert lines[0] == [line.replace("error: ", here) for line in lines[1]]
    assert any("embed_jokers" in line for line in lines[1])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("processes", "message"),
    [
        (("0/2", "1/3"), "process 1 on {0} is one of 3 processes, but process 0 is one of 2"),
        (("0/3", "1/3", "1/3"), "two processes are process 1 of 3: on {0} and {0}"),
    ],
)
def test_processes_that_do_not_fit_together_are_named(start, processes, message):
    where = ["--coordinator", f"127.0.0.1:{free_port()}", "--process"]
    lines = refused([start(["-m", "llama3.main", *where, i]) for i in processes])
    assert lines == [["error: " + message.format(socket.gethostname())]] * len(processes)


@pytest.mark.full
def test_a_process_that_dies_while_another_reads_its_prompt_ends_it(start):
    where = ["--coordinator", f"127.0.0.1:{free_port()}", "--process"]
    first = start(["-m", "llama3.main", *where, "0/2"], stdin=None)
    second = start(["-m", "llama3.main", *where, "1/2"])
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(6)
    second.kill()
    first.wait(PROMPTLY)
    *waiting, last = first.stderr.read().splitlines()
    assert waiting in ([], ["[waiting for a prompt on standard input]"])
    assert last == f"error: process 1 on {socket.gethostname()} has died"


@pytest.mark.full
def test_a_mistake_of_all_is_said_by_each_as_its_own(pair):
    lines = refused(pair("--prompt", "x", "--mesh", "tensor=2"))
    assert lines[0] == lines[1] and len(lines[0]) == 1
    assert "the mesh tensor=2 holds no device of process 1" in lines[0][0]


@pytest.mark.full
def test_a_conversation_is_refused(pair):
    lines = refused(pair("--chat"))
    assert lines == [["error: --chat talks to one process, and here are several"]] * 2


STRANGERS = [
    b"GET / HTTP/1.1\r\n\r\n",
    b'{"hello": 5}\n',
    b'{"hello": [[1], 2, "x"]}\n',
    b"[" * 5000,
]


@pytest.mark.full
def test_strangers_on_the_port_of_process_0_are_ignored(start):
    port = free_port()
    where = ["--coordinator", f"127.0.0.1:{port}", "--join-timeout", "6"]
    process = start(["-m", "llama3.main", *where, "--process", "0/2"])
    strangers = [*STRANGERS]
    while strangers and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port)) as s:
                s.sendall(strangers[-1])
            strangers.pop()
        except ConnectionRefusedError:
            time.sleep(0.05)
    with socket.create_connection(("127.0.0.1", port)) as slow:
        while process.poll() is None:
            with contextlib.suppress(OSError):
                slow.sendall(b" ")
            time.sleep(0.5)
    ((line,),) = refused([process])
    assert "process 1 of 2 did not come within 6 s" in line


@pytest.mark.full
def test_a_port_on_which_another_program_listens_is_named(start):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = f"127.0.0.1:{silent.getsockname()[1]}"
        where = ["--coordinator", at, "--process", "1/2", "--join-timeout", "3"]
        ((line,),) = refused([start(["-m", "llama3.main", *where])])
    assert f"what listens at {at} does not answer as process 0 of 2 would" in line


AS_ON_ACCELERATORS = """
from common.command import cli, memory
from llama3 import model
memory.memory_of = lambda device: (device.memory_stats() or {}).get("bytes_limit")
cli.main(model)
"""


@pytest.mark.full
def test_each_process_asks_a_device_of_its_own_for_its_memory(start):
    where = ["--coordinator", f"127.0.0.1:{free_port()}", "--mesh", "tensor=4", "--prompt", "KING."]
    code = ["-c", AS_ON_ACCELERATORS, *where, "--max-new-tokens", "4"]
    both = ends([start([*code, "--process", f"{i}/2"]) for i in range(2)])
    assert [code for code, _, _ in both] == [0, 0]


# ---- none outlives another


def speaking(pair):
    """Returns two processes in the middle of a long text."""
    both = pair("--prompt", "KING.", "--max-new-tokens", "400")
    assert both[0].stdout.read(2)
    return both


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_process_that_is_killed_ends_the_other_with_one_line(pair, victim):
    both = speaking(pair)
    both[victim].kill()
    began = time.monotonic()
    code, _, errors = ends(both)[1 - victim]
    print(f"{time.monotonic() - began:.2f} s until the other had ended")
    assert time.monotonic() - began < PROMPTLY
    host = "127.0.0.1" if victim == 0 else socket.gethostname()
    assert (code, errors) == (1, f"error: process {victim} on {host} has died\n")
    assert both[victim].returncode == -signal.SIGKILL


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_on_one_process_end_the_other_with_one_line(pair, number):
    both = speaking(pair)
    both[1].send_signal(number)
    first, second = ends(both)
    assert (first[0], second) == (130, (130, "", ""))
    assert first[2] == f"error: process 1 on {socket.gethostname()} was interrupted\n"


@pytest.mark.full
def test_a_reader_that_goes_away_ends_all_without_a_word(pair):
    both = speaking(pair)
    both[0].stdout.close()
    both[0].stdout = None
    codes = [(process.communicate(timeout=120)[1], process.returncode) for process in both]
    assert codes == [("", 0)] * 2


# ---- what is compared


def test_a_difference_names_all_processes_and_passes_over_those_that_cannot_say():
    reports = {i: {"jax": "1" if i == 3 else "2", "prompts": None if i else "a"} for i in range(4)}
    assert differences(reports) == ["jax differs: 2 in processes 0, 1, 2; 1 in process 3"]
    reports[2]["file"], reports[1]["prompts"] = "5 bytes", "b"
    assert differences(reports)[1:] == [
        "prompts differs: a in process 0; b in process 1",
        "file differs: missing in processes 0, 1, 3; 5 bytes in process 2",
    ]


# ---- the rank of a process


@pytest.fixture
def rank(monkeypatch):
    """Finds the rank of a process from options and environment variables."""
    for name in os.environ:
        if name.startswith(("JAX_COORD", "JAX_PROC", "JAX_NUM_P", "SLURM", "OMPI", "KUBE", "TPU_")):
            monkeypatch.delenv(name)

    def call(*options, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return cluster.find_rank(read_host_options(options))

    return call


SLURM = dict(
    SLURM_JOB_ID="70001",
    SLURM_STEP_NODELIST="node[007-009],other",
    SLURM_NTASKS="4",
    SLURM_PROCID="2",
    SLURM_LOCALID="1",
)


def test_a_process_alone_asks_nobody(rank, monkeypatch):
    monkeypatch.setattr(cluster, "ask_jax", lambda *_: pytest.fail("asked"))
    assert rank() is None
    assert rank("--no-distributed", **SLURM, SLURM_STEP_NUM_TASKS="4") is None


def test_an_allocation_without_a_step_of_several_tasks_is_one_process(rank):
    assert rank(**SLURM, SLURM_STEP_NUM_TASKS="1") is None
    assert rank(TPU_WORKER_HOSTNAMES="localhost", KUBERNETES_SERVICE_HOST="10.0.0.1") is None


def test_a_slurm_step_of_several_tasks_is_found(rank):
    """JAX computes the port from the job's number, and the device from the task's number on its
    node."""
    found = rank(**SLURM, SLURM_STEP_NUM_TASKS="4")
    assert found == (f"node007:{70001 % 4096 + 61440}", 2, 4, [1])
    assert rank(JAX_COORDINATOR_PORT="1234", JAX_LOCAL_DEVICE_IDS="0") == (
        "node007:1234",
        2,
        4,
        None,
    )
    assert rank("--coordinator", "other:99")[:3] == ("other:99", 2, 4)


def test_variables_and_options_say_the_same(rank):
    variables = dict(JAX_COORDINATOR_ADDRESS="a:1", JAX_NUM_PROCESSES="3", JAX_PROCESS_ID="2")
    assert rank(**variables) == rank("--coordinator", "a:1", "--process", "2/3")
    assert rank("--process", "0/1", **variables) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--distributed"], "nothing here says which of how many processes this is: give --coord"),
        (["--coordinator", "a:1"], "nothing here says"),
        (["--coordinator", "a:1", "--process", "2/2"], "--process '2/2': expected I/N"),
        (["--coordinator", "a:1", "--process", "two"], "--process 'two': expected I/N"),
        (
            ["--coordinator", "a:1", "--process", "0/9999999"],
            "there can be 100000 processes at most",
        ),
        (["--join-timeout", "inf"], "--join-timeout must be from 0 to 1000000, got inf"),
        (["--coordinator", "a", "--process", "0/2"], "the address of process 0, 'a', is not HOST:"),
    ],
)
def test_a_rank_that_is_half_known_is_refused(rank, options, message):
    with pytest.raises(ValueError) as error:
        rank(*options)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.full
def test_two_tasks_of_a_slurm_step_run_as_one(start):
    """srun sets these variables for each task, so no option is needed."""
    step = {**SLURM, "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    step |= {"SLURM_STEP_NUM_TASKS": "2", "JAX_COORDINATOR_PORT": str(free_port())}
    command = ["-m", "llama3.main", "--prompt", "KING.", "--max-new-tokens", "4"]
    both = [
        start(command, **{**step, "SLURM_PROCID": f"{i}", "SLURM_LOCALID": f"{i}"})
        for i in range(2)
    ]
    first, second = ends(both)
    assert first[0] == 0 and first[1].strip() and second == (0, "", "")

"""What a step costs according to the compilers, at published widths and with nothing allocated; and
the command that prints it.

Layers repeat, so a few of them show what one costs. These tests do not assert the cost of all
layers; `--dry-run` prints it. The 80 layers of the 70B step below take 4.50 GB of weights, 0.35 GB
of cache and 0.10 GB of temporaries per device, and 163 all-reduces of 21.1 MB.
"""

import functools
import importlib
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys

import jax.numpy as jnp
import pytest
from engine import FIXTURES, ROOT, hf_config, model_of

from common.command.arguments import parser
from common.command.dryrun import plan_of, show, stored
from common.fields import with_layers
from common.machines.chips import devices_of
from common.machines.dryrun import DryRun, Report, dry_run
from common.machines.hlo import ARRAY, Collective, executed, moved, parse
from common.machines.mesh_choice import Plan
from common.quant import INT8
from common.serving.load import open_model
from common.sharding import make_mesh, parse_mesh

TILE = 512  # bytes: a TPU stores an array [8] of the state as one tile
KERNEL = 'custom_call_target="tpu_custom_call"'


def dry(family, size, layers, topology, axes, **use):
    """Compiles a step of a few layers of a published size, or of the configuration `size`."""
    shapes, model = importlib.import_module(f"{family}.shapes").SHAPES, model_of(family)
    config = model.config_from_hf(shapes[size] if isinstance(size, str) else size)
    config = with_layers(config, layers)
    if "first_k_dense_replace" in config._fields:  # one dense layer, then layers with experts
        config = config._replace(first_k_dense_replace=1)
    mesh = make_mesh(**parse_mesh(axes), devices=devices_of(topology))
    report, text = dry_run(Plan(model, config, **use), mesh)
    print(report)
    return report, text


# ---- decoding, Llama 3.1 70B in int8 on sixteen TPU v5e


LAYERS, SLOTS, CAPACITY = 3, 8, 2048
# Per device: 4 of 64 query heads, and 1 of 8 key/value heads (each is on two devices).
D, F, Q, KV, V = 8192, 28672 // 16, 4 * 128, 128, 128256 // 16
CACHE_VALUES = SLOTS * CAPACITY * KV  # bytes of one layer's keys
LAYER_CACHE = 2 * SLOTS * CAPACITY * (KV + 4)  # keys and values, with a float32 scale per token
EMBEDDING = V * D + 4 * V


@functools.cache
def decode_70b():
    use = dict(cache_dtype=jnp.int8, storage=INT8)
    return dry("llama3", "llama3.1-70b", LAYERS, "v5e:4x4", "expert=8,tensor=2", **use)


@pytest.mark.full
def test_each_device_holds_its_sixteenth_of_the_weights_and_the_cache_of_one_head():
    report, _ = decode_70b()
    shapes = [(Q, D), (KV, D), (KV, D), (D, Q), (F, D), (F, D), (D, F)]
    layer = sum(out * into + 4 * out for out, into in shapes) + 2 * (2 * D)  # plus two norms
    assert report.weights == 2 * EMBEDDING + LAYERS * layer + 2 * D
    assert report.cache == LAYERS * LAYER_CACHE
    state = 7 * TILE  # lengths, tokens and the five sampling parameters
    padding = 2 * 4 * (-V % 128)  # in the scales of embedding and head
    assert report.arguments == report.weights + report.cache + state + padding


def test_a_decoding_step_updates_its_state_in_place_and_reads_every_weight_once():
    report, text = decode_70b()
    assert report.aliased == report.cache + 7 * TILE
    assert report.outputs - report.aliased <= 2 * TILE  # a copy of the tokens, for the caller
    assert len(re.findall(r"(?:may|must)-alias", text.splitlines()[0])) == 4 * LAYERS + 7
    assert report.temporaries < LAYER_CACHE  # measured: 2.8 MB; the bound is 4.3 MB
    # Attention's loop over the filled cache counts once.
    assert report.weights - EMBEDDING < report.traffic < 1.05 * report.weights


def test_a_decoding_step_copies_no_cache_and_no_weight_in_main_memory():
    """The largest write is 66 KB, to the scales of one layer's keys. The smallest weight matrix has
    1 MB. Branches count; prefetches into on-chip memory do not."""
    _, text = decode_70b()
    program = parse(text)
    writes = [(moved(program, ops, op)[1], op.kind, op.type) for op, ops, *_ in executed(program)]
    assert max(writes)[0] < min(CACHE_VALUES, KV * D), max(writes)
    assert sum(size for size, _, _ in writes) < CACHE_VALUES
    assert f"s8[{SLOTS},1,{CAPACITY},{KV}]" in text  # the cache keeps its shape


def test_a_decoding_step_reduces_activations_twice_a_layer_and_sampling_sends_little():
    report, _ = decode_70b()
    every_step = [c for c in report.collectives if not c.conditional]
    assert every_step == [  # one more is for the embedding
        Collective("all-reduce", "bf16[8,1,8192]", n := 2 * LAYERS + 1, n * 8 * D * 2, False),
        Collective("all-reduce", "f32[8]", 1, 8 * 4, False),  # the largest logit
        Collective("all-reduce", "s32[8]", 1, 8 * 4, False),  # the lowest id that has it
    ]
    branches = [c for c in report.collectives if c.conditional]  # greedy steps do not take these
    assert {(c.kind, c.shape): c.times for c in branches} == {
        ("all-reduce", "f32[3,8]"): 2 * 16,  # steps of the searches for top-k and top-p
        ("all-reduce", "f32[8]"): 2,
        ("all-reduce", "s32[8]"): 1,
        ("all-gather", "f32[16,1,8]"): 1,
    }
    assert sum(c.bytes for c in branches) < 4096


# Measured cycles and operations of two layers, for 8 and for 64 slots. Older JAX uses other
# operations to split rows of 4-bit experts into even and odd columns; at 64 slots, they take a
# tenth more.
NARROW = {
    ("gpt_oss", "gpt-oss-20b", "bfloat16"): ((992_000, 260), (1_328_000, 272)),
    ("gpt_oss", "gpt-oss-20b", "int8"): ((1_018_000, 296), (1_358_000, 324)),
    ("llama3", "llama3.2-1b", "bfloat16"): ((483_000, 135), (560_000, 150)),
    ("llama3", "llama3.2-1b", "int8"): ((504_000, 170), (588_000, 197)),
}


@pytest.mark.full
@pytest.mark.parametrize("slots", [8, 64])
@pytest.mark.parametrize("family, size, cache", NARROW, ids=lambda x: x)
def test_heads_of_64_are_written_without_a_loop_over_the_slots(family, size, cache, slots):
    """When they were stored as two arrays of transposed rows, a step took 1.2 to 170 million
    cycles, and up to 4,700 sequential operations."""
    axes, use = (
        "expert=4" if family == "gpt_oss" else "tensor=4",
        dict(cache_dtype=jnp.dtype(cache)),
    )
    report, text = dry(family, size, 2, "v5e:2x2", axes, slots=slots, **use)
    in_branches = [branch for op, _, _, branch in executed(parse(text)) if op.kind == "while"]
    assert all(in_branches), "only a step that samples may loop"
    reached_cycles, reached_operations = NARROW[family, size, cache][slots == 64]
    assert report.cycles < 1.05 * reached_cycles
    assert report.operations < 1.05 * reached_operations
    assert report.aliased >= report.cache


# Measured for a dense layer and one of experts, to decode or to read 512 tokens: cycles, sequential
# operations, and megabytes of temporaries.
LATENT = {
    ("deepseek_r1", "deepseek-r1", "v5e:8x8", INT8, 0): (337_000, 283, 2.8),
    ("deepseek_r1", "deepseek-r1", "v5e:8x8", None, 0): (763_000, 309, 2.8),
    ("deepseek_r1", "deepseek-r1", "v5e:8x8", None, 512): (2_318_000, 350, 9.9),
    ("kimi_k2", "kimi-k2-instruct", "v6e:8x8", None, 0): (560_000, 270, 2),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "case", LATENT, ids=lambda case: f"{case[1]}-{'int8' if case[3] else 'fp8'}-{case[4]}"
)
def test_latent_attention_and_hundreds_of_experts_copy_no_cache_and_widen_no_stack(case):
    """On 64 devices, in fp8 as published and in int8."""
    family, size, topology, storage, prompt = case
    report, _ = dry(family, size, 2, topology, "expert=64", storage=storage, prompt=prompt)
    reached = (report.cycles, report.operations, report.temporaries / 2**20)
    print(reached)
    assert all(x < 1.05 * bound for x, bound in zip(reached, LATENT[case], strict=True))
    assert report.aliased >= report.cache
    reduced = [c for c in report.collectives if not c.conditional and "7168" in c.shape]
    assert sum(c.times for c in reduced) == 2 * 2 + 1
    if not prompt:
        shape = importlib.import_module(f"{family}.shapes").SHAPES[size]
        stack = shape["n_routed_experts"] // 64 * shape["moe_intermediate_size"] * 7168
        assert report.temporaries < min(stack, report.cache / 2)


@pytest.mark.full
def test_a_decoding_step_of_narrow_heads_moves_its_weights_and_its_caches_once():
    """Llama 3.2 1B on four devices. A TPU lays out heads of 64 differently from those of 128."""
    report, _ = dry("llama3", "llama3.2-1b", LAYERS, "v5e:2x2", "tensor=4")
    assert report.traffic < 1.01 * (report.weights + report.cache)


# ---- reading a prompt, Llama 3.1 8B on four devices


TOKENS, PROMPT_LAYERS, SHARDS = 8192, 2, 4
SCORES = 4 * TOKENS * TOKENS  # bytes of one head's float32 scores; a device has 8 heads
RESIDUAL = TOKENS * 4096  # numbers in the activations between layers


@pytest.mark.parametrize(
    "topology, dtype",
    [
        ("cpu:8", "float32"),
        pytest.param("cpu:8", "bfloat16", marks=pytest.mark.full),
        pytest.param("v5e:2x2", "bfloat16", marks=pytest.mark.full),
    ],
)
def test_a_prompt_of_8192_tokens_needs_little_more_memory_than_its_activations(topology, dtype):
    """A device's scores would take 2147 MB, and those of one head 268 MB. Measured: 506 to 537 MB
    on CPU (bound: 671), where all activations are float32, and 196 MB on TPU (bound: 268). No
    array, also in fusions, is tokens by tokens. The cache is filled in place."""
    use = dict(capacity=TOKENS, prompt=TOKENS, dtype=jnp.dtype(dtype), cache_dtype=jnp.dtype(dtype))
    report, text = dry("llama3", "llama3.1-8b", PROMPT_LAYERS, topology, f"tensor={SHARDS}", **use)
    on_tpu = topology.startswith("v5e")
    bound = 4 * 2 * RESIDUAL if on_tpu else 5 * 4 * RESIDUAL
    assert report.temporaries < bound < 8 * SCORES
    shapes = {tuple(int(n) for n in s.split(",") if n) for _, _, s, _ in ARRAY.findall(text)}
    tables = {(128256 // SHARDS, 4096)}  # the embedding and the head
    assert {shape for shape in shapes if math.prod(shape) >= TOKENS * TOKENS} <= tables
    assert (1, TOKENS, 4096) in shapes
    heads = 8 // SHARDS
    assert report.cache == PROMPT_LAYERS * 2 * heads * TOKENS * 128 * jnp.dtype(dtype).itemsize
    state = 7 * (TILE if on_tpu else 4)  # length, token and sampling of one slot
    assert report.aliased == report.cache + state
    calls = [line for line in text.splitlines() if KERNEL in line]  # one in each layer, on TPU
    assert len(calls) == (PROMPT_LAYERS if on_tpu else 0)
    assert all("prefill_attention" in line for line in calls)


# bfloat16 is left out: to update such a cache, the older compiler writes it out in float32.
@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.int8], ids=["f32", "int8"])
def test_on_cpu_a_decoding_step_updates_its_whole_state_in_place(dtype):
    use = dict(slots=6, capacity=1030, cache_dtype=dtype)
    report, _ = dry("llama3", hf_config("llama3", "scaled"), 2, "cpu:8", "data=2,tensor=2", **use)
    assert report.aliased == report.cache + 7 * 4 * 6 // 2
    assert report.temporaries < report.cache / 2


# ---- the command line


ENVIRONMENT = {k: os.environ[k] for k in ("PATH", "HOME") if k in os.environ}


def command(family, *args):
    """Returns the exit code, and what was written to stdout and to stderr."""
    words = [sys.executable, "-m", f"{family}.main", *args]
    use = dict(cwd=ROOT, env=ENVIRONMENT, text=True)
    done = subprocess.run(words, capture_output=True, timeout=300, **use)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def shape(tmp_path):
    """The path of a tiny config.json."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(hf_config("llama3", "scaled")))
    return str(file)


def test_the_command_prints_what_a_device_has_and_does_in_both_steps(shape):
    options = ["--dry-run", "cpu:4", "--mesh", "data=2,tensor=2", "--kv-quant", "int8"]
    options += ["--max-len", "256", "--prompt-tokens", "64"]
    code, out, err = command("llama3", "--ckpt", shape, "--layers", "2", *options)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == (
        "config.json: float32 weights, int8 cache; 8 slots of 256 positions, 2 layers"
    )
    assert lines[1].startswith("cpu:4: 4 devices") and lines[1].endswith("; data=2,tensor=2")
    assert re.fullmatch(r"serving takes \S+ GB a device", lines[2])
    assert "not measured" in lines[4]  # there are no figures for this CPU
    assert lines[6].split() == ["decode", "prompt", "of", "64"]
    figures = [re.split(r" {2,}", line) for line in lines[7:] if not line.startswith("  ")]
    figures = [line for line in figures if len(line) > 1]
    assert [line[0] for line in figures] == [
        *("weights", "cache", "temporaries", "memory of the step", "cache in place", "traffic"),
        *("collectives", "operations", "cycles", "compiled in"),
        *("floor: memory", "floor: products", "floor: links"),
    ]
    assert all(len(line) == 3 for line in figures)
    assert ["cache in place", "100%", "100%"] in figures
    assert re.search(r"\n +5 x all-reduce +f32\[4,1,\d+\]\n", out)
    assert re.search(r"\n +\d+ x all-reduce +\S+ +\(when sampling\)\n", out)


@pytest.mark.parametrize(
    "family, ckpt, options, topology, says",
    [
        ("llama3", "float32", "", "v5e:1x1", "float32 weights, float32 cache"),
        ("llama3", "float32", "--dtype bfloat16", "v5e:1x1", "bfloat16 weights, bfloat16 cache"),
        ("llama3", "float32", "", "cpu:1", "float32 weights, float32 cache"),
        ("llama3", "bfloat16", "", "cpu:1", "bfloat16 weights, float32 cache"),
        ("llama3", "bfloat16", "--quant int8", "v5e:1x1", "int8 weights, bfloat16 cache"),
        ("gpt2", "gpt2-xl", "", "h100:1", "float32 weights, float32 cache"),
        ("gpt2", "hub", "", "v5e:1x1", "float32 weights, float32 cache"),
    ],
)
def test_a_dry_run_has_the_dtypes_of_a_run(family, ckpt, options, topology, says, tmp_path):
    """They are the checkpoint's: from config.json or, if that names none, from the files."""
    if ckpt in ("float32", "bfloat16"):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(hf_config("llama3", "scaled") | dict(torch_dtype=ckpt)))
        ckpt = str(file)
    elif ckpt == "hub":
        shutil.copytree(FIXTURES / "gpt2" / "hub", tmp_path / "hub")
        file = tmp_path / "hub" / "config.json"
        hf = json.loads(file.read_text())
        hf.pop("torch_dtype", hf.pop("dtype", None))
        file.write_text(json.dumps(hf))
        ckpt = str(tmp_path / "hub")
    args = parser(family).parse_args(["--ckpt", ckpt, *options.split(), "--dry-run", topology])
    plan = plan_of(model_of(family), args, topology)
    assert stored(plan) == says
    if topology == "cpu:1":  # this machine
        opened = open_model(model_of(family), ckpt, random=True, dtype=args.dtype)
        assert (opened.dtype, opened.storage) == (plan.dtype, plan.storage)


@pytest.mark.full
def test_several_topologies_and_meshes_are_several_reports(shape):
    options = ["--dry-run", "cpu:4", "v5e:2x2", "--mesh", "tensor=2", "data=2", "--layers", "1"]
    options += ["--max-len", "128", "--prompt-tokens", "16"]
    code, out, err = command("llama3", "--ckpt", shape, *options)
    assert (code, err) == (0, "")
    heads = out.split("\n\n")[::2]
    told = [re.search(r"^(\S+): .* ([a-z]+=2)$", head, re.M) for head in heads]
    pairs = itertools.product(("cpu:4", "v5e:2x2"), ("tensor=2", "data=2"))
    assert [found.groups() for found in told] == list(pairs)
    assert out.count("serving takes") == 4


def test_a_topology_of_cpus_has_as_many_devices_as_it_says():
    assert [len(devices_of(name)) for name in ("cpu", "cpu:1", "cpu:2", "cpu:8")] == [1, 1, 2, 8]


def test_where_it_fits_it_is_said_how_much_more_would():
    """The weights take 2 GB, and each slot of 512 positions takes 1 GB."""
    config, GB = model_of("llama3").config_from_hf(hf_config("llama3", "scaled")), 10**9
    plan = Plan(model_of("llama3"), config._replace(max_position_embeddings=700), 8, 512)
    decode, read = (
        Report("", 1, 2 * GB, n * GB, n * GB, 0, 0, arguments=(2 + n) * GB) for n in (8, 1)
    )
    run = DryRun(plan, "", make_mesh(devices=devices_of("v5e:1x1")), False, decode, read)
    text, more = "serving takes 11.00 GB of 17.18 GB a device", "14 slots of 512, or 8 of 700"
    assert f"\nfits: {text}; room for {more} positions\n" in show(run)
    refused = run._replace(read=read._replace(refusal="Too much."))
    assert f"\ndoes not fit: {text}\nToo much.\n" in show(refused)


@pytest.mark.full
def test_as_json_the_figures_are_numbers_and_floors_and_room_follow_from_them():
    """Of llama3's embedded model, on a mesh that the command chose."""
    code, out, err = command("llama3", "--dry-run", "v5e:2x2", "--max-len", "128", "--json")
    assert (code, err) == (0, "")
    [run] = json.loads(out)
    chip, decode, prompt = run["chip"], run["steps"]["decode"], run["steps"]["prompt"]
    assert run["fits"] and run["mesh_chosen"] and run["chip"]["memory"] == 16 << 30
    assert decode["memory"] < run["memory"] < chip["memory"]
    floor = decode["floor_ms"]
    close = functools.partial(math.isclose, abs_tol=1e-6)  # figures are rounded
    assert close(floor["memory"], 1e3 * decode["traffic"] / chip["bandwidth"])
    assert close(floor["products"], 1e3 * decode["products"] / chip["flops"])
    sent = sum(c["bytes"] for c in decode["collectives"] if not c["conditional"])
    assert close(floor["links"], 1e3 * 2 * sent / chip["links"])
    # With the most slots, or the most positions, the step fills the memory.
    free = chip["memory"] - run["memory"]
    slot, rows = decode["cache"] / run["slots"], parse_mesh(run["mesh"]).get("data", 1)
    assert 0 <= free - (run["most_slots"] - run["slots"]) * slot < slot * rows
    assert run["most_positions"] == 512  # the model's own limit, far below what fits
    assert (decode["cache"] + prompt["cache"]) / run["capacity"] * 512 < free


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    "args, message",
    [
        ("--ckpt llama9", "'llama9' is no file, no directory, and none of"),
        ("--dry-run v9:2x2", "'v9:2x2' is unknown: give one of v4, v5e"),
        ("--dry-run v5e:9x9", "'v5e:9x9': "),
        ("--dry-run v5e:0x0", "'v5e:0x0': each side of a slice has 1 to 16 chips"),
        ("--dry-run v6e:32x32", "'v6e:32x32': each side of a slice has 1 to 16 chips"),
        ("--dry-run cpu:0", "'cpu:0': cpu:N takes N of JAX's 1 CPU devices here"),
        ("--dry-run cpu:9999999", "'cpu:9999999': cpu:N takes N of JAX's 1024 CPU devices here"),
        ("--dry-run h100:9", "'h100:9' is not h100:1 to h100:8"),
        ("--dry-run v5e:2x2 --mesh tensor=8", "tensor=8 needs 8 devices, but only 4"),
        ("--mesh tensor=0", "--mesh 'tensor=0': expected data=N"),
        ("--dry-run cpu:64 --mesh tensor=64", "64 devices, but the model has only"),
        ("--mesh data=3", "8 slots cannot be split evenly over data=3"),
        ("--layers 9", "--layers 9: the model has only 2"),
        ("--max-len 100000000", "--max-len 100000000 is above max_position_embeddings"),
        ("--prompt Hello", "--prompt does not go with --dry-run"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2(shape, args, message):
    dry = [] if "--dry-run" in args else ["--dry-run", "cpu:4"]
    checkpoint = [] if "--ckpt" in args else ["--ckpt", shape]
    code, out, err = command("llama3", *checkpoint, *dry, *args.split())
    assert (code, out) == (2, "")
    assert re.fullmatch(f"error: .*{re.escape(message)}.*\n", err)


def test_options_of_a_dry_run_need_one(shape):
    code, out, err = command("llama3", "--ckpt", shape, "--layers", "1", "--prompt", "x")
    assert (code, out) == (2, "")
    assert err == "error: --layers goes with --dry-run only\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda x: x.name)
def test_a_signal_ends_a_dry_run_while_it_compiles(number):
    """The compiler would take half a minute, and starts after the conversion that JAX logs."""
    words = [sys.executable, "-m", "llama3.main", "--ckpt", "llama3.1-8b", "--layers", "6"]
    use = dict(cwd=ROOT, env=ENVIRONMENT | dict(JAX_LOG_COMPILES="1"), text=True)
    with subprocess.Popen([*words, "--dry-run", "cpu"], stderr=subprocess.PIPE, **use) as process:
        while "MLIR module conversion jit(generate)" not in (line := process.stderr.readline()):
            assert line, "it has ended"
        process.send_signal(number)
        try:
            process.communicate(timeout=5)
        finally:
            process.kill()
    assert process.returncode == -number


@pytest.mark.parametrize(
    "topology, package, extra",
    [("v5e:2x2", "libtpu", "tpu"), ("h100:2", "jax_cuda13_plugin", "hopper")],
)
def test_without_the_compiler_of_a_chip_one_line_names_what_to_install(
    monkeypatch, topology, package, extra
):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == package else find(n))
    with pytest.raises(ValueError, match=rf"needs {package} .*: pip install -e '.\[{extra}\]'"):
        devices_of(topology)


def test_a_config_that_lacks_a_number_gets_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 5}')
    code, out, err = command("llama3", "--ckpt", str(tmp_path / "config.json"), "--dry-run", "cpu")
    assert (code, out) == (2, "")
    assert err == "error: config.json has no model_type, which this model needs\n"


@pytest.mark.full
def test_what_does_not_fit_is_shown_with_the_words_of_the_compiler():
    options = ["--ckpt", "llama3.1-70b", "--layers", "12", "--dry-run", "v5e:2x2"]
    code, out, err = command("llama3", *options, "--mesh", "tensor=1")
    assert (code, err) == (0, "")
    verdict, words = out.splitlines()[2:4]
    assert re.fullmatch(r"does not fit: serving takes 2\d\.\d\d GB of 17\.18 GB a device", verdict)
    assert re.fullmatch(r"RESOURCE_EXHAUSTED: .*memory.*", words)

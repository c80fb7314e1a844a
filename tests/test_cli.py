"""The command line, in a subprocess if that matters, and the errors that it gives for bad input."""

import io
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jsonschema
import numpy as np
import pytest
from engine import ENVIRONMENT, FIXTURES, hf_config
from safetensors.numpy import load_file, save_file

from common.command import cli
from common.command.arguments import parser
from common.command.converse import encode_prompt, read_prompts
from common.serving.load import load, open_model
from common.serving.session import start_session
from common.sharding import make_mesh
from llama3 import model

ROOT = Path(__file__).parent.parent
EMBEDDED = ROOT / "llama3" / "embedded"
NO_TEXT = "[the prompt is not valid Unicode text; give it as UTF-8"
LONE = ["--ckpt", str(FIXTURES / "llama3" / "scaled" / "config.json"), "--random"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture
def run():
    def call(*args, stdin="", check=True, **environment):
        kept = dict(capture_output=True, cwd=ROOT, env=ENVIRONMENT | environment)
        command = [sys.executable, "-m", "llama3.main", *args]
        bytes_too = dict(encoding="utf-8", errors="surrogateescape")
        done = subprocess.run(command, input=stdin, timeout=300, **kept, **bytes_too)
        assert not check or done.returncode == 0, done.stderr
        return done

    return call


def records(done):
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def instruct(tmp_path):
    """The path of a copy of the embedded model with a chat template."""
    shutil.copytree(EMBEDDED, tmp_path / "instruct")
    file = tmp_path / "instruct" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": TEMPLATE}))
    return str(tmp_path / "instruct")


def test_without_arguments_the_embedded_model_speaks_on_stdout_and_reports_on_stderr(run):
    done = run("--max-new-tokens", "40")
    assert len(done.stdout.strip()) > 40
    line = r"\[without a prompt, the demo model continues ACT I\.\]\n"
    line += r"\[load [\d.]+ s; first token after [\d.]+ s; compile [\d.]+ s in all; "
    line += r"prefill \d+ tokens at \d+/s; "
    line += r"decode 39 tokens at [\d.]+/s; \d+% of the \d+ GB/s read floor\]\n"
    assert re.fullmatch(line, done.stderr)


def test_many_prompts_queue_and_answer_in_order_as_each_would_alone(run, tmp_path):
    prompts = ["HAMLET.\nTo be", "KING.", "Enter a messenger, with letters for the", "Exit", "What"]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts[:3]).replace("HAMLET.\nTo be", "HAMLET. To be") + "\n")
    prompts[0] = "HAMLET. To be"
    more = ["--prompt", prompts[3], "--prompt", prompts[4]]
    options = ["--max-new-tokens", "12", "--json", "--slots", "2", "--max-len", "64"]
    sampled = ["--temperature", "0.8", "--top-k", "40", "--seed", "3"]
    done = records(run("--prompts", str(file), *more, *options, *sampled))
    assert [r["prompt"] for r in done] == [*prompts[3:], *prompts[:3]]
    assert [r["index"] for r in done] == [0, 1, 2, 3, 4]
    sampled[-1] = "6"
    alone = records(run("--prompt", prompts[1], *options, *sampled))[0]
    assert alone["tokens"] == done[3]["tokens"], "prompt 3 uses seed 3 + 3"
    assert all(len(r["tokens"]) == 12 and r["finish_reason"] == "length" for r in done)


@pytest.mark.full
def test_answers_fit_a_schema(run, tmp_path):
    whole = dict(type="object", required=["who", "act"], additionalProperties=False)
    whole["properties"] = dict(who=dict(type="string", maxLength=9), act=dict(enum=[1, 2, "three"]))
    (tmp_path / "schema.json").write_text(json.dumps(whole))
    options = ["--json-schema", str(tmp_path / "schema.json"), "--repetition-penalty", "1.2"]
    done = run("--prompt", "HAMLET.", "--prompt", "Enter", "--json", "--max-len", "64", *options)
    for record in records(done):
        assert record["finish_reason"] == "stop"
        jsonschema.validate(json.loads(record["text"]), whole)
    cut = run("--prompt", "HAMLET.", *options, "--max-new-tokens", "3")
    assert cut.stderr.startswith("[the JSON ends here, cut off: see --max-new-tokens]\n")


@pytest.mark.full
def test_an_empty_line_stands_between_the_texts_of_many_prompts(run):
    args = ["--prompt", "KING.", "--prompt", "Enter", "--max-new-tokens", "12", "--max-len", "64"]
    args += ["--slots", "2"]
    texts = [r["text"] for r in records(run(*args, "--json"))]
    assert run(*args).stdout == "\n".join(text + "\n" for text in texts)


@pytest.mark.full
def test_standard_input_is_one_prompt(run):
    args = ["--max-new-tokens", "8", "--json", "--max-len", "64"]
    from_stdin = records(run(*args, stdin="Enter HAMLET"))[0]
    assert from_stdin["tokens"] == records(run(*args, "--prompt", "Enter HAMLET"))[0]["tokens"]


@pytest.mark.full
def test_a_mesh_of_four_gives_the_same_greedy_text_as_one_device(run):
    args = ["--prompt", "KING.", "--max-new-tokens", "24", "--max-len", "64", "--dtype", "float32"]
    one = run(*args)
    assert len(one.stdout) > 10
    assert run(*args, "--mesh", "tensor=4").stdout == one.stdout
    assert run(*args, "--mesh", "data=2,expert=2").stdout == one.stdout


@pytest.mark.full
def test_without_a_mesh_all_devices_serve_and_the_summary_names_the_one_that_was_chosen(run):
    args = ["--prompt", "KING.", "--max-new-tokens", "8", "--max-len", "64"]
    done = run(*args, JAX_NUM_CPU_DEVICES="4")
    assert done.stderr.startswith("[mesh tensor=4; load ")
    assert run(*args).stderr.startswith("[load ")


COUNTED = """
import sys
import jax
from common.command.cli import main
from llama3 import model

events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
main(model, ["--prompt", "KING.", "--max-new-tokens", "4", "--max-len", "72", *sys.argv[1:]])
print(*(events.count(f"/jax/compilation_cache/cache_{x}") for x in ("hits", "misses")))
"""


@pytest.mark.full
def test_a_second_run_finds_its_programs_compiled(tmp_path):
    def hits_and_misses(*more):
        done = subprocess.run(
            [sys.executable, "-c", COUNTED, *more],
            **dict(cwd=ROOT, env=ENVIRONMENT | dict(XDG_CACHE_HOME=str(tmp_path))),
            **dict(capture_output=True, text=True, timeout=300),
        )
        assert done.returncode == 0, done.stderr
        return [int(x) for x in done.stdout.split()[-2:]]

    hits, misses = hits_and_misses()
    assert hits == 0 and misses > 2
    assert hits_and_misses() == [misses, 0]


IMPORTED = """
import sys
from common.command.cli import main
from llama3 import model

main(model, ["--max-new-tokens", "2"])
print("\\n", [name for name in sys.modules if "pallas" in name])
"""


def test_on_cpu_a_run_does_not_wait_for_the_kernels_of_other_platforms():
    command = [sys.executable, "-c", IMPORTED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n []\n")


@pytest.mark.full
def test_a_profile_is_written_by_a_user_who_has_set_nothing(tmp_path):
    """libtpu is installed with the tests. Without a TPU, it must not crash the profiler."""
    set_here = ("JAX_PLATFORMS", "TF_CPP_MIN_LOG_LEVEL", "TPU_SKIP_MDS_QUERY")
    env = {k: v for k, v in ENVIRONMENT.items() if k not in set_here}
    kept = dict(capture_output=True, text=True, cwd=ROOT, env=env, stdin=subprocess.DEVNULL)
    command = [sys.executable, "-m", "llama3.main", "--prompt", "KING.", "--profile"]
    done = subprocess.run([*command, str(tmp_path)], **kept)
    assert done.returncode == 0 and done.stderr.count("\n") == 1, done.stderr
    assert [*tmp_path.glob("**/*.trace.json.gz")]


@pytest.mark.full
def test_an_instruct_checkpoint_gets_its_template_unless_raw(run, instruct):
    args = ["--ckpt", instruct, "--prompt", "Speak.", "--max-new-tokens", "4", "--max-len", "64"]
    args.append("--json")
    raw, templated = (records(run(*args, *more))[0] for more in (["--raw"], []))
    with_system = records(run(*args, "--system", "You are a king."))[0]
    assert raw["prompt_tokens"] < templated["prompt_tokens"] < with_system["prompt_tokens"]


def test_a_conversation_keeps_its_cache_between_turns(run, instruct):
    args = ["--ckpt", instruct, "--chat", "--max-new-tokens", "6"]
    done = run(*args, stdin="Good morrow, my lord.\n\nMy caf\udce9!\nWhat news?\n")
    assert re.findall(r"(.*); this line is left out", done.stderr) == [NO_TEXT]
    reused = re.search(r"(\d+) prompt tokens already cached", done.stderr)
    assert int(reused[1]) > 8
    assert done.stdout.count("\n") >= 2


RECOMMENDED = dict(do_sample=True, temperature=0.6, top_p=0.9, top_k=20, num_beams=4)


@pytest.mark.parametrize(
    "options, settings",
    [
        ("", (0.0, 0, 1.0, 0.0)),
        ("--sampling published", (0.6, 20, 0.9, 0.0)),
        ("--sampling published --temperature 0.3 --min-p 0.1", (0.3, 20, 0.9, 0.1)),
        ("--temperature 0", (0.0, 0, 1.0, 0.0)),
        ("--top-k 5 --temperature 1", (1.0, 5, 1.0, 0.0)),
    ],
)
def test_greedy_is_the_default_and_what_is_recommended_can_be_asked_for(
    instruct, options, settings, monkeypatch, capsys
):
    (Path(instruct) / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    planned, plan = [], cli.plan_prompts
    monkeypatch.setattr(cli, "plan_prompts", lambda *x: (planned.append(plan(*x)[0]), sys.exit(2)))
    with pytest.raises(SystemExit):
        cli.main(model, ["--ckpt", instruct, "--prompt", "x", *options.split()])
    (request,) = planned[0]
    assert (request.temperature, request.top_k, request.top_p, request.min_p) == settings
    told = "[generation_config.json: num_beams=4 is not applied]"
    assert capsys.readouterr().err.splitlines() == [told]


def test_a_file_in_float16_runs_in_float32_on_cpu_and_elsewhere_it_is_noted(tmp_path, monkeypatch):
    tensors = load_file(FIXTURES / "llama3" / "tied" / "model.safetensors")
    tensors = {name: x.astype(np.float16) for name, x in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = hf_config("llama3", "tied") | dict(torch_dtype="float16")
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("common.serving.load.load_tokenizer", lambda directory: None)
    mesh = make_mesh()
    here = load(model, str(tmp_path), mesh=mesh)
    assert {x.dtype for x in jax.tree.leaves(here.weights)} == {here.dtype} == {np.dtype("float32")}
    np.testing.assert_array_equal(here.weights.norm, tensors["model.norm.weight"])
    other = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]), shape=mesh.shape)
    there = [open_model(model, str(tmp_path), mesh=other, dtype=x) for x in (None, "float32")]
    note = "a file in float16 is computed in bfloat16; --dtype float32 is exact"
    assert [(x.dtype.name, x.notes) for x in there] == [("bfloat16", (note,)), ("float32", ())]
    assert here.notes == ()


@pytest.mark.parametrize("options, noted", [("", True), ("--raw", False)])
def test_prompts_that_get_no_template_and_ends_that_cannot_come_are_noted(
    tmp_path, monkeypatch, capsys, options, noted
):
    shutil.copytree(EMBEDDED, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 2048]}')
    monkeypatch.setattr(cli, "plan_prompts", lambda *_: sys.exit(2))
    with pytest.raises(SystemExit):
        cli.main(model, ["--ckpt", str(tmp_path), "--prompt", "x", *options.split()])
    told = ["[token 2048 ends no reply: it is above the model's vocabulary]"]
    told += ["[no chat template: the text of a prompt is continued as it is]"] * noted
    assert capsys.readouterr().err.splitlines() == told


@pytest.mark.full
def test_random_weights_run_from_a_config_alone(run, tmp_path):
    config = json.loads((EMBEDDED / "config.json").read_text())
    file = tmp_path / "shape.json"
    file.write_text(json.dumps({**config, "num_hidden_layers": 1}))
    args = ["--ckpt", str(file), "--random", "--max-new-tokens", "4", "--prompt", "x", "--json"]
    assert len(records(run(*args))[0]["tokens"]) == 4
    assert len(records(run(*args, "--quant", "int8"))[0]["tokens"]) == 4


@pytest.mark.one_in(4)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_and_sigterm_end_with_what_was_generated(as_json, number):
    args = ["--max-new-tokens", "300", "--prompt", "KING.", "--prompt", "Enter", "--slots", "1"]
    command = [sys.executable, "-m", "llama3.main", *args, *["--json"] * as_json]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, cwd=ROOT, env=ENVIRONMENT) as process:
        first = process.stdout.readline() if as_json else process.stdout.read(20)
        process.send_signal(number)
        rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors.decode()
    assert errors.startswith(b"[load") and errors.count(b"\n") == 1
    if as_json:
        done, cut = (json.loads(line) for line in (first, rest))
        assert (done["finish_reason"], cut["finish_reason"]) == ("length", "interrupted")
        assert len(done["tokens"]) == 300 > len(cut["tokens"])
    else:
        assert rest.endswith(b"\n")


@pytest.mark.full
def test_a_reader_that_goes_away_is_not_an_error():
    command = (
        f"{sys.executable} -m llama3.main --max-new-tokens 200 | head -c 5; exit ${{PIPESTATUS[0]}}"
    )
    kept = dict(capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=120)
    done = subprocess.run(["bash", "-c", command], **kept)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_help_names_every_option_and_gives_examples(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(model, ["--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    options = "ckpt revision prompt prompts chat system raw max-new-tokens temperature top-k top-p"
    options += (
        " min-p seed max-len slots dtype quant kv-quant mesh random json profile"
        " distributed coordinator process adapter repetition-penalty json-schema"
    )
    assert all(f"--{name}" in text for name in options.split())
    assert "examples:" in text


def test_what_the_devices_refuse_is_one_line(monkeypatch, capsys):
    def run(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nand a page more")

    monkeypatch.setattr(cli, "run", run)
    with pytest.raises(SystemExit, match="2"):
        cli.main(model, ["--prompt", "x"])
    assert capsys.readouterr().err == "error: RESOURCE_EXHAUSTED: Out of memory\n"


LONG = " ".join(["prologue"] * 400)


def test_more_than_the_memory_of_a_device_is_refused(monkeypatch):
    """With the weights and caches of a model that drafts."""
    llama = load(model, dtype="float32", mesh=make_mesh())
    session = start_session(llama, 3, 256)
    cache = jax.tree.leaves((session.states[0].cache, session.prompts[0].cache))
    need = sum(x.nbytes for x in jax.tree.leaves(llama.weights) + cache)
    for models, room in (([llama], need), ([llama, llama], 2 * need)):
        monkeypatch.setattr(cli, "memory_of", lambda device, room=room: room)
        cli.check_memory(models, 3, 256, "float32")
        monkeypatch.setattr(cli, "memory_of", lambda device, room=room: room - 1)
        with pytest.raises(ValueError, match=r"3 slots of 256 positions .* use fewer --slots"):
            cli.check_memory(models, 3, 256, "float32")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--mesh", "tensor=0"], "--mesh 'tensor=0': expected data=N"),
        (["--mesh", "rows=2"], "--mesh 'rows=2': expected"),
        (["--mesh", "tensor=2,tensor=2"], "each at most once"),
        (["--draft", "mtp"], "--draft mtp: files of llama3 hold no layer that drafts"),
        (["--draft", "nowhere"], "--draft nowhere: 'nowhere' is neither a directory nor a hub id"),
        (["--draft", "nobody:nowhere"], "--draft nobody:nowhere: there is no nobody/model.py"),
        (["--draft", str(EMBEDDED / "../../gpt2/embedded")], "model_type"),
        (["--draft-tokens", "2"], "--draft-tokens goes with --draft only"),
        (["--draft", f".:{EMBEDDED}"], "there is no ./model.py"),
        (["--draft", "lookup", "--draft-tokens", "33"], "must be at most 32, got 33"),
        (["--keep", "-1"], "argument --keep: must be at least 0, got -1"),
        (["--keep-host", "inf"], "argument --keep-host: must be at most 1000000000000, got inf"),
        (["--process", "2/2"], "'2/2': expected I/N, from 0/N to N-1/N"),
        (["--mesh", "tensor=64"], "needs 64 devices, but only"),
        (
            ["--mesh", "tensor=8"],
            "over expert * tensor = 8 devices, but the model has only 4 query heads",
        ),
        (["--slots", "3", "--mesh", "data=2"], "--slots 3 cannot be split evenly over data=2"),
        (["--slots", "0"], "argument --slots: must be at least 1, got 0"),
        (["--ckpt", "/nowhere/at/all"], "neither a directory nor a hub id"),
        (["--ckpt", "llama3.1-8b"], "llama3.1-8b is a size, without weights: add --random"),
        (["--ckpt", "no-such-org/no-such-model"], "no-such-org/no-such-model"),
        (["--ckpt", str(ROOT / "tests")], "config.json is missing in"),
        (["--prompts", "/nowhere.txt"], "/nowhere.txt"),
        (["--promt", "x"], "--promt is no option; did you mean --prompt? (see --help)"),
        (["--prompt", LONG], "tokens, but the model's context has 512"),
        (["--prompt", "prologue " * 60, "--max-len", "64"], "over the cache's 64 (see --max-len)"),
        (["--max-len", "4096"], "--max-len 4096 is above max_position_embeddings, 512"),
        (["--max-new-tokens", "0"], "argument --max-new-tokens: must be at least 1, got 0"),
        (["--temperature", "-1"], "temperature must be finite and >= 0, got -1.0"),
        (["--top-k", "-1"], "top_k must be"),
        (["--top-p", "0"], "top_p must be in (0, 1], got 0.0"),
        (["--min-p", "1"], "min_p must be in [0, 1), got 1.0"),
        (["--repetition-penalty", "0"], "repetition_penalty must be finite and > 0, got 0.0"),
        (["--json-schema", "/nowhere.json"], "/nowhere.json"),
        (["--json-schema", str(ROOT / "README.md")], "README.md: Expecting value"),
        ([*LONE, "--stop", "."], "--stop and --json-schema need a tokenizer"),
        ([*LONE, "--no-think"], "--no-think needs a chat template"),
        (["--ckpt", str(EMBEDDED / "model.safetensors"), "--random"], "give the directory that it"),
        (["--coordinator", "here"], "'here': give HOST:PORT"),
        (["--seed", "3"], "--seed needs a --temperature above 0"),
        (["--ckpt", str(EMBEDDED.parent)], f"no checkpoint, but {EMBEDDED} is one"),
        (["--seed", "-1"], "argument --seed: must be at least 0, got -1"),
        (["--chat"], "--chat needs a checkpoint with a chat template"),
        (["--chat", "--json"], "--json does not go with --chat"),
        (["--serve", "--top-k", "3"], "--top-k does not go with --serve"),
        (["--serve", "--seed", "3"], "--seed does not go with --serve"),
        (["--serve", "--allow-host", "http://x.y/"], "give the name of a host alone"),
        (["--serve", "--allow-origin", "evil.com"], "'evil.com': give an origin, such as https:"),
        (["--profile", __file__], "File exists; give a directory"),
        (["--profile", f"{__file__}/x"], "Not a directory; give a directory"),
        (["--stop", ""], "stop must be a list of texts, none of them empty"),
        (["--queue", "3"], "--queue goes with --serve only"),
        (["--system", "Be brief."], "--system needs a chat template"),
        (["--ckpt", "llama9-1b", "--random"], "no directory, and none of llama3.2-1b, llama3.2-3b"),
        (["--mesh", "tensor=1000000"], "and N from 1 to 99999"),
        (["--mesh", f"data={10**30}"], "and N from 1 to 99999"),
        (["--mesh", "tensor=99999"], "needs 99999 devices, but only"),
        (["--mesh", "data=99999,expert=99999,tensor=99999"], "devices, but only"),
        (["--slots", str(10**12)], f"and {10**12} slots of 512 positions "),
        (["--ckpt", "absent.gguf"], "absent.gguf: GGUF files are not read"),
        (["--ckpt", str(ROOT / "qwen3" / "embedded")], "run it with python -m qwen3.main"),
        (["--ckpt", "a" * 5000], " [...] "),
        (["--revision", "main"], "--revision goes with --ckpt only"),
        (["--ckpt", str(EMBEDDED), "--revision", "x"], "is a local directory and has no revision"),
        (["--ckpt", "llama3.2-1b", "--random", "--revision", "x"], "has no revision 'x'"),
        (["--show-analysis"], "--show-analysis: no channels in this model's answers"),
        (["--prompts", str(EMBEDDED)], "Is a directory"),
        (["--prompts", str(EMBEDDED / "model.safetensors")], "model.safetensors is not UTF-8 text"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_bad_input_gets_one_line_before_any_weight_is_read(args, message, capsys, monkeypatch):
    monkeypatch.setattr(cli, "read_weights", lambda *_: pytest.fail("weights were loaded first"))
    monkeypatch.setattr("sys.stdin", io.StringIO("a prompt"))
    with pytest.raises(SystemExit) as stop:
        cli.main(model, args)
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert message in captured.err and len(captured.err) < 1000


@pytest.mark.parametrize(
    "variable", ["jax_default_matmul_precision=bogus", "jax_enable_x64=1", "jax_disable_jit=1"]
)
def test_a_variable_that_jax_or_the_library_does_not_take_gets_one_line(run, variable):
    name, value = variable.split("=")
    done = run("--prompt", "x", check=False, **{name.upper(): value})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert name in done.stderr.lower()


@pytest.mark.parametrize("package", ["jax", "tokenizers"])
def test_ctrl_c_while_packages_are_imported_leaves_no_traceback(run, tmp_path, package):
    fake = "import os, time\nfrom signal import *\n"  # a process in the background ignores it
    fake += "if getsignal(SIGINT) is SIG_IGN: signal(SIGINT, default_int_handler)\n"
    fake += "os.kill(os.getpid(), SIGINT)\ntime.sleep(9)\n"
    (tmp_path / f"{package}.py").write_text(fake)
    done = run("--prompt", "x", check=False, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.full
def test_seeds_start_over_after_the_last(run):
    args = ["--prompt", "KING.", "--temperature", "1", "--max-new-tokens", "8", "--slots", "2"]
    both = run(*args, "--prompt", "KING.", "--seed", str(2**32 - 1), "--json")
    second = records(run(*args, "--prompt", "KING.", "--seed", "0", "--json"))[0]
    assert records(both)[1]["text"] == second["text"]


@pytest.mark.full
def test_it_is_said_that_a_slot_was_full(run):
    """It is not said that --max-new-tokens ended a reply."""
    done = run("--prompt", "KING.", "--max-len", "9", "--max-new-tokens", "99")
    assert done.stderr.startswith("[the reply ends here: its slot is full (see --max-len)]\n")
    assert len(run("--prompt", "KING.", "--max-new-tokens", "4").stderr.splitlines()) == 1


def test_a_byte_order_mark_is_no_part_of_a_prompt(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfKING.\nEnter\n")
    args = parser("llama3").parse_args(["--prompts", str(file)])
    assert read_prompts(args) == ["KING.", "Enter"]


SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "head_dim")
SIZES = (*SIZES, "intermediate_size", "num_key_value_heads", "max_position_embeddings")


@pytest.mark.one_in(11)
@pytest.mark.parametrize("size", [0, -3, 2.5, 10**12, 10**30, True, "64", None, [64]], ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_a_config_of_impossible_sizes_gets_one_line(name, size, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "read_weights", lambda *_: pytest.fail("weights were made"))
    config = json.loads((EMBEDDED / "config.json").read_text())
    file = tmp_path / "shape.json"
    file.write_text(json.dumps({**config, name: size}))
    if (name, size) in [("head_dim", None), ("num_key_value_heads", None)]:
        return  # None means that other fields decide
    began = time.monotonic()
    with pytest.raises(SystemExit) as stop:
        cli.main(model, ["--random", "--ckpt", str(file), "--prompt", "x"])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and time.monotonic() - began < 10
    assert error.startswith("error: ") and error.count("\n") == 1 and len(error) < 400, error


def test_only_the_end_of_a_line_ends_a_prompt(tmp_path):
    file, odd = tmp_path / "prompts.txt", "a\x0bb\x0cc\x1cd\x85e\u2028f\u2029g"
    file.write_text(f"{odd}\r\n\nsecond\n \nthird", encoding="utf-8", newline="")
    args = parser("llama3").parse_args(["--prompts", str(file)])
    assert read_prompts(args) == [odd, "second", "third"]


@pytest.mark.full
@pytest.mark.parametrize("text_there_too", [False, True])
def test_a_terminal_shows_the_speed_while_the_text_goes_elsewhere(text_there_too):
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "llama3.main", "--prompt", "HAMLET.", "--max-new-tokens", "9"]
    text = end if text_there_too else subprocess.DEVNULL
    subprocess.run(command, stdout=text, stderr=end, cwd=ROOT, env=ENVIRONMENT, check=True)
    told = os.read(terminal, 1 << 16).decode()
    rates = re.findall(r"(\d+) tokens at [\d.]+/s\r(?!\n)", told)
    assert bool(rates) is not text_there_too and rates == sorted(rates)


def test_no_prompt_at_all_is_an_error_for_a_checkpoint(run, instruct):
    done = run("--ckpt", instruct, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: no prompt: give --prompt, --prompts FILE, --chat, or text on stdin\n"
    )


@pytest.mark.full
def test_weights_with_nan_are_refused_and_where_they_are_allowed_replies_end_as_invalid(
    run, instruct
):
    file = Path(instruct) / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, file)
    args = ["--ckpt", instruct, "--prompt", "x", "--json"]
    done = run(*args, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {file}: model.norm.weight holds NaN or infinity; ")
    assert done.stderr.count("\n") == 1
    done = run(*args, "--allow-nonfinite", check=False)
    assert done.returncode == 1
    assert records(done)[0] | {"seconds": 0} == dict(
        index=0,
        prompt="x",
        text="",
        prompt_tokens=11,
        tokens=[],
        finish_reason="invalid",
        seconds=0,
    )
    assert "[the reply ends here: the model's logits are NaN or infinite, or " in done.stderr


def test_a_damaged_checkpoint_is_one_line_and_no_traceback(run, instruct):
    file = Path(instruct) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])
    done = run("--ckpt", instruct, "--prompt", "x", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and "model.safetensors" in done.stderr
    assert done.stderr.count("\n") == 1


def test_lines_of_json_are_texts_or_conversations(tmp_path, instruct):
    """A conversation goes through the chat template, as --system and --prompt do."""
    file = tmp_path / "prompts.jsonl"
    told = [dict(role="system", content="Be brief."), dict(role="user", content="Who is there?")]
    lines = [dict(prompt="Who is there?"), dict(messages=told)]
    file.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    demo = open_model(model, instruct)

    def ids(*words):
        args = parser("llama3").parse_args(list(map(str, words)))
        return [encode_prompt(demo, args, prompt) for prompt in read_prompts(args)]

    one, two = ids("--prompts", file)
    assert [one] == ids("--prompt", "Who is there?")
    assert [two] == ids("--prompt", "Who is there?", "--system", "Be brief.") != [one]
    (none,) = ids("--prompt", "Who is there?", "--system", "")
    assert len(one) < len(none) < len(two)  # a message without content
    with pytest.raises(ValueError, match="--system needs a chat template"):
        ids("--prompt", "Who is there?", "--system", "", "--raw")
    with pytest.raises(ValueError, match="a line with messages needs a chat template"):
        ids("--prompts", file, "--raw")
    with pytest.raises(ValueError, match="--system does not go with messages"):
        ids("--prompts", file, "--system", "Be kind.")
    (tmp_path / "more.txt").write_text("Who is there?")
    assert ids("--prompts", file, "--prompts", tmp_path / "more.txt") == [one, two, one]


@pytest.mark.parametrize(
    "line", ["Who?", '"Who?"', "{}", '{"prompt": 3}', '{"messages": []}', '{"prompt": "", "n": 1}']
)
def test_another_line_of_json_is_refused_by_its_number(line, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n' + line)
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2: expected {.prompt.: "):
        read_prompts(parser("llama3").parse_args(["--prompts", str(file)]))


@pytest.mark.parametrize(
    "message, told",
    [
        (dict(role="user", content=[dict(type="image_url")]), "content of a message must be text"),
        (dict(role="user"), "content of a message must be text"),
        (dict(content="Who?"), "a role must be one of"),
        (dict(role="wizard", content="Who?"), "a role must be one of"),
        (dict(role="user", content="Who?", foo="bar"), "foo is not supported in a message"),
    ],
)
def test_a_message_that_the_server_would_refuse_is_refused_in_a_file(message, told, tmp_path):
    file = tmp_path / "prompts.JSON"
    file.write_text(json.dumps(dict(messages=[message])))
    with pytest.raises(ValueError, match=rf"prompts\.JSON:1: .*{told}"):
        read_prompts(parser("llama3").parse_args(["--prompts", str(file)]))


def test_parts_of_text_in_a_file_are_one_text(tmp_path):
    file = tmp_path / "prompts.jsonl"
    parts = [dict(type="text", text="Who "), dict(type="text", text="is there?")]
    file.write_text(json.dumps(dict(messages=[dict(role="user", content=parts)])))
    (messages,) = read_prompts(parser("llama3").parse_args(["--prompts", str(file)]))
    assert messages == [dict(role="user", content="Who is there?")]


@pytest.mark.full
def test_a_line_that_does_not_fit_is_left_out_of_a_conversation(run, instruct):
    args = ["--ckpt", instruct, "--chat", "--max-new-tokens", "6", "--max-len", "64"]
    done = run(*args, stdin=f"Who is there?\n{'HAMLET. ' * 99}\nNay.\n")
    assert "this line is left out]" in done.stderr and "the conversation has" in done.stderr
    alone = run(*args, stdin="Who is there?\nNay.\n")
    assert done.stdout == alone.stdout and done.stdout


@pytest.mark.full
@pytest.mark.parametrize("option, code", [("--prompt=KING.", 0), ("--slots=0", 2)])
def test_a_closed_stderr_changes_nothing(option, code):
    command = [sys.executable, "-m", "llama3.main", "--max-new-tokens", "3", option]
    shell = f"{shlex.join(command)} 2>&-"
    done = subprocess.run(shell, shell=True, cwd=ROOT, env=ENVIRONMENT, capture_output=True)
    assert (done.returncode, done.stderr) == (code, b"") and bool(done.stdout) == (code == 0)


def test_no_standard_input_is_no_prompt(run):
    command = [sys.executable, "-m", "llama3.main", "--max-new-tokens", "3"]
    shell = f"{shlex.join(command)} <&-"
    done = subprocess.run(shell, shell=True, cwd=ROOT, env=ENVIRONMENT, capture_output=True)
    assert done.returncode == 0, done.stderr

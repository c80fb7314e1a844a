"""LoRA adapters are merged into the weights while they are read, as PEFT would merge them. What
would change numbers otherwise is refused."""

import itertools
import json
import shutil
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close, refused
from engine import FIXTURES, ROOT, Engine, hf_config, model_of
from families import FAMILIES
from golden import assert_golden, prompt_logits, prompts_of
from safetensors.numpy import load_file, save_file

from common.command import cli
from common.command.arguments import parser
from common.loading.adapter import WEIGHTS, adapted, open_adapter
from common.loading.checkpoint import load_weights
from common.loading.hub import ADAPTER
from common.loading.reading import read_tensor
from common.loading.stored import open_tensors
from common.machines.hosts import facts_of
from common.quant import INT8
from common.serving.load import load
from common.sharding import make_mesh, parse_mesh
from llama3 import model as llama3

ADAPTERS, full = FIXTURES / "adapters", pytest.mark.full
SETTINGS = {path.name: json.loads((path / ADAPTER).read_text()) for path in ADAPTERS.iterdir()}
BASE = {name: x["base_model_name_or_path"].split("/")[-2:] for name, x in SETTINGS.items()}
LAYER = "base_model.model.model.layers.0."
Q_A, Q_B = (f"{LAYER}self_attn.q_proj.lora_{x}.weight" for x in "AB")


def loaded(name, axes="", directory=None, base=None, **options):
    """Loads the base model of an adapter, or another one, merged with it or with an edited one."""
    family, variant = base or BASE[name]
    model, mesh, where = (
        model_of(family),
        make_mesh(**parse_mesh(axes)),
        FIXTURES / family / variant,
    )
    config = model.config_from_hf(hf_config(family, variant))
    options |= dict(adapter=directory or ADAPTERS / name)
    dtype = "bfloat16" if "bf16" in variant else "float32"  # in which PEFT merged them
    weights = load_weights(where, model, config, mesh, dtype, **options)
    weights = jax.tree.map(lambda a: a.astype("float32") if a.dtype == dtype else a, weights)
    return Engine(model, config, weights, mesh, "adapters", name)


def edited(tmp_path, name, change=lambda tensors: None, **settings):
    """Writes an edited adapter, and returns its directory."""
    tensors, directory = load_file(ADAPTERS / name / WEIGHTS), tmp_path / "edited"
    change(tensors)
    directory.mkdir()
    save_file(tensors, directory / WEIGHTS)
    (directory / ADAPTER).write_text(json.dumps(SETTINGS[name] | settings))
    return directory


# By default, two adapters of a base model run, which share programs.
FAST = [("names", ""), ("pattern", ""), ("experts", "expert=2,tensor=2")]
FAST += [("stacks", "tensor=2"), ("down", "tensor=2")]
REST = [(name, x) for name in sorted(BASE) for x in ("", "tensor=2", "data=2,tensor=4")]
REST = [pytest.param(*case, marks=full) for case in REST if case not in FAST]


@pytest.mark.parametrize("name, axes", FAST + REST)
def test_logits_equal_those_of_peft(name, axes):
    engine = loaded(name, axes)
    assert_golden(prompt_logits(engine), engine, atol=FAMILIES[BASE[name][0]].atol)


@pytest.mark.parametrize(
    "name", ["names", *(pytest.param(x, marks=full) for x in BASE if x != "names")]
)
def test_int8_is_as_near_as_without_an_adapter(name):
    engine = loaded(name, storage=INT8)
    got, want = prompt_logits(engine), [prompt.logits for prompt in prompts_of(engine)]
    bound = FAMILIES[BASE[name][0]].int8_weights
    assert_close(np.concatenate(got), np.concatenate(want), rms=bound, what=name)


def test_factors_of_single_experts_do_what_those_of_all_do(tmp_path):
    """With transformers 4, where each expert has modules of its own, PEFT wrote the former."""

    def split(tensors):
        for at in (f"base_model.model.model.layers.{i}.mlp.experts" for i in (0, 2)):
            for whole, r, kinds in ((f"{at}.base_layer", 3, ["gate", "up"]), (at, 2, ["down"])):
                a, b = (tensors.pop(f"{whole}.lora_{x}.weight") for x in "AB")
                for e, (i, kind) in itertools.product(range(6), enumerate(kinds)):
                    tensors[f"{at}.{e}.{kind}_proj.lora_A.weight"] = a[e * r : (e + 1) * r].copy()
                    part = np.split(b, len(kinds))[i]
                    tensors[f"{at}.{e}.{kind}_proj.lora_B.weight"] = part[:, e::6].copy()

    options = dict(target_parameters=None, rank_pattern={"down_proj": 2})
    options |= dict(alpha_pattern={"gate_proj": 4, "up_proj": 4})
    single = loaded("experts", directory=edited(tmp_path, "experts", split, **options)).weights
    jax.tree.map(np.testing.assert_array_equal, single, loaded("experts").weights)


REFUSED = dict(peft_type="IA3", bias="lora_only", use_dora=True, lora_bias=True, new_setting=2)
REFUSED |= dict(layer_replication=[[0, 1]], trainable_token_indices=[3], init_lora_weights="pissa")


@pytest.mark.parametrize("key", REFUSED)
def test_a_setting_that_changes_numbers_is_refused_by_name(tmp_path, key):
    directory = edited(tmp_path, "layers", **{key: REFUSED[key]})
    message = f"{key}={REFUSED[key]!r} is not implemented"
    refused(ValueError, message, open_adapter, str(directory), None, None)


@pytest.mark.parametrize("key", ["use_rslora", "fan_in_fan_out"])
def test_a_flag_that_is_a_text_is_refused(tmp_path, key):
    directory = edited(tmp_path, "names", **{key: "false"})
    refused(ValueError, f"{key}='false' must be true or", open_adapter, str(directory), None, None)


def names(change=lambda tensors: None, **settings):
    return "names", BASE["names"], change, settings


def other(name, *base):
    return name, base, lambda tensors: None, {}


MISFITS = {  # what is said; the adapter, the base model, and what was edited
    "lora_A.weight fits no float tensor": other("names", "llama3", "packed_gptq"),
    "give a base model in bf16": other("names", "llama3", "packed_fbgemm"),
    "experts.lora_A.weight fits no float tensor": other("down", "gpt_oss", "mxfp4"),
    "an embedding that is also the head": other("pattern", "llama3", "tied"),
    "does not fit rank 3": other("down", "qwen3", "moe"),
    "does not fit rank 6": names(r=6),
    "lora_alpha='7' of model.layers.": names(lora_alpha="7"),
    "lora_alpha=None of model.layers.": names(lora_alpha=None),
    "lora_alpha=True of model.layers.": names(lora_alpha=True),
    "rank_pattern has a bad pattern: unterminated": names(rank_pattern={"v_proj": 2, "[q": 3}),
    "alpha_pattern has a bad pattern: the repet": names(alpha_pattern={f"q{{{2**64}}}": 3}),
    "needs matrices lora_A, lora_B alone": names(lambda x: x.pop(Q_B)),
    f"{{}}/{WEIGHTS} holds no tensor": names(lambda x: x.clear()),
    "lora_A.weight [3, 54] does not fit": names(lambda x: x.update({Q_B: x[Q_B][:9].copy()})),
    "0.x.weight fits no float": names(lambda x: x.update({f"{LAYER}x.weight": x[Q_A]})),
    f"with {{}}/{WEIGHTS} holds NaN or infinity": names(lambda x: x[Q_B].fill(np.inf)),
}


@pytest.mark.parametrize("message", MISFITS)
def test_what_does_not_fit_is_named(tmp_path, message):
    name, base, change, settings = MISFITS[message]
    directory = edited(tmp_path, name, change, **settings)
    refused(ValueError, message.format(directory), loaded, name, directory=directory, base=base)


def ones(directory, rows, factor):
    """A matrix of ones in bfloat16, to which an adapter adds 4 * factor."""
    shapes = dict(A=(4, 2048), B=(rows, 4)).items()
    save_file({"x.weight": np.ones((rows, 2048), jnp.bfloat16)}, directory / "model.safetensors")
    factors = {f"x.lora_{x}.weight": np.full(y, 1, np.float32) for x, y in shapes}
    factors["x.lora_B.weight"] *= factor
    save_file(factors, directory / WEIGHTS)
    (directory / ADAPTER).write_text(json.dumps(dict(r=4, lora_alpha=4)))
    return adapted(open_tensors(directory), {}, directory)["x.weight"]


def test_merging_takes_the_memory_of_a_chunk(tmp_path):
    shape = (8192, 2048)  # 32 MB
    tensor, out = ones(tmp_path, 8192, 1), np.empty(shape, jnp.bfloat16)
    tracemalloc.start()
    read_tensor(tensor, None, shape, ((0, 8192), (0, 2048)), out)
    assert tracemalloc.get_traced_memory()[1] < 8e6
    tracemalloc.stop()
    assert (out == 5).all()


@pytest.mark.parametrize("dtype, want", [("float32", 1 + 2**-10), ("bfloat16", 1)])
def test_a_sum_is_rounded_to_the_dtype_that_was_asked_for(tmp_path, dtype, want):
    out = np.empty((8, 2048), jnp.dtype(dtype))
    read_tensor(ones(tmp_path, 8, 2**-12), None, out.shape, ((0, 8), (0, 2048)), out)
    assert (out == want).all()


def test_a_matrix_that_is_stored_transposed_is_merged_in_float32_too(tmp_path):
    base = load(llama3, dtype="float32")
    wide, rows = base.config.hidden_size, base.weights.layers[0].wq.values.shape[1]
    factors = {Q_A: np.full((1, wide), 2**-12, np.float32), Q_B: np.ones((rows, 1), np.float32)}
    save_file(factors, tmp_path / WEIGHTS)
    (tmp_path / ADAPTER).write_text(json.dumps(dict(peft_type="LORA", r=1, lora_alpha=1)))
    merged = load(llama3, str(ROOT / "llama3" / "embedded"), adapter=tmp_path, dtype="float32")
    (plain,), (made,) = (jax.tree.leaves(x.weights.layers[0].wq) for x in (base, merged))
    np.testing.assert_array_equal(made, plain + np.float32(2**-12))


def test_the_base_model_is_found_and_each_process_must_have_the_adapter(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("common.serving.load.load_tokenizer", lambda directory: None)
    model, adapter = model_of("llama3"), str(ADAPTERS / "names")
    merged = load(model, adapter=adapter, mesh=make_mesh())
    want = loaded("names", storage=merged.storage).weights
    jax.tree.map(np.testing.assert_array_equal, merged.weights, want)
    facts = facts_of(model, parser("llama3").parse_args(["--adapter", adapter]))
    names = {f"the adapter's {name}" for name in (ADAPTER, WEIGHTS)}
    assert names | {"config.json", "model.safetensors"} <= facts.keys()
    refused(ValueError, "--adapter does not go", load, model, adapter=adapter, random=True)


def test_an_adapter_is_no_model_and_beside_a_model_it_is_noted(tmp_path, monkeypatch, capsys):
    model, adapter = model_of("llama3"), ADAPTERS / "names"
    refused(ValueError, f"{adapter} is an adapter: give it as --adapter", load, model, str(adapter))
    directory = edited(tmp_path, "names", base_model_name_or_path=None)
    refused(ValueError, "names no base model", load, model, adapter=str(directory))
    gone = SETTINGS["names"] | dict(base_model_name_or_path="gone/llama/8b")
    (directory / ADAPTER).write_text(json.dumps(gone))
    told = f"the base model that {directory / ADAPTER} names: 'gone/llama/8b' is neither"
    refused(ValueError, told, load, model, adapter=str(directory))
    shutil.copytree(ROOT / "llama3" / "embedded", directory, dirs_exist_ok=True)
    monkeypatch.setattr(cli, "plan_prompts", lambda *_: sys.exit(2))
    for options, notes in (([], 1), (["--adapter", str(adapter)], 0)):
        with pytest.raises(SystemExit):
            cli.main(model, ["--prompt", "x", "--ckpt", str(directory), *options])
        assert capsys.readouterr().err.count("is not used: see --adapter]\n") == notes

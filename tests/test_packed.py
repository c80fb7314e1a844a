"""Tests checkpoints that others quantised: AWQ, GPTQ, compressed-tensors and FBGEMM. Their packages
packed the fixtures; see packers.py. packings.py says what they mean."""

import functools
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import packings
import pytest
from compare import assert_close, refused
from engine import FIXTURES, hf_config, load, model_of, tensors_of
from golden import assert_golden, assert_greedy, prompt_logits
from safetensors.numpy import save_file
from test_config import ODD, attempt
from test_families import MESHES

from common.kernels.ragged_dot import ragged_dot
from common.loading.checkpoint import load_weights
from common.loading.packed import AWQ, declare
from common.loading.random_weights import random_weights
from common.loading.reading import unpack
from common.loading.shape import published_sizes
from common.loading.stored import Words
from common.machines.bandwidth import tree_bytes
from common.packing import read_packing
from common.products import linear, product_by_group
from common.quant import INT8, Grouped, Packed, Rowwise, dequantize_groups, int4, is_stored
from common.sharding import Shards, make_mesh, parse_mesh
from common.weights import by_path, check_divides

FAMILIES = ("llama3", "qwen3", "llama4", "kimi_k2")
VARIANTS = [
    (family, folder.name)
    for family in FAMILIES
    for folder in sorted((FIXTURES / family).glob("packed_*"))
]
full = pytest.mark.full


def meshes(family: str, variant: str) -> list[str]:
    """Returns the meshes that can split a variant."""
    model, found = model_of(family), []
    config = model.config_from_hf(hf_config(family, variant))
    for axes in MESHES:
        sizes = parse_mesh(axes)
        shards = Shards(sizes.get("expert", 1), sizes.get("tensor", 1))
        try:
            check_divides(declare(model, config, shards)[0], shards)
        except ValueError:
            continue
        found.append(axes)
    return found


def cases() -> Any:
    """Yields every variant on one device and on one mesh: neighbours on different ones. Three are
    chosen, which cut groups at parts of heads, or cut experts. Without --all, only those run on a
    mesh."""
    shown = dict(packed_awq="data=2,tensor=4", packed_gptq="tensor=8")
    shown |= dict(packed_maverick="expert=2,tensor=2")
    for i, (family, variant) in enumerate(VARIANTS):
        yield family, variant, ""
        found = meshes(family, variant)
        axes = shown.get(variant, found[i % len(found)])
        yield pytest.param(family, variant, axes, marks=() if variant in shown else full)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("family, variant, axes", list(cases()))
def test_logits_equal_those_of_transformers_with_the_numbers_that_a_file_means(
    family, variant, axes
):
    engine = load(family, variant, axes)
    kinds = {type(w) for w in jax.tree.leaves(engine.weights, is_leaf=is_stored)}
    assert kinds & {Grouped, Rowwise}  # they stay as they are published
    assert_golden(prompt_logits(engine), engine, atol=1e-4)


@full
@pytest.mark.parametrize("family, variant", dict(VARIANTS).items())
def test_greedy_continuations_equal_those_of_transformers(family, variant):
    assert_greedy(load(family, variant, meshes(family, variant)[0]))


def test_every_format_has_a_mesh_that_splits_groups():
    """Otherwise no test would see that a part of a group needs the scale of the whole."""
    config = model_of("llama3").config_from_hf(hf_config("llama3", "packed_gptq"))
    whole, split = (
        by_path(declare(model_of("llama3"), config, shards)[0])["layers.0.w_down"].published.scales
        for shards in (Shards(), Shards(tensor=8))
    )
    assert (whole, split) == (192 // 16, 192 // 8)


# ---- the words


@pytest.mark.parametrize("rows, columns", [(1, 1), (3, 5), (16, 7)])
def test_random_words_mean_what_the_oracle_says(rows, columns):
    rng = np.random.default_rng(rows)
    words = rng.integers(-(2**31), 2**31, (rows, columns)).astype(np.int32)
    for bits in (4, 8):
        order, half = tuple(range(32 // bits)), 1 << (bits - 1)
        for plus in (0, 1):
            for axis, wide in enumerate((packings.along_columns, packings.along_rows)):
                want = (wide(words, bits) + plus) % (1 << bits) - half
                got = unpack(words, Words(bits, axis, order, plus, columns))
                assert got.dtype == np.int8
                np.testing.assert_array_equal(got, want)
    numbers = np.empty((rows, columns, 8), np.int64)
    numbers[..., packings.AWQ_COLUMNS] = packings.numbers_of(words, 4)
    got = unpack(words, Words(4, 1, AWQ, 0, columns))
    np.testing.assert_array_equal(got, numbers.reshape(rows, -1) - 8)


FIRST = {  # the first matrix of a variant that is quantised, and its path
    "packed_w4a16": ("layers.1.self_attn.q_proj", "layers.1.wq"),
    "packed_asymmetric": ("layers.0.mlp.down_proj", "layers.0.w_down"),
    "packed_w8a16": ("layers.1.self_attn.v_proj", "layers.1.wv"),
    "packed_gptq": ("layers.1.mlp.gate_proj", "layers.1.w_gate"),
}


@pytest.mark.parametrize("kept_in", [np.float32, np.float16], ids=["F32", "F16"])
@pytest.mark.parametrize("variant", FIRST)
def test_a_loaded_matrix_is_what_the_oracle_makes_of_random_bytes(tmp_path, variant, kept_in):
    """Any bytes are numbers, so every bit of a word and every zero point is tried. Scales of any
    float keep all their bits."""
    name, path = FIRST[variant]
    tensors, rng = tensors_of("llama3", variant), np.random.default_rng(1)
    kept = ("g_idx", "weight_shape")
    mine = {x.rpartition(".")[2]: x for x in tensors if x.startswith(f"model.{name}.")}
    for end, full_name in mine.items():
        if tensors[full_name].dtype == np.int32 and end not in kept:
            noise = rng.integers(-(2**31), 2**31, tensors[full_name].shape)
            tensors[full_name] = noise.astype(np.int32)
        elif end in ("scales", "weight_scale"):
            tensors[full_name] = rng.uniform(-1, 1, tensors[full_name].shape).astype(kept_in)
    save_file(tensors, tmp_path / "model.safetensors")
    model, hf = model_of("llama3"), hf_config("llama3", variant)
    config = model.config_from_hf(hf)
    mesh = make_mesh(tensor=2 if meshes("llama3", variant) else 1)
    weights = load_weights(tmp_path, model, config, mesh, np.float32)
    leaves = jax.tree_util.tree_leaves_with_path(weights, is_leaf=is_stored)
    found = {jax.tree_util.keystr(k, simple=True, separator="."): w for k, w in leaves}
    meant = packings.meaning(
        {end: tensors[x] for end, x in mine.items()}, hf["quantization_config"]
    )
    got = np.asarray(dequantize_groups(jax.tree.map(jnp.asarray, found[path]))).T
    assert_close(got[: meant.shape[0], : meant.shape[1]], meant, rtol=1e-6)
    assert np.abs(got).sum() == pytest.approx(np.abs(meant).sum(), rel=1e-5)  # padding is zeros


# ---- zero points in the products


def grouped(rng, lead, n_in, n_out, groups):
    values = rng.integers(-8, 8, (*lead, n_in, n_out)).astype(np.int8)
    scale = rng.uniform(-0.1, 0.1, (*lead, groups, n_out)).astype(np.float32)
    zero = rng.integers(-8, 8, (*lead, groups, n_out)).astype(np.int8)
    return Grouped(*map(jnp.asarray, (values, scale, zero)))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("implementation", ["reference", "blocked", "tpu"])
@pytest.mark.parametrize("sizes", [[4, 0, 5], [9]])
def test_ragged_dot_subtracts_zero_points(implementation, sizes):
    rng, sizes = np.random.default_rng(2), np.array(sizes)
    w = grouped(rng, (len(sizes),), 256, 24, 2)
    x = jnp.asarray(rng.normal(size=(11, 256)), jnp.float32)
    bias = jnp.asarray(rng.normal(size=(len(sizes), 24)), jnp.float32)
    plain, want = np.asarray(dequantize_groups(w)), np.zeros((11, 24))
    for row, e in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        want[row] = np.asarray(x, np.float64)[row] @ plain[e] + np.asarray(bias)[e]
    got = ragged_dot(x, w, jnp.asarray(sizes), bias_EO=bias, implementation=implementation)
    assert_close(got, want, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 5, 200])
def test_linear_subtracts_zero_points(rows):
    rng = np.random.default_rng(3)
    w = grouped(rng, (), 96, 40, 6)
    x = jnp.asarray(rng.normal(size=(rows, 96)), jnp.float32)
    want = np.asarray(x, np.float64) @ np.asarray(dequantize_groups(w), np.float64)
    assert_close(linear(x, w), want, atol=1e-3)
    assert_close(product_by_group(x, w), want, atol=1e-3)  # what a GPU computes


# ---- other storages of the same files


def test_rows_in_8_bit_floats_can_be_stored_in_int8_and_int4():
    plain = load("llama3", "packed_fbgemm")
    want = plain.weights.layers[0].wq
    want = np.asarray(want.values, np.float32) * np.asarray(want.scale).T
    for storage, kind, bound in ((INT8, Rowwise, 0.01), (int4(2, True), Grouped, 0.1)):
        w = load("llama3", "packed_fbgemm", storage=storage).weights.layers[0].wq
        assert isinstance(w, kind) and w.values.dtype == jnp.int8
        wide = w.values * w.scale.T if kind is Rowwise else dequantize_groups(w).T
        assert_close(wide, want, rms=bound)


def test_whole_numbers_stay_as_they_are_published_under_any_storage():
    """So a 4-bit file does not grow, and nothing is rounded twice."""
    want = load("qwen3", "packed_awq").weights.layers[0]
    got = load("qwen3", "packed_awq", storage=INT8).weights.layers[0]
    jax.tree.map(np.testing.assert_array_equal, want, got)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("family, variant", VARIANTS)
def test_random_weights_have_the_forms_of_loaded_ones(family, variant):
    engine = load(family, variant)
    layout, _ = declare(engine.model, engine.config)
    made = random_weights(layout, engine.mesh, "float32", 0)
    assert jax.tree.structure(made) == jax.tree.structure(engine.weights)
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, engine.weights)
    kinds = lambda tree: jax.tree.map(lambda x: x.dtype, tree)
    assert kinds(made) == kinds(engine.weights)
    assert tree_bytes(made) == tree_bytes(engine.weights)


# ---- what is read


def test_the_published_settings_of_k2_thinking_are_read():
    """Only the routed experts are quantised."""
    weights = dict(actorder=None, block_structure=None, dynamic=False, group_size=32, num_bits=4)
    weights |= dict(observer="minmax", observer_kwargs={}, strategy="group", symmetric=True)
    group = dict(input_activations=None, output_activations=None, targets=["Linear"])
    ignore = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"]
    ignore += [r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
    published = dict(format="pack-quantized", ignore=ignore, kv_cache_scheme=None)
    published |= dict(config_groups=dict(group_0=group | dict(weights=weights | dict(type="int"))))
    published |= dict(quant_method="compressed-tensors", quantization_status="compressed")
    hf = published_sizes(model_of("kimi_k2"))["kimi-k2-instruct"]
    config = model_of("kimi_k2").config_from_hf(hf | dict(quantization_config=published))
    layout = by_path(declare(model_of("kimi_k2"), config, Shards(expert=64))[0])
    forms = {path: w.published for path, w in layout.items() if w.published is not None}
    assert {path.split(".", 2)[2] for path in forms} == {
        f"mlp.experts.w_{name}" for name in ("gate", "up", "down")
    }
    assert forms["layers.1.mlp.experts.w_gate"].scales == 7168 // 32
    assert forms["layers.1.mlp.experts.w_down"].scales == 2048 // 32


@pytest.mark.parametrize(
    "family, size, quantization",
    [
        ("qwen3", "qwen3-8b", "awq"),
        ("qwen3", "qwen3-32b", "awq"),
        ("qwen3", "qwen3-30b-a3b", "gptq"),
        ("qwen3", "qwen3-235b-a22b", "gptq"),
        ("llama3", "llama3.1-70b", "gptq"),
        ("llama3", "llama3.1-405b", "fbgemm"),
    ],
)
def test_published_sizes_can_be_split_as_they_are_without_quantisation(family, size, quantization):
    """Groups of 128 are cut to groups of 32 at the least."""
    made = {
        "awq": dict(bits=4, group_size=128, quant_method="awq", version="gemm", zero_point=True),
        "gptq": dict(bits=4, group_size=128, quant_method="gptq", sym=True, desc_act=False),
        "fbgemm": dict(quant_method="fbgemm_fp8", modules_to_not_convert=["lm_head"]),
    }
    model = model_of(family)
    hf = published_sizes(model)[size]
    config = model.config_from_hf(hf | dict(quantization_config=made[quantization]))
    for shards in (Shards(tensor=8), Shards(4, 2)):
        layout = declare(model, config, shards)[0]
        check_divides(layout, shards)
        packed = [w for w in by_path(layout).values() if isinstance(w.published, Packed)]
        assert packed
        if quantization != "fbgemm":
            assert all(w.shape[-1] / w.published.scales >= 32 for w in packed)


@pytest.mark.parametrize(
    "changes",
    [
        dict(moe_sparsity_config=None),
        dict(g__weights__zp_dtype="torch.int8", g__weights__scale_dtype="torch.float16"),
        # An order of quantisation that the files do not show.
        *(dict(g__weights__actorder=order) for order in ("weight", "static", False)),
    ],
)
def test_settings_of_compressed_tensors_that_change_nothing_are_read(changes):
    read = model_of("llama3").config_from_hf
    assert read(changed("packed_w4a16", **changes)) == read(config_of("packed_w4a16"))


@pytest.mark.parametrize("bias", [0.0, 0.5])
@pytest.mark.parametrize(
    "family, variant", [("llama3", "packed_gptq"), ("qwen3", "packed_gptq_int8")]
)
def test_biases_that_gptq_adds_must_be_zeros(tmp_path, family, variant, bias):
    """AutoGPTQ writes one for each matrix. Qwen3 has none, although the table of its model file
    names those of Qwen2."""
    tensors, model = tensors_of(family, variant), model_of(family)
    for name in [name for name in tensors if name.endswith(".scales")]:
        zeros = np.zeros(tensors[name].shape[-1], np.float16)
        tensors[name.replace(".scales", ".bias")] = zeros
    tensors["model.layers.0.self_attn.q_proj.bias"][3] = bias
    save_file(tensors, tmp_path / "model.safetensors")
    config = model.config_from_hf(hf_config(family, variant))
    load = functools.partial(load_weights, tmp_path, model, config, make_mesh(), np.float32)
    if bias:
        with pytest.raises(ValueError, match=r"0\.self_attn\.q_proj\.bias holds 0\.5 at 3"):
            load()
    else:
        load()


def test_modules_that_gptq_leaves_out_are_plain():
    hf = changed("packed_gptq", dynamic={r"-:model\.layers\.1\.mlp": {}}, hyb_act=False)
    model = model_of("llama3")
    layout = by_path(declare(model, model.config_from_hf(hf))[0])
    assert layout["layers.1.w_up"].published is None
    assert isinstance(layout["layers.0.w_up"].published, Packed)
    assert isinstance(layout["layers.1.wq"].published, Packed)


# ---- what is refused


def config_of(variant: str, family: str = "llama3") -> dict[str, Any]:
    return json.loads(json.dumps(hf_config(family, variant)))


def changed(variant: str, family: str = "llama3", **changes: Any) -> dict[str, Any]:
    """Returns the config.json of a variant with changes in `quantization_config`. A `__` in a name
    leads into `config_groups`."""
    hf = config_of(variant, family)
    quantization = hf["quantization_config"]
    for key, value in changes.items():
        *path, last = key.split("__")
        at = quantization["config_groups"]["group_0"] if path else quantization
        for word in path[1:]:
            at = at[word]
        if value is ABSENT:
            del at[last]
        else:
            at[last] = value
    return hf


ABSENT = object()
STATIC = dict(dynamic=False, num_bits=8, type="float", strategy="tensor")
WRONG = [
    ("packed_awq", dict(bits=8), "quantization_config.bits=8"),
    ("packed_awq", dict(bits=ABSENT), "no quantization_config.bits"),
    ("packed_awq", dict(version="gemv"), "quantization_config.version='gemv'"),
    ("packed_awq", dict(zero_point=False), "quantization_config.zero_point=False"),
    ("packed_awq", dict(group_size=12), "quantization_config.group_size=12"),
    ("packed_awq", dict(group_size="16"), "quantization_config.group_size='16'"),
    ("packed_awq", dict(group_size=ABSENT), "no quantization_config.group_size"),
    ("packed_awq", dict(modules_to_not_convert="x"), "modules_to_not_convert='x'"),
    ("packed_awq", dict(act_order=True), "quantization_config.act_order=True"),
    ("packed_awq", dict(quant_method="aqlm"), "quantization_config.quant_method='aqlm'"),
    ("packed_awq", dict(quant_method=["awq"]), "quantization_config.quant_method=['awq']"),
    ("packed_gptq", dict(bits=3), "quantization_config.bits=3"),
    ("packed_gptq", dict(desc_act=True), "quantization_config.desc_act=True"),
    ("packed_gptq", dict(sym=None), "quantization_config.sym=None"),
    ("packed_gptq", dict(hyb_act=True), "quantization_config.hyb_act=True"),
    ("packed_gptq", dict(checkpoint_format="marlin"), "checkpoint_format='marlin'"),
    ("packed_gptq", dict(lm_head=True), "quantization_config.lm_head=True"),
    ("packed_gptq", dict(dynamic={"-:.*gate": {}, ".*up": {"bits": 8}}), "_config.dynamic="),
    ("packed_gptq", dict(dynamic=["-:.*gate"]), "quantization_config.dynamic="),
    ("packed_gptq", dict(dynamic={"-:(": {}}), "is not a regular expression"),
    ("packed_gptq", dict(pack_dtype="int8"), "quantization_config.pack_dtype='int8'"),
    ("packed_gptq", dict(is_marlin_format=True), "is_marlin_format=True"),
    ("packed_w4a16", dict(format="marlin-24"), "quantization_config.format='marlin-24'"),
    ("packed_w4a16", dict(quantization_status="frozen"), "quantization_status='frozen'"),
    ("packed_w4a16", dict(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme="),
    ("packed_w4a16", dict(sparsity_config={"format": "x"}), "sparsity_config="),
    ("packed_w4a16", dict(ignore="lm_head"), "quantization_config.ignore='lm_head'"),
    ("packed_w4a16", dict(ignore=["re:("]), "'re:(' is not a regular expression"),
    ("packed_w4a16", dict(config_groups={}), "quantization_config.config_groups={}"),
    ("packed_w4a16", dict(g__output_activations={}), "group_0.output_activations={}"),
    ("packed_w4a16", dict(g__input_activations=STATIC), "group_0.input_activations.dynamic="),
    ("packed_w4a16", dict(g__weights=None), "group_0.weights=None"),
    ("packed_w4a16", dict(g__weights__actorder="group"), "weights.actorder='group'"),
    ("packed_w4a16", dict(g__weights__num_bits=2), "weights.num_bits=2"),
    ("packed_w4a16", dict(g__weights__type="float"), "weights.type='float'"),
    ("packed_w4a16", dict(g__weights__strategy="block"), "weights.strategy='block'"),
    ("packed_w4a16", dict(g__weights__dynamic=True), "weights.dynamic=True"),
    ("packed_w4a16", dict(g__weights__group_size=None), "weights.group_size=None"),
    ("packed_w4a16", dict(g__weights__symmetric=ABSENT), "weights.symmetric"),
    ("packed_w4a16", dict(g__weights__other=1), "weights.other=1"),
    ("packed_w8a16", dict(g__weights__num_bits=4), "weights.num_bits=4"),
    ("packed_fbgemm", dict(weight_dtype="x"), "quantization_config.weight_dtype='x'"),
]


@pytest.mark.parametrize("variant, changes, named", WRONG)
def test_what_is_not_implemented_is_refused_by_name(variant, changes, named):
    family = "qwen3" if variant == "packed_awq" else "llama3"
    hf = changed(variant, family, **changes)
    message = refused(ValueError, named, model_of(family).config_from_hf, hf)
    assert message.startswith("config.json") and len(message) < 400


def everywhere(part: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every object within an object, with each of its keys and with one that is new."""
    for key in [*part, "anything", "a\nb"]:
        yield part, key
    for value in list(part.values()):
        if isinstance(value, dict):
            yield from everywhere(value)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family, variant", VARIANTS)
def test_any_value_of_any_setting_is_read_or_refused_in_one_line(family, variant):
    hf = config_of(variant, family)
    for part, key in everywhere(hf.get("text_config", hf)["quantization_config"]):
        was = part.get(key, ABSENT)
        for value in ODD:
            part[key] = value
            attempt(family, hf)
        del part[key]
        if was is not ABSENT:
            attempt(family, hf)
            part[key] = was


def test_two_groups_and_other_objects_are_refused():
    hf = changed("packed_w4a16")
    hf["quantization_config"]["config_groups"]["group_1"] = {}
    refused(ValueError, "must be one group", read_packing, hf)
    refused(ValueError, "must be an object", read_packing, dict(quantization_config=[]))


def loaded(directory, hf, family="llama3"):
    model = model_of(family)
    return load_weights(directory, model, model.config_from_hf(hf), make_mesh(), np.float32)


def add_one(x):
    x[1:] += 1
    return x


GATE, ZEROS = "layers.0.mlp.gate_proj", "layers.0.self_attn.q_proj.weight_zero_point"
UNLIKE = [
    # With act-order, g_idx is no sequence of neighbours, whatever config.json says.
    ("llama3", "packed_gptq", f"{GATE}.g_idx", lambda x: x[::-1].copy(), "holds"),
    # Zero points in a file that is called symmetric.
    ("qwen3", "packed_gptq_int8", f"{GATE}.qzeros", add_one, "holds"),
    ("llama3", "packed_w4a16", f"{GATE}.weight_shape", add_one, "holds"),
    # Their bytes would be read as one number each, and then those of the next tensor.
    ("llama3", "packed_asymmetric", ZEROS, lambda x: x.view(np.int8), "has dtype I8, but packed"),
]


@pytest.mark.parametrize("family, variant, name, change, problem", UNLIKE)
def test_a_tensor_that_is_not_as_expected_is_refused(
    tmp_path, family, variant, name, change, problem
):
    tensors, name = tensors_of(family, variant), f"model.{name}"
    tensors[name] = change(tensors[name])
    save_file(tensors, tmp_path / "model.safetensors")
    hf = config_of(variant, family)
    refused(ValueError, f"{name} {problem}", loaded, tmp_path, hf, family)


def test_a_file_that_holds_other_tensors_than_config_json_says_is_refused(tmp_path):
    """A plain file, one whose ignore list lacks a matrix, and one that ignores too much."""
    hf = config_of("packed_w4a16")
    directory = FIXTURES / "llama3" / "packed_w4a16"
    for ignore in ([], ["lm_head"], ["lm_head", "re:.*"]):
        hf["quantization_config"]["ignore"] = ignore
        with pytest.raises(ValueError, match=r"weight_packed|no file has"):
            loaded(directory, hf)
    del hf["quantization_config"]
    with pytest.raises(ValueError, match="weight_packed is not a weight of this model"):
        loaded(directory, hf)


@pytest.mark.parametrize(
    "family, variant, ignored",
    [
        ("kimi_k2", "packed_thinking", "re:.*experts.3.up_proj"),
        ("llama4", "packed_maverick", "re:.*experts.*up_proj"),  # gate and up become one matrix
    ],
)
def test_experts_that_are_quantised_in_part_are_refused(family, variant, ignored):
    hf = config_of(variant, family)
    hf["quantization_config"]["ignore"].append(ignored)
    directory = FIXTURES / family / variant
    refused(ValueError, "quantises only some of", loaded, directory, hf, family)


def test_groups_that_a_mesh_would_cut_too_small_are_refused():
    model = model_of("qwen3")
    config = model.config_from_hf(hf_config("qwen3", "packed_gptq_moe"))
    refused(ValueError, "cannot be split over 8", declare, model, config, Shards(tensor=8))
    hf = hf_config("qwen3", "packed_gptq_moe") | dict(moe_intermediate_size=40)
    refused(ValueError, "not whole groups of 16", declare, model, model.config_from_hf(hf))

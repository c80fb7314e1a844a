"""Tests of every family. It computes what transformers computes: on every mesh, in any batch and,
within stated bounds, in every precision. It refuses what it would compute wrongly.

To add a family, add a line to tests/families.py. Its variants are the folders of
tests/fixtures/<family>.
"""

import functools
import re
from typing import Any, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close
from engine import FIXTURES, empty_cache, forward, goldens, hf_config, init_state, load, model_of
from families import FAMILIES
from golden import (
    assert_divides,
    assert_golden,
    assert_greedy,
    assert_padding_never_sampled,
    assert_updates_in_place,
    prompt_logits,
    stepwise_logits,
)

from common.config import read_config
from common.fields import Index
from common.loading.checkpoint import load_weights
from common.loading.matching import target_of
from common.quant import INT8, TRANSPOSED, Fp8, Grouped, Rowwise, dequantize_groups, int4, is_stored
from common.sharding import Shards, make_mesh, parse_mesh, split_heads
from common.weights import by_path, check_divides

# Few of these sizes divide the heads, widths, experts and vocabularies of the variants.
MESHES = (
    "tensor=2",
    "expert=2,tensor=2",
    "data=2,expert=2,tensor=2",
    "tensor=8",
    "expert=3,tensor=2",
    "data=2,tensor=4",
    "expert=8",
)
ALONE = ("data=2", "expert=2")  # only for each family's second precision variant


def fixtures(family: str) -> list[str]:
    folder = FIXTURES / family
    assert folder.is_dir(), f"no fixtures yet: run python tests/make_golden.py {family}"
    # Quantised files have tests of their own, in test_packed.py.
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("packed_"))


VARIANTS = [(family, variant) for family in FAMILIES for variant in fixtures(family)]
full = pytest.mark.full


@functools.cache
def fits(family: str, variant: str, axes: str) -> bool:
    """Returns whether a mesh can split a variant."""
    model, sizes = model_of(family), parse_mesh(axes)
    shards = Shards(sizes.get("expert", 1), sizes.get("tensor", 1))
    try:
        config = model.config_from_hf(hf_config(family, variant))
        check_divides(model.weight_layout(config, shards), shards)
    except ValueError:
        return False
    return True


def meshes(family: str, variant: str) -> list[str]:
    """Returns the meshes that can split a variant, the one that splits most first."""
    alone = ALONE if variant == FAMILIES[family].precise[1] else ()
    found = [axes for axes in (*MESHES, *alone) if fits(family, variant, axes)]
    sizes = {axes: (len(parse_mesh(axes)), np.prod([*parse_mesh(axes).values()])) for axes in found}
    return sorted(found, key=lambda axes: sizes[axes], reverse=True)


@functools.cache
def mesh_that_moves_heads(family: str, variant: str) -> str:
    """Returns the first of the meshes that move or repeat heads of both kinds, or else of one kind,
    or else pad them. If there is none, returns the first of all for a precision variant, and "" for
    another."""
    config = model_of(family).config_from_hf(hf_config(family, variant))
    N = config.num_attention_heads
    heads = functools.partial(split_heads, N, getattr(config, "num_key_value_heads", N))

    def changes(axes: str) -> tuple[int, bool]:
        sizes = parse_mesh(axes)
        split = heads(sizes.get("expert", 1) * sizes.get("tensor", 1))
        moved = (new[: len(old)] != old for new, old in zip(split, heads(1), strict=True))
        return sum(moved), split != heads(1)

    found = meshes(family, variant)
    best = max(found, key=changes, default="")
    if variant in FAMILIES[family].precise or (best and any(changes(best))):
        return best
    return ""


def on(cases: Any) -> Any:
    """Parametrises by (family, variant, mesh). Cases marked `full` run only with --all."""
    return pytest.mark.parametrize("family, variant, axes", list(cases))


def where_heads_move() -> Any:
    return ((f, v, mesh_that_moves_heads(f, v)) for f, v in VARIANTS)


def on_one_device() -> Any:
    return ((f, v, "") for f, v in VARIANTS)


def on_the_widest_mesh() -> Any:
    return ((f, v, next(iter(meshes(f, v)), "")) for f, v in VARIANTS)


def on_meshes() -> Any:
    """Yields every family on every mesh where none of its variants moves heads: each of them with
    another variant, as far as there are enough."""
    for family in FAMILIES:
        variants = fixtures(family)
        moving = {mesh_that_moves_heads(family, v) for v in variants}
        for i, axes in enumerate((*MESHES, *ALONE)):
            turned = variants[i % len(variants) :] + variants[: i % len(variants)]
            variant = next((v for v in turned if axes in meshes(family, v)), None)
            if variant and axes not in moving:
                yield family, variant, axes


def once_each(cases: Any) -> Any:
    """Yields the same cases. By default, each precision variant runs once: on the mesh that moves
    its heads, if there is one."""
    shown = [(f, v) for f, v in VARIANTS if v in FAMILIES[f].precise]
    chosen = {(*variant, mesh_that_moves_heads(*variant)) for variant in shown}
    for case in cases:
        yield pytest.param(*case, marks=() if case in chosen else full)


def some_of(cases: Any, count: int) -> Any:
    """Yields the same cases. By default, only the first `count` precision variants run."""
    for f, v, axes in cases:
        yield pytest.param(f, v, axes, marks=() if v in FAMILIES[f].precise[:count] else full)


def of_precise(cases: Any) -> Any:
    return (case for case in cases if case[1] in FAMILIES[case[0]].precise)


def of_first(cases: Any) -> Any:
    """Yields the cases of the first precision variants. By default, none of them runs."""
    first = [case for case in cases if case[1] == FAMILIES[case[0]].precise[0]]
    return (pytest.param(*case, marks=full) for case in first)


FIRST = pytest.mark.parametrize("family, variant", [(f, FAMILIES[f].precise[0]) for f in FAMILIES])
SECOND = pytest.mark.parametrize("family, variant", [(f, FAMILIES[f].precise[1]) for f in FAMILIES])

# ---- against transformers


@on(once_each([*where_heads_move(), *on_meshes()]))
def test_logits_of_a_ragged_batch_equal_those_of_transformers(family, variant, axes):
    engine = load(family, variant, axes)
    assert_golden(prompt_logits(engine), engine, atol=FAMILIES[family].atol)


@pytest.mark.one_in(5)
@on([*some_of(on_one_device(), 2), *of_first(on_the_widest_mesh())])
def test_logits_token_by_token_equal_them_while_slots_come_and_go(family, variant, axes):
    engine = load(family, variant, axes)
    assert_golden(stepwise_logits(engine), engine, atol=FAMILIES[family].atol)


@pytest.mark.one_in(5)
@on([*some_of(of_precise(on_the_widest_mesh()), 1), *of_first(on_one_device())])
def test_greedy_continuations_equal_those_of_transformers(family, variant, axes):
    """They go through prefill in chunks, insert and generate. The prompts arrive one after the
    other, in slots of every data shard."""
    assert_greedy(load(family, variant, axes))


@pytest.mark.one_in(7)
@FIRST
def test_logits_of_a_prompt_alone_equal_those_of_transformers(family, variant):
    engine, prompt = load(family, variant), goldens(family, variant)[2]
    n = len(prompt.tokens)
    logits, _ = forward(engine, empty_cache(engine, 1, capacity=n), prompt.tokens[None], [n])
    assert_close(logits[0], prompt.logits, atol=FAMILIES[family].atol)


# ---- precision


PRECISIONS = {  # by the name of the bound: dtype, storage of the weights, cache
    "bf16": ("bfloat16", None, jnp.bfloat16),
    "int8_weights": ("float32", INT8, jnp.float32),
    "int8_cache": ("float32", None, jnp.int8),
    "int8_both": ("bfloat16", INT8, jnp.int8),
}


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    "second, precision",
    [
        (False, "int8_both"),
        pytest.param(True, "int8_both", marks=full),
        pytest.param(False, "int8_cache", marks=full),
        pytest.param(True, "int8_weights", marks=full),
        pytest.param(False, "bf16", marks=full),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_low_precision_stays_near_float32(family, second, precision):
    """The first variant token by token, the second one as prompts."""
    weights, storage, cache = PRECISIONS[precision]
    variant, steps = FAMILIES[family].precise[second], (stepwise_logits, prompt_logits)[second]
    axes = "" if second else next(m for m in ("tensor=2", "") if not m or fits(family, variant, m))
    engine = load(family, variant, axes, weights, storage)
    want = [prompt.logits for prompt in goldens(family, variant)]
    got = steps(engine, cache)
    bound = getattr(FAMILIES[family], precision)
    assert_close(np.concatenate(got), np.concatenate(want), rms=bound, what=variant)


@pytest.mark.one_in(5)
@SECOND
@pytest.mark.parametrize("axes", ["", pytest.param("tensor=2", marks=full)])
def test_transposed_weights_give_the_same_logits(family, variant, axes):
    """The command line on CPU stores float32 matrices transposed."""
    engine = load(family, variant, axes, storage=TRANSPOSED)
    assert_golden(stepwise_logits(engine), engine, atol=FAMILIES[family].atol)


@pytest.mark.one_in(7)
@SECOND
@pytest.mark.parametrize(
    "on_cpu, axes", [(True, ""), pytest.param(False, "tensor=2", marks=full)], ids=["int8", "int4"]
)
def test_weights_in_4_bits_compute_with_the_numbers_that_they_stand_for(
    family, variant, axes, on_cpu
):
    """What is in int8 is widened in both, because a product with it rounds activations."""
    if axes and not fits(family, variant, axes):
        axes = next(iter(meshes(family, variant)))
    engine = load(family, variant, axes, storage=int4(8, on_cpu))

    def widened(kind, wide, weights):
        change = lambda w: wide(w) if isinstance(w, kind) else w
        return jax.tree.map(change, weights, is_leaf=is_stored)

    weights = widened(Rowwise, lambda w: w.values * w.scale.swapaxes(-1, -2), engine.weights)
    plain = widened(Grouped, lambda w: dequantize_groups(w).swapaxes(-1, -2), weights)
    leaves = jax.tree.leaves(weights, is_leaf=is_stored)
    kinds = [w.kind for w in by_path(engine.model.weight_layout(engine.config)).values()]
    assert sum(isinstance(w, Grouped) for w in leaves) >= kinds.count("matrix") > 0
    want = np.concatenate(stepwise_logits(engine._replace(weights=plain)))
    got = np.concatenate(stepwise_logits(engine._replace(weights=weights)))
    assert_close(got, want, atol=FAMILIES[family].atol)
    golden = np.concatenate([prompt.logits for prompt in goldens(family, variant)])
    assert_close(got, golden, rms=0.48)  # a tenth above the largest of these errors


# ---- implementations of the same computation


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "steps", [prompt_logits, pytest.param(stepwise_logits, marks=full)], ids=["prefill", "decode"]
)
@SECOND
def test_the_reference_gives_the_golden_logits(family, variant, steps):
    """It runs on a mesh, so shard_map checks what is replicated."""
    engine = load(family, variant, next(iter(meshes(family, variant)), ""))
    got = steps(engine, implementation="reference")
    assert_golden(got, engine, atol=FAMILIES[family].atol)


@pytest.mark.one_in(5)
@SECOND
def test_the_tpu_kernels_give_the_golden_logits(family, variant):
    """They are interpreted, token by token. The cache has 128 positions, the fewest that the
    attention kernel reads. The delta rule's takes states of 128 x 128, which one variant has."""
    variant = "nested_moe_fp8" if family == "qwen3_5" else variant
    got = stepwise_logits(load(family, variant), jnp.float32, "tpu", 128)
    assert_golden(got, load(family, variant), atol=FAMILIES[family].atol)


# ---- memory


@pytest.mark.one_in(7)
@pytest.mark.parametrize(
    "dtype", [jnp.int8, pytest.param(jnp.float32, marks=full)], ids=["int8", "f32"]
)
@SECOND
def test_generate_updates_its_state_in_place(family, variant, dtype):
    assert_updates_in_place(load(family, variant, "tensor=2", "bfloat16"), dtype, capacity=8200)


@pytest.mark.one_in(4)
@FIRST
def test_a_full_slot_and_an_empty_one_stay_as_they_are(family, variant):
    """They stay so beside a slot that grows. Before that, two chunks are read, the second one with
    padding. The tokens after the prompt are those of transformers."""
    engine, prompt = load(family, variant), goldens(family, variant)[2]
    n = len(prompt.tokens)
    lengths, T = np.array([n, 0, n - 1]), n // 2 + 1
    tokens_BT = jnp.tile(jnp.pad(prompt.tokens, (0, 2 * T - n)), (3, 1))
    state = init_state(engine, 3, n + 1, jnp.float32)
    static = dict(config=engine.config, mesh=engine.mesh)
    for start in (0, T):
        count_B = jnp.asarray(np.clip(lengths - start, 0, T))
        chunk_BT = tokens_BT[:, start : start + T]
        state = engine.model.prefill(engine.weights, state, chunk_BT, count_B, **static)
    np.testing.assert_array_equal(state.length_B, lengths)
    np.testing.assert_array_equal(state.token_B[::2], prompt.logits[[n - 1, n - 2]].argmax(-1))
    for want in ([n + 1, 0, n], [n + 1, 0, n + 1]):
        before = jax.tree.map(jnp.copy, state)
        state = engine.model.generate(engine.weights, state, **static)
        np.testing.assert_array_equal(state.length_B, want)
    assert state.token_B[0] == prompt.greedy[1]
    np.testing.assert_array_equal(state.token_B[:2], before.token_B[:2])
    for new, old in zip(jax.tree.leaves(state.cache), jax.tree.leaves(before.cache), strict=True):
        np.testing.assert_array_equal(new[:2], old[:2])


@pytest.mark.one_in(7)
@SECOND
def test_a_step_computes_the_angles_of_its_positions_once(family, variant):
    """Otherwise XLA on CPU would fuse them into the rotations, and compute them in every layer.
    With jax 0.10 it still does."""
    engine = load(family, variant)
    model, config = engine.model, engine.config
    state = jax.eval_shape(lambda: model.init_state(config, 1, 64, jnp.float32))
    given = engine.weights, state, jnp.zeros((1, 32), jnp.int32), jnp.array([32])
    step = model.prefill.lower(*given, config=config, mesh=engine.mesh)
    rotates = hasattr(model, "rotary")
    cos_and_sin = re.search(r"optimization_barrier %\S+, %\S+ ", step.as_text())
    assert (cos_and_sin is not None) == rotates
    if jax.__version_info__ >= (0, 11):
        assert step.compile().as_text().count(" cosine(") == rotates


# ---- placement


@pytest.mark.parametrize("family", ["llama3", "qwen3", "deepseek_r1", "kimi_k2"])
def test_frequencies_that_are_stored_with_a_layer_are_not_loaded(family):
    name, model = "model.layers.0.self_attn.rotary_emb.inv_freq", model_of(family)
    for variant in fixtures(family):
        table = model.checkpoint_table(model.config_from_hf(hf_config(family, variant)))
        own = name if target_of(name, table)[0] != "" else f"language_model.{name}"
        assert target_of(own, table) == (None, ["0"])


def shapes_of(layout):
    return {path: weight.shape for path, weight in by_path(layout).items()}


@pytest.mark.parametrize("family, variant", VARIANTS)
def test_a_size_that_is_not_what_the_files_hold_is_refused(family, variant):
    """Changes every number of config.json on which a shape depends by -1, and by 1."""
    model, hf, directory = model_of(family), hf_config(family, variant), FIXTURES / family / variant
    config, mesh = model.config_from_hf(hf), make_mesh()
    seen = 0
    for field in config._fields:
        if type(getattr(config, field)) is not int:
            continue
        for change in (-1, 1):
            other = config._replace(**{field: getattr(config, field) + change})
            try:
                shapes = model.weight_layout(other)
            except (ValueError, ZeroDivisionError, IndexError):
                continue
            if shapes_of(shapes) != shapes_of(model.weight_layout(config)):
                seen += 1
                with pytest.raises(ValueError):
                    load_weights(directory, model, other, mesh, "float32")
    assert seen > 4


@pytest.mark.parametrize("family, variant", VARIANTS)
def test_every_split_dimension_divides_on_every_mesh_that_fits(family, variant):
    """Every variant fits some mesh, except some in fp8, whose matrices have too few blocks."""
    config = model_of(family).config_from_hf(hf_config(family, variant))
    published = {w.published for w in by_path(model_of(family).weight_layout(config)).values()}
    assert meshes(family, variant) or Fp8 in published
    for axes in meshes(family, variant):
        sizes = parse_mesh(axes)
        shards = Shards(sizes.get("expert", 1), sizes.get("tensor", 1))
        assert_divides(model_of(family), config, shards)


@FIRST
def test_more_devices_than_heads_are_refused_with_both_numbers(family, variant):
    model = model_of(family)
    config = model.config_from_hf(hf_config(family, variant))
    heads = config.num_attention_heads
    with pytest.raises(ValueError, match=rf"\b{heads + 1} devices.*only {heads} query heads"):
        model.weight_layout(config, Shards(tensor=heads + 1))


@pytest.mark.one_in(3)
@FIRST
def test_padding_of_the_vocabulary_is_never_sampled(family, variant):
    assert_padding_never_sampled(load(family, variant, "tensor=4"))


# ---- config.json


def refused(family, hf):
    """Returns the message with which a family refuses a config.json, which must be one line."""
    with pytest.raises(ValueError) as error:
        model_of(family).config_from_hf(hf)
    assert "\n" not in str(error.value)
    return str(error.value)


def names_of(family, field):
    """Returns the keys that a field may have in a config.json."""
    hint = get_type_hints(model_of(family).Config, include_extras=True)[field]
    return [field, *(x for x in getattr(hint, "__metadata__", ()) if isinstance(x, str))]


def spelled(family, hf, field):
    """Returns the key that a field has in a config.json, or None."""
    return next((name for name in names_of(family, field) if name in hf), None)


@pytest.mark.parametrize("family, variant", VARIANTS)
def test_a_field_that_has_no_default_is_missed_by_name(family, variant, monkeypatch):
    """Not so for fields that the model file reads itself, or whose missing key has a meaning."""
    model, hf, found = model_of(family), hf_config(family, variant), {}

    def read(*args, **options):
        found.update(options)
        return read_config(*args, **options)

    monkeypatch.setattr(model, "read_config", read)
    Config, hints = type(model.config_from_hf(hf)), get_type_hints(model.Config)
    how = ("fields_read", "if_missing", "if_null")
    derived = {field for name in how for field in found.get(name, ())}
    derived |= {field for field in Config._fields if type(None) in get_args(hints[field])}
    for field in {*Config._fields} - {*Config._field_defaults} - derived:
        if (key := spelled(family, hf, field)) and hf[key] is not None:
            assert key in refused(family, {**hf, key: None}).split("which this model needs")[0]


WRONG: tuple[Any, ...] = ("8", [8], {}, -1, 0, True, 2.5, float("nan"), float("inf"), 10**12)


@FIRST
def test_a_number_of_the_wrong_kind_is_refused_by_name(family, variant):
    hf, hints = hf_config(family, variant), get_type_hints(model_of(family).Config)
    rules = get_type_hints(model_of(family).Config, include_extras=True)
    for field, kind in hints.items():
        key = spelled(family, hf, field)
        if kind not in (int, float) or key is None:
            continue
        for value in WRONG:
            if (kind is float and value in (2.5, 10**12)) or (rules[field] is Index and value == 0):
                continue
            assert f"{key}=" in refused(family, {**hf, key: value}), (key, value)


@FIRST
def test_a_switch_that_is_no_boolean_is_refused_by_name(family, variant):
    hf, hints = hf_config(family, variant), get_type_hints(model_of(family).Config)
    for field in (name for name, kind in hints.items() if kind is bool and name in hf):
        for value in (1, 0, "true", None, []):
            if value is not None:
                assert f"{field}=" in refused(family, {**hf, field: value})


STRANGE: tuple[tuple[str, Any], ...] = (
    ("embedding_multiplier", 12.0),
    ("no_rope_layers", [1, 0]),
    ("scale_emb", 12),
    ("partial_rotary_factor", 0.5),
    ("is_causal", False),
    ("quantization_config", {"quant_method": "gptq", "bits": 4}),
    ("original_max_position_embeddings", 4096),
    ("per_layer_config", {"0": {}}),
    ("model_type", "gemma"),
    ("model_type", None),
    ("model_type", ["llama"]),
    ("anything_new", 1),
)


@pytest.mark.parametrize("key, value", STRANGE)
@FIRST
def test_a_key_that_the_file_does_not_know_is_refused_by_name(family, variant, key, value):
    """If the key is a field of this family, its value here is one that no such file has."""
    fields = {name for f in model_of(family).Config._fields for name in names_of(family, f)}
    value = [value] if key in fields else value
    assert key in refused(family, {**hf_config(family, variant), key: value})


@FIRST
def test_keys_that_change_nothing_change_nothing(family, variant):
    hf = hf_config(family, variant)
    inert = dict(use_cache=False, torch_dtype="float16", architectures=["X"], eos_token_id=[1, 2])
    inert |= dict(attention_dropout=0.1, initializer_range=0.5, transformers_version="9", top_k=3)
    inert |= dict(anything_new=None, sliding_window_extra=None)
    model = model_of(family)
    assert model.config_from_hf(hf | inert) == model.config_from_hf(hf)

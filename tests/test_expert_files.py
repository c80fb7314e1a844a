"""Experts load from every published layout: one file entry per expert, one entry for all with
either order of axes, and 4 or 8 bits, which they keep."""

from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close, assert_trees_equal
from engine import hf_config, tensors_of
from engine import load as published
from golden import assert_golden, prompt_logits
from jax.experimental.layout import Format, Layout
from safetensors.numpy import save_file

from common.kernels.ragged_dot import format_of
from common.loading import checkpoint as loading
from common.loading.checkpoint import load_weights
from common.loading.files import MOST_LINES
from common.loading.random_weights import random_weights
from common.names import Axes
from common.quant import INT8, Fp8, Mxfp4, Rowwise
from common.sharding import EXPERT, TENSOR, P, Shards, make_mesh, model_shards, round_up
from common.weights import array, matrix, stack

BF16, FP8 = np.dtype(jnp.bfloat16), np.dtype(jnp.float8_e4m3fn)
E, F, D, N, L = 12, 7, 64, 150, 2  # more than ten experts; widths that no mesh divides


class Layer(NamedTuple):
    router: Any  # [E, D]
    each: Any  # [E, F, D], an entry per expert
    fused: Any  # [E, F, D], stored [E, D, F]
    packed: Any  # [E, F, D] in 4 bits; the file has an axis for the groups of 32
    square: Any  # [N, D] in 8 bits


class Weights(NamedTuple):
    layers: tuple[Layer, ...]


def layout(config, shards=Shards()):  # noqa: B008
    shape, spec = (E, round_up(F, shards.tensor), D), P(EXPERT, TENSOR, None)
    layer = Layer(
        router=array((E, D)),
        each=stack(shape, spec),
        fused=stack(shape, spec),
        packed=stack(shape, spec, Mxfp4),
        square=matrix((N, D), P(None, None), Fp8),
    )
    return Weights((layer,) * L)


def table(config, shards=Shards()):  # noqa: B008
    return {
        "m.*.router.weight": "layers.*.router",
        "m.*.experts.*.up.weight": "layers.*.each",
        "m.*.experts.fused": ("layers.*.fused", Axes.SWAPPED),
        "m.*.experts.packed_blocks": ("layers.*.packed.values", Axes.SPLIT),
        "m.*.experts.packed_scales": "layers.*.packed.scale",
        "m.*.square.weight": "layers.*.square.values",
        "m.*.square.weight_scale_inv": "layers.*.square.scale",
    }


MODEL_FILE = SimpleNamespace(weight_layout=layout, checkpoint_table=table)


def stored_tensors():
    rng = np.random.default_rng(0)
    tensors = {}
    for i in range(L):
        for e in reversed(range(E)):
            tensors[f"m.{i}.experts.{e}.up.weight"] = rng.normal(size=(F, D)).astype(BF16)
        tensors |= {
            f"m.{i}.router.weight": rng.normal(size=(E, D)).astype(BF16),
            f"m.{i}.experts.fused": rng.normal(size=(E, D, F)).astype(BF16),
            f"m.{i}.experts.packed_blocks": rng.integers(0, 256, (E, F, D // 32, 16), np.uint8),
            f"m.{i}.experts.packed_scales": rng.integers(110, 130, (E, F, D // 32), np.uint8),
            f"m.{i}.square.weight": rng.normal(size=(N, D)).astype(FP8),
            f"m.{i}.square.weight_scale_inv": rng.normal(size=(2, 1)).astype(BF16),
        }
    return tensors


def expected(tensors, tensor):
    """Returns the weights that loading must give: in float32, except for codes."""

    def padded(x):
        return np.pad(x, ((0, 0), (0, round_up(F, tensor) - F), (0, 0)))

    def layer(i):
        get = lambda name: tensors[f"m.{i}.{name}"]
        each = np.stack([get(f"experts.{e}.up.weight") for e in range(E)])
        codes = get("experts.packed_blocks").reshape(E, F, D // 2)
        return Layer(
            get("router.weight").astype(np.float32),
            padded(each.astype(np.float32)),
            padded(get("experts.fused").astype(np.float32).swapaxes(1, 2)),
            Mxfp4(padded(codes), padded(get("experts.packed_scales"))),
            Fp8(get("square.weight"), get("square.weight_scale_inv").astype(np.float32)),
        )

    return Weights(tuple(layer(i) for i in range(L)))


MESHES = [{}, {"expert": 4}, {"tensor": 4}, {"data": 2, "expert": 2, "tensor": 2}]
ON_MESHES = pytest.mark.parametrize("axes", MESHES, ids=lambda a: "-".join(a) or "1")


def load(directory, axes, **options):
    mesh = make_mesh(**axes)
    return load_weights(directory, MODEL_FILE, None, mesh, np.float32, **options), mesh


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("experts")
    save_file(stored_tensors(), directory / "model.safetensors")
    return directory


@ON_MESHES
def test_experts_arrive_in_order_padded_and_split_from_every_layout(checkpoint, axes):
    weights, mesh = load(checkpoint, axes)
    want = expected(stored_tensors(), model_shards(mesh).tensor)
    assert jax.tree.structure(weights) == jax.tree.structure(want)
    for got, wanted in zip(jax.tree.leaves(weights), jax.tree.leaves(want), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(got), wanted)
    each = weights.layers[0].each
    assert {s.data.shape[0] for s in each.addressable_shards} == {E // axes.get("expert", 1)}


@ON_MESHES
def test_int8_takes_the_stacks_and_fp8_and_leaves_routers_and_4_bits(checkpoint, axes):
    weights, mesh = load(checkpoint, axes, storage=INT8)
    want = expected(stored_tensors(), model_shards(mesh).tensor)
    for got, wanted in zip(weights.layers, want.layers, strict=True):
        for name in ("each", "fused"):
            stack, dense = getattr(got, name), getattr(wanted, name)
            assert type(stack) is Rowwise and stack.scale.shape == (E, 1, dense.shape[1])
            step = np.asarray(stack.scale)[:, 0, :, None]
            assert_close(np.asarray(stack.values) * step, dense, atol=0.51 * step.max())
        assert got.router.dtype == jnp.float32
        assert (type(got.packed), type(got.square)) == (Mxfp4, Rowwise)


@pytest.mark.one_in(3)
@ON_MESHES
@pytest.mark.parametrize("storage", [None, INT8], ids=["plain", "int8"])
def test_random_experts_are_laid_out_like_loaded_ones_and_are_finite(checkpoint, axes, storage):
    loaded, mesh = load(checkpoint, axes, storage=storage)
    random = random_weights(layout(None, model_shards(mesh)), mesh, np.float32, 0, storage)
    assert jax.tree.structure(random) == jax.tree.structure(loaded)
    for a, b in zip(jax.tree.leaves(random), jax.tree.leaves(loaded), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        assert np.isfinite(np.asarray(a).astype(np.float32)).all()


def without(name):
    return lambda tensors: tensors.pop(name)


def another(name, x):
    return lambda tensors: tensors.update({name: x})


EACH, FUSED, BLOCKS = (f"m.1.experts.{n}" for n in ("2.up.weight", "fused", "packed_blocks"))
WRONG = {
    "no file has m.1.experts.2.up.weight, of shape [7, 64]": without(EACH),
    "m.1.experts.12.up.weight is not a weight of this model: it has only 12 experts": another(
        "m.1.experts.12.up.weight", np.zeros((F, D), BF16)
    ),
    "has dtype BF16, but m.1.experts.2.up.weight has F32": another(
        EACH, np.zeros((F, D), np.float32)
    ),
    "fused has shape [12, 7, 64], but the config says [12, 64, 7]": another(
        FUSED, np.zeros((E, F, D), BF16)
    ),
    "packed_blocks has dtype BF16, but only U8 can be read": another(
        BLOCKS, np.zeros((E, F, D // 32, 16), BF16)
    ),
    "packed_blocks has shape [12, 7, 48], but the config says [12, 7, 32]": another(
        BLOCKS, np.zeros((E, F, 3, 16), np.uint8)
    ),
    "fused has dtype U8, but only F32, F16, BF16 can be read": another(
        FUSED, np.zeros((E, D, F), np.uint8)
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_an_expert_that_is_missing_unknown_or_other_than_the_rest_is_named(message, tmp_path):
    tensors = stored_tensors()
    WRONG[message](tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        load(tmp_path, {})
    assert message in str(error.value) and "m.0." not in str(error.value)


# ---- other layouts of published families


def joined(tensors):
    """Returns the tensors as `save_pretrained(save_original_format=False)` of transformers 5 names
    and joins them: all experts of a layer, and gate with up."""
    found = dict(tensors)
    for name in tensors:
        at, first, kind = name.partition(".experts.0.")
        if not first or kind.startswith("up"):
            continue
        kind, end = kind.split("_proj.weight")
        kinds, matrices = ("gate", "up") if kind == "gate" else (kind,), []
        while (x := f"{at}.experts.{len(matrices)}.") + f"{kind}_proj.weight{end}" in found:
            matrices.append(np.concatenate([found.pop(f"{x}{k}_proj.weight{end}") for k in kinds]))
        found[f"{at}.experts.{'_'.join(kinds)}_proj{end}"] = np.stack(matrices)
    return found


def load_joined(directory, family, variant, change=lambda x: x):
    tensors, like = joined(tensors_of(family, variant)), published(family, variant, "expert=2")
    assert not any(".experts.0." in name for name in tensors)
    for name in [name for name in tensors if name.endswith("gate_up_proj")]:
        tensors[name] = np.ascontiguousarray(change(tensors[name]))
    save_file(tensors, directory / "model.safetensors")
    return load_weights(directory, like.model, like.config, like.mesh, "float32")


@pytest.mark.parametrize(
    "family, variant",
    [("qwen3", "moe_untied"), ("qwen3", "moe_fp8"), ("deepseek_r1", "yarn"), ("kimi_k2", "k25")],
)
def test_experts_that_transformers_5_joined_are_the_published_ones(family, variant, tmp_path):
    got, want = load_joined(tmp_path, family, variant), published(family, variant, "expert=2")
    assert_trees_equal(got, want.weights)


@pytest.mark.parametrize("change", [lambda x: x[:-1], lambda x: x[:, :-2], lambda x: x[:, :-1]])
def test_joined_experts_of_another_shape_are_refused(change, tmp_path):
    with pytest.raises(ValueError, match=r"experts\.\d+\.(gate|up)_proj\.weight") as error:
        load_joined(tmp_path, "qwen3", "moe_untied", change)
    assert len(str(error.value).splitlines()) <= MOST_LINES + 1


def test_4_bits_are_laid_out_as_the_kernel_reads_them_and_keep_their_numbers(monkeypatch):
    def on_tpu(form, sharding, axes):
        return Format(Layout((0, 2, 1) if form is Mxfp4 else tuple(range(axes))), sharding)

    w = Mxfp4(*(jnp.arange(2 * 64 * n, dtype=jnp.uint8).reshape(2, 64, n) for n in (32, 2)))
    assert format_of(Mxfp4, w.values.sharding).layout.major_to_minor == (0, 1, 2)  # on CPU
    monkeypatch.setattr(loading, "format_of", on_tpu)
    placed = loading.laid_out([w, w.values])
    orders = [x.format.layout.major_to_minor for x in jax.tree.leaves(placed)]
    assert orders == [(0, 2, 1), (0, 2, 1), (0, 1, 2)]
    assert_trees_equal(placed, [w, w.values])


def test_gpt_oss_with_dequantised_experts_has_the_numbers_of_its_4_bits(tmp_path):
    """As transformers saves a model that was loaded with Mxfp4Config(dequantize=True)."""
    tensors, engine = tensors_of("gpt_oss", "mxfp4"), published("gpt_oss", "mxfp4")
    codes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in [x.removesuffix("_blocks") for x in tensors if x.endswith("_blocks")]:
        blocks, exponents = (tensors.pop(f"{name}_{x}") for x in ("blocks", "scales"))
        numbers = codes[np.stack([blocks & 15, blocks >> 4], axis=-1)]  # [E, out, groups, 16, 2]
        numbers = np.ldexp(numbers, exponents.astype(int)[..., None, None] - 127)
        tensors[name] = (
            numbers.reshape(*blocks.shape[:2], -1).swapaxes(1, 2).astype(BF16, order="C")
        )
    save_file(tensors, tmp_path / "model.safetensors")
    config = engine.model.config_from_hf(
        hf_config("gpt_oss", "mxfp4") | dict(quantization_config=None)
    )
    weights = load_weights(tmp_path, engine.model, config, engine.mesh, "float32")
    plain = engine._replace(config=config, weights=weights)
    assert_golden(prompt_logits(plain), plain, atol=1e-4)

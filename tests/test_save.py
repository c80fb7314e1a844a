"""What was loaded can be written as a checkpoint again, and is the same to the last bit."""

import math

import jax
import numpy as np
import pytest
from engine import FIXTURES, model_of
from families import FAMILIES
from test_families import fixtures, meshes

from common.loading.stored import DTYPES, open_tensors
from common.serving.load import load
from common.sharding import make_mesh, parse_mesh
from folio import save

CASES = [(family, facts.precise[0]) for family, facts in FAMILIES.items()]
MORE = [(f, v) for f in FAMILIES for v in fixtures(f) if (f, v) not in CASES]


def tensors_of(directory):
    found = {}
    for name, tensor in open_tensors(directory).items():
        with open(tensor.file, "rb") as f:
            f.seek(tensor.offset)
            data = f.read(math.prod(tensor.shape) * DTYPES[tensor.dtype].itemsize)
        found[name] = np.frombuffer(data, DTYPES[tensor.dtype]).reshape(tensor.shape)
    return found


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "family, variant", [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)]
)
def test_what_is_written_is_what_was_read(family, variant, tmp_path, monkeypatch):
    """In several files, from a mesh that pads and repeats."""
    monkeypatch.setattr(save, "LARGEST", 20_000)
    axes = next(iter(meshes(family, variant)), "")
    source, mesh = FIXTURES / family / variant, make_mesh(**parse_mesh(axes))
    model = load(model_of(family), str(source), mesh=mesh)
    save.save(model, tmp_path / "saved")
    old, new = tensors_of(source), tensors_of(tmp_path / "saved")
    for name, tensor in new.items():
        was = old.get(name, old.get(f"transformer.{name}"))  # GPT-2's own files have no prefix
        if was is None:
            assert ".experts." in name  # written one by one
        elif was.dtype == tensor.dtype:
            assert was.tobytes() == tensor.tobytes(), name
        else:  # biases and scales that are added in float32
            np.testing.assert_array_equal(was.astype(np.float32), tensor)
    again = load(model_of(family), str(tmp_path / "saved"), mesh=mesh)
    assert jax.tree.structure(again.weights) == jax.tree.structure(model.weights)
    for x, y in zip(*map(jax.tree.leaves, (again.weights, model.weights)), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    assert len({*tmp_path.glob("saved/*.safetensors")}) > 1


def changed(llama, what):
    weights, norm = llama.weights, llama.weights.norm
    fields = dict(
        config=dict(config=llama.config._replace(rope_theta=5e5)),
        shape=dict(weights=weights._replace(norm=norm[:10])),
        nan=dict(weights=weights._replace(norm=norm * np.nan)),
        layer=dict(weights=weights._replace(layers=weights.layers[1:])),
        none=dict(weights=None),
        large=dict(weights=weights._replace(norm=norm + 1e5)),
        integers=dict(weights=weights._replace(norm=norm.astype(np.int32))),
    )
    return llama._replace(**fields[what])


@pytest.mark.parametrize(
    "what, dtype, told",
    [
        ("config", None, "the config was changed"),
        ("shape", None, r"norm has shape \(10,\), not \("),
        ("nan", None, "norm has numbers that are NaN"),
        ("layer", None, "weights, but its config wants"),
        ("none", None, "no weights"),
        ("large", "float16", "norm has numbers that are NaN or infinite in float16"),
        ("integers", None, "norm has dtype int32, not one of float32, float16, bf"),
        ("none", "int8", "save writes one of float32, float16, bfloat16, not int8"),
        ("none", "float64", "save writes one of float32, float16, bfloat16, not float64"),
    ],
)
def test_what_could_not_be_read_again_is_not_written(what, dtype, told, tmp_path):
    llama = load(model_of("llama3"), str(FIXTURES / "llama3" / "scaled"))
    with pytest.raises(ValueError, match=told):
        save.save(changed(llama, what), tmp_path / "saved", dtype)
    assert not (tmp_path / "saved").exists()


def test_changed_weights_are_written_in_another_dtype(tmp_path):
    model = load(model_of("llama3"), str(FIXTURES / "llama3" / "scaled"))
    changed = model.weights._replace(norm=model.weights.norm + 1)
    save.save(model._replace(weights=changed), tmp_path, "bfloat16")
    saved = tensors_of(tmp_path)["model.norm.weight"]
    np.testing.assert_array_equal(saved, np.asarray(changed.norm).astype(saved.dtype))
    assert saved.dtype == "bfloat16"
    again = load(model_of("llama3"), str(tmp_path))
    assert again.dtype == "bfloat16" and again.config == model.config


def test_what_was_widened_is_read_wide_again(tmp_path):
    model = load(model_of("llama3"), str(FIXTURES / "llama3" / "bf16_sharded"))
    wide = jax.tree.map(lambda x: x.astype(np.float32) + np.float32(1e-4), model.weights)
    save.save(model._replace(weights=wide), tmp_path)
    again = load(model_of("llama3"), str(tmp_path))
    assert (model.dtype, again.dtype) == ("bfloat16", "float32")
    np.testing.assert_array_equal(again.weights.norm, wide.norm)


@pytest.mark.parametrize("parts, name, at", [(4, "k", (0, 0)), (3, "o", (0, -1))])
def test_copies_that_differ_and_padding_that_is_used_are_not_lost(parts, name, at, tmp_path):
    """Training on four devices changes each copy of the two key heads on its own. On three, two of
    six query heads are padding."""
    llama = load(model_of("llama3"), mesh=make_mesh(tensor=parts))
    first, *rest = llama.weights.layers

    def with_layer(w):
        layers = (first._replace(**{f"w{name}": w}), *rest)
        return llama._replace(weights=llama.weights._replace(layers=layers))

    w = getattr(first, f"w{name}")
    save.save(with_layer(2 * w), tmp_path / "alike")
    with pytest.raises(ValueError, match=f"0.self_attn.{name}_proj.weight: its copies differ, or"):
        save.save(with_layer(w.at[at].add(1)), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_what_cannot_be_written_is_refused(tmp_path):
    source = str(FIXTURES / "llama3" / "scaled")
    with pytest.raises(ValueError, match="quantised while loading"):
        save.save(load(model_of("llama3"), source, quant="int8"), tmp_path / "one")
    with pytest.raises(FileExistsError, match="is not empty"):
        save.save(load(model_of("llama3"), source), source)
    with pytest.raises(ValueError, match="random weights have no config"):
        save.save(load(model_of("llama3"), source)._replace(directory=None), tmp_path)

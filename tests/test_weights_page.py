"""docs/weights.md explains what model files use to say what is loaded, and its example computes
what it says."""

import ast
import builtins
import re
import types
import typing

import numpy as np
import pytest
from compare import assert_close
from engine import ROOT, Engine, empty_cache, forward, hf_config, model_of, tensors_of
from families import SHOWN
from safetensors.numpy import save_file

from common.loading.checkpoint import load_weights
from common.sharding import make_mesh

PAGE = (ROOT / "docs" / "weights.md").read_text()
PROSE, EXAMPLE = re.split(r"```diff\n", PAGE)
EXAMPLE = EXAMPLE.split("```")[0].splitlines()
SPANS = re.findall(r"`([^`]+)`", PROSE)
EXPLAINED = {word for span in SPANS for word in re.findall(r"\w+", span)}
SOURCES = {family: (ROOT / family / "model.py").read_text() for family in SHOWN}
MODULES = ("names", "weights", "fields", "config")  # of `common`: from these, a file declares
CALLS = ("read_config", "read_rope", "Order", "Dropped", "norm", "bias", "array")
NOT_EXPLAINED = {"show"}  # how an error message shows a value


def used(source: str) -> set[str]:
    """Returns what a model file declares with: names that it imports, keywords, axes, the forms
    in which files store its matrices, and the types of its config's fields."""
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=module) if module in {f"common.{x}" for x in MODULES}:
                found |= {alias.name for alias in node.names} - NOT_EXPLAINED
            case ast.ImportFrom(module="common.quant"):
                found |= {alias.name for alias in node.names} & {"Fp8", "Mxfp4", "Transposed"}
            case ast.Call(func=ast.Name(id=name)) if name in CALLS:
                found |= {keyword.arg for keyword in node.keywords if keyword.arg}
            case ast.Attribute(value=ast.Name(id="Axes")):
                found.add(node.attr)
            case ast.ClassDef(name="Config"):
                for field in node.body:
                    if isinstance(field, ast.AnnAssign):
                        kind = {n.id for n in ast.walk(field.annotation) if isinstance(n, ast.Name)}
                        found |= kind - {"tuple", "Packing", "RopeScaling", "Yarn", "LayerType"}
    return found


@pytest.mark.parametrize("family", SHOWN)
def test_the_page_explains_all_that_a_model_file_declares_with(family):
    found = used(SOURCES[family])
    assert {"read_config", "matrix", "Same", "model_types", "int"} <= found
    assert found - EXPLAINED == set()


def test_the_page_names_nothing_that_is_not_there():
    files = [*(ROOT / "common").glob("*.py"), *(ROOT / "common" / "command").glob("*.py")]
    text = "\n".join([*SOURCES.values(), *(file.read_text() for file in files)])
    there = {*re.findall(r"\w+", text), *dir(builtins), *dir(typing)}
    assert EXPLAINED - there == set()


def test_an_example_stands_in_the_model_file_that_it_is_from():
    examples = re.findall(r"^\* `([^`]+)`(?: \((\w+)\))?:", PAGE, re.MULTILINE)
    assert len(examples) == len(re.findall(r"^\* ", PAGE, re.MULTILINE)) > 20
    for line, family in examples:
        assert line in SOURCES[family or "llama3"], line


def changed(source: str) -> str:
    """Returns llama3/model.py with the changes that the page shows."""
    lines, at = source.splitlines(), 0
    for line in EXAMPLE:
        sign, text = line[0], line[1:]
        if sign == "+":
            lines.insert(at, text)
            at += 1
        else:
            (at,) = (i for i, other in enumerate(lines) if other == text)
            if sign == "-":
                del lines[at]
            else:
                at += 1
    return "\n".join(lines)


@pytest.fixture(scope="module")
def mine():
    module = types.ModuleType("mine.model")
    exec(compile(changed(SOURCES["llama3"]), "mine/model.py", "exec"), module.__dict__)
    return module


PUBLISHED = hf_config("qwen3", "qwen2")
BIAS = re.compile(r"model\.layers\.\d+\.self_attn\.q_proj\.bias")
OTHERS = re.compile(r".*\.self_attn\.[kv]_proj\.bias")


def saved(tensors, directory):
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    return directory


def opened(module, hf, directory, mesh):
    config = module.config_from_hf(hf)
    weights = load_weights(directory, module, config, mesh, "float32")
    return Engine(module, config, weights, mesh, "", "")


def llama(tensors):
    """Returns a config.json of llama3, and the tensors without the biases on keys and values."""
    names = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"
    names += " num_key_value_heads rope_theta rms_norm_eps tie_word_embeddings"
    hf = {name: PUBLISHED[name] for name in names.split()} | dict(model_type="llama")
    return hf, {name: x for name, x in tensors.items() if not OTHERS.fullmatch(name)}


@pytest.mark.full
def test_the_example_computes_what_qwen2_computes_without_its_other_biases(mine, tmp_path):
    """On four devices, over which the heads do not divide, so an Order moves the biases too."""
    tensors, mesh = tensors_of("qwen3", "qwen2"), make_mesh(tensor=4)
    hf, own = llama(tensors)
    zeroed = {name: x * (not OTHERS.fullmatch(name)) for name, x in tensors.items()}
    got, want = (
        opened(mine, hf, saved(own, tmp_path / "mine"), mesh),
        opened(model_of("qwen3"), PUBLISHED, saved(zeroed, tmp_path / "qwen2"), mesh),
    )
    tokens = np.random.default_rng(3).integers(0, PUBLISHED["vocab_size"], (1, 9))
    logits = [forward(x, empty_cache(x, 1), tokens, [9])[0] for x in (got, want)]
    assert_close(*logits, atol=1e-5)
    without = {name: x * (not BIAS.fullmatch(name)) for name, x in own.items()}
    other = opened(mine, hf, saved(without, tmp_path / "without"), mesh)
    assert np.abs(forward(other, empty_cache(other, 1), tokens, [9])[0] - logits[0]).max() > 0.1


def test_a_tensor_that_is_unknown_or_missing_gets_the_sentence_of_the_page(mine, tmp_path):
    hf, own = llama(tensors_of("qwen3", "qwen2"))
    both, neither = saved(own, tmp_path / "both"), tmp_path / "neither"
    saved({name: x for name, x in own.items() if not BIAS.fullmatch(name)}, neither)
    mesh, page = make_mesh(), " ".join(PAGE.split())
    cases = (
        (model_of("llama3"), both, "q_proj.bias is not a weight of this model"),
        (mine, neither, "no file has model.layers.0.self_attn.q_proj.bias, of shape [72]"),
    )
    for module, directory, sentence in cases:
        with pytest.raises(ValueError, match=re.escape(sentence)):
            opened(module, hf, directory, mesh)
    assert '"is not a weight of this model"' in page and '"no file has"' in page

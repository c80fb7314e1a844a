"""Model files differ where their architectures do, and nowhere else."""

import importlib.util
import itertools
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location(
    "differences", Path(__file__).parent.parent / "tools" / "differences.py"
)
differences = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(differences)

FILES = (differences.BASE, *differences.FAMILIES)
# What says how a model is built, and therefore differs between any two.
ARCHITECTURE = {
    *("Config", "config_from_hf", "Layer", "Weights", "weight_shapes", "weight_specs"),
    *("Moe", "attention", "mlp", "moe", "route", "block", "forward", "checkpoint_table"),
}
# Helpers of one name and task that two families still write differently, and why.
INTENDED = {
    ("rms_norm", "gpt_oss"): "multiplies by the weight in float32",
    ("rope_frequencies", "llama3"): "the llama3 scaling, not YaRN",
    ("rotary", "llama3"): "no attention factor",
    ("init_cache", "gpt2"): "as many key/value heads as query heads",
    ("KVCache", "gpt2"): "its keys are not rotated",
}


@pytest.mark.parametrize("a, b", itertools.combinations(FILES, 2))
def test_helpers_of_one_name_have_one_body(a, b):
    one, other = differences.definitions(a), differences.definitions(b)
    differ = {
        name
        for name in one.keys() & other.keys() - ARCHITECTURE
        if one[name].source != other[name].source
    }
    allowed = {name for name, family in INTENDED if family in (a, b)}
    assert differ <= allowed, f"{sorted(differ - allowed)} of {a} and {b} differ"


def test_every_intended_difference_is_one():
    sources = {family: differences.definitions(family) for family in FILES}
    for name, family in INTENDED:
        others = {sources[f][name].source for f in FILES if f != family and name in sources[f]}
        assert sources[family][name].source not in others, (name, family)


def test_definitions_stand_in_one_order():
    """So that knowing one file is knowing where to look in all."""
    order = [list(differences.definitions(family)) for family in FILES]
    for a, b in itertools.combinations(order, 2):
        shared = [name for name in a if name in b]
        assert shared == [name for name in b if name in a]


def test_the_page_of_differences_is_that_of_the_files():
    assert differences.PAGE.read_text(encoding="utf-8") == differences.page(), (
        "run python tools/differences.py"
    )

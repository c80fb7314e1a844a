"""The model files on the page of differences differ only where their architectures do."""

import importlib.util
import itertools
import re
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location(
    "differences", Path(__file__).parent.parent / "tools" / "differences.py"
)
differences = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(differences)

FILES = (differences.BASE, *differences.FAMILIES)
# Definitions that say how a model is built, and therefore differ between any two.
ARCHITECTURE = {
    *("Config", "config_from_hf", "Layer", "Weights", "weight_layout", "Moe"),
    *("attention", "mlp", "route", "experts", "block", "checkpoint_table"),
}
# Helpers with the same name and task that a family still writes differently, and why.
INTENDED = {
    ("rms_norm", "gpt_oss"): "multiplies by the weight in float32",
    ("moe", "gpt_oss"): "passes on the limit that clamps",
    ("rope_frequencies", "llama3"): "the llama3 scaling, not YaRN",
    ("rotary", "llama3"): "no attention factor",
    ("Step", "gpt2"): "rotates nothing",
    ("forward", "gpt2"): "adds learned positions; its head is always the embedding",
    ("DecodeState", "gpt2"): "its keys are not rotated",
    ("init_state", "gpt2"): "as many key/value heads as query heads",
    ("attend_slot", "gpt_oss"): "has windows and sinks",
    ("attend_slot", "llama4"): "has chunks",
    ("mixture", "gpt_oss"): "passes on the limit that clamps",
    ("mixture", "llama4"): "multiplies the input of an expert by the score",
    ("DecodeState", "gpt_oss"): "has windows",
    ("init_state", "gpt_oss"): "has windows",
}
LATENT = {
    "DecodeState": "caches latents",
    "STATE_SPEC": "splits the positions of a cache",
    "PROJECTIONS": "has matrices of its own",
    "Step": "rotates a part of a head",
    "Yarn": "scales by mscale",
    "attention_factor": "scales by mscale",
    "forward": "caches latents",
    "init_state": "caches latents",
    "moe": "has shared experts",
    "rope_frequencies": "rotates a part of a head",
    "rotary": "rotates a part of a head",
    "rotate": "rotates neighbours",
}
CHUNKED = {
    "DecodeState": "its keys are not all rotated",
    "Experts": "have no biases",
    "Mlp": "never holds all experts",
    "Step": "has scales of queries",
    "forward": "scales queries",
    "init_state": "has chunks",
    "is_sparse": "reads other settings",
    "moe": "has shared experts, and scores that scale what goes into the others",
    "rope_frequencies": "rotates neighbours",
    "rotary": "no attention factor",
    "rotate": "rotates neighbours",
}
RECURRENT = {
    "DENSE": "lacks other fields",
    "DecodeState": "some layers have a state",
    "PROJECTIONS": "has matrices of its own",
    "Step": "says which tokens are padding",
    "embed": "skips padding",
    "extend": "marks padding, which must not reach a state",
    "forward": "some layers have a state; padding is marked",
    "init_state": "some layers have a state",
    "l2_norm": "norms a sum, not a mean",
    "moe": "has a shared MLP with a gate",
    "rms_norm": "multiplies by 1 + weight",
    "rope_frequencies": "rotates a part of a head",
    "rotary": "rotates a part of a head",
    "rotate": "rotates a part of a head",
}
INTENDED |= {(name, "llama4"): why for name, why in CHUNKED.items()}
INTENDED |= {(name, "qwen3_5"): why for name, why in RECURRENT.items()}
INTENDED |= {(n, family): LATENT[n] for family in ("deepseek_r1", "kimi_k2") for n in LATENT}


@pytest.mark.parametrize("a, b", list(itertools.combinations(FILES, 2)))
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
        others = [f for f in FILES if (name, f) not in INTENDED and name in sources[f]]
        assert sources[family][name].source not in {sources[f][name].source for f in others}


def test_definitions_stand_in_one_order():
    """So whoever knows one file knows where to look in all."""
    order = [list(differences.definitions(family)) for family in FILES]
    for a, b in itertools.combinations(order, 2):
        shared = [name for name in a if name in b]
        assert shared == [name for name in b if name in a]


def test_the_page_of_differences_is_that_of_the_files():
    assert differences.PAGE.read_text(encoding="utf-8") == differences.page(differences.FAMILIES), (
        "run python tools/differences.py"
    )


@pytest.mark.parametrize("family", differences.FAMILIES)
def test_what_the_page_says_of_a_family_names_code_that_its_files_have(family):
    files = (differences.NEARER.get(family, differences.BASE), family)
    code = "".join((differences.ROOT / x / "model.py").read_text("utf-8") for x in files)
    lines = [
        x for x in differences.section(family, differences.notes()).split("\n") if x[:1] == "*"
    ]
    names = re.findall(r"`([^`]+)`", "\n".join(lines))
    assert len(names) > 3 and all(name in code for name in names)


@pytest.mark.parametrize("family, name", [("gpt2", "mlp"), ("qwen3", "Moe"), ("kimi_k2", "route")])
def test_a_definition_of_which_nothing_is_said_is_told(family, name):
    said = differences.notes()
    del said[family][name]
    said["all"].pop(name, None)
    with pytest.raises(ValueError, match=f"says nothing of {name} of {family}"):
        differences.section(family, said)


def test_words_on_a_definition_that_does_not_differ_are_told(monkeypatch):
    said = differences.notes()
    said["qwen3"]["embed"] = "is another"
    monkeypatch.setattr(differences, "notes", lambda: said)
    with pytest.raises(ValueError, match=r"do not differ: \{'qwen3': \['embed'\]\}"):
        differences.page(differences.FAMILIES)


def test_words_for_all_families_are_those_of_several():
    said, page = differences.notes()["all"], differences.page(differences.FAMILIES)
    assert all(page.count(f") {words}.") > 1 for words in said.values())


def test_a_class_gains_loses_and_changes_fields():
    before = (
        "class A(NamedTuple):\n    a: int\n    b: int = 1\n    c: int | None\n    d: int  # one\n"
    )
    after = (
        "class A(NamedTuple):\n    b: int = 2\n    c: int | None = None\n    d: int\n    e: int\n"
    )
    assert differences.change_of_fields(before, after) == "gains `e`; loses `a`"
    assert (
        differences.change_of_fields(before, before.replace("b: int = 1", "b: int"))
        == "changes `b`"
    )
    assert differences.change_of_fields(before, before.replace("# one", "# two")) == ""


@pytest.mark.parametrize("family", FILES)
def test_links_to_lines_lead_to_the_code_that_they_name(family):
    readme = differences.ROOT / family / "README.md"
    assert differences.renumbered(readme) == readme.read_text(encoding="utf-8"), (
        "run python tools/differences.py"
    )


@pytest.mark.parametrize("link", ["#L7", '#L7 "no such code"', '#L7 "x"', '#L1 "x = 1"'])
def test_a_link_that_names_no_line_or_another_is_seen(link, tmp_path):
    (tmp_path / "code.py").write_text("x = 0\nx = 1\n")
    (tmp_path / "README.md").write_text(f"[words](code.py{link})")
    if link == '#L1 "x = 1"':
        assert differences.renumbered(tmp_path / "README.md") == '[words](code.py#L2 "x = 1")'
    else:
        with pytest.raises(ValueError, match="not in one"):
            differences.renumbered(tmp_path / "README.md")

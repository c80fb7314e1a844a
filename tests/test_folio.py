"""`python -m folio` finds the family of a checkpoint."""

import json
import runpy
import sys

import numpy as np
import pytest
from engine import FIXTURES, ROOT, model_of
from families import SHOWN

from common.loading.shape import published_sizes
from folio import compare
from folio.__main__ import family_of, main


@pytest.mark.parametrize("family", SHOWN)
def test_a_checkpoint_runs_with_its_family(family):
    for variant in (FIXTURES / family).iterdir():
        assert family_of(str(variant)) == family, variant.name
    assert family_of(str(ROOT / family / "embedded")) == family
    assert {family_of(size) for size in published_sizes(model_of(family))} == {family}


@pytest.mark.parametrize("hf", [dict(model_type="mamba"), {}, dict(text_config=3)])
def test_what_no_family_computes_is_named(hf, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf))
    kind = hf.get("model_type")
    with pytest.raises(ValueError, match=f"model_type={kind!r} in config.json is of none of deep"):
        family_of(str(tmp_path))


@pytest.mark.parametrize(
    "words, run",
    [
        ([], "llama3"),
        (["--ckpt", "qwen3-0.6b", "--dry-run", "cpu:1"], "qwen3"),
        (["--prompt", "x", "--ckpt=gpt-oss-20b"], "gpt_oss"),
        (["--adapter", str(FIXTURES / "adapters" / "experts")], "qwen3"),
    ],
)
def test_the_command_line_is_that_of_the_family(words, run, monkeypatch):
    started = []
    monkeypatch.setattr(runpy, "run_module", lambda name, **_: started.append(name))
    monkeypatch.setattr(sys, "argv", ["folio", *words])
    monkeypatch.chdir(ROOT)  # where the adapter's base model is
    main()
    assert started == [f"{run}.main"]


def test_the_help_is_that_of_all_families(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["folio", "--help"])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith("usage: python -m folio [-h] [--ckpt CKPT]")


LORA = str(FIXTURES / "adapters" / "names")
WEIGHTS = str(ROOT / "llama3" / "embedded" / "model.safetensors")


@pytest.mark.parametrize(
    "words, told",
    [
        (["--ckpt", "nothing"], "'nothing' is neither a directory nor a hub id like org/name"),
        (["--ckpt", LORA], f"{LORA} is an adapter: give it as --adapter, its base model as --ckpt"),
        (["--ckpt", WEIGHTS], f"{WEIGHTS} is a file; give the directory that it lies in"),
    ],
)
def test_a_mistake_is_one_line(words, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["folio", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and capsys.readouterr().err == f"error: {told}\n"


def test_differences_from_transformers_are_told_in_one_line(monkeypatch, capsys):
    """Here the place of transformers is taken by the same numbers, one of them changed."""
    ckpt = str(ROOT / "llama3" / "embedded")
    ids, logits, tokens = compare.ours(ckpt, "KING.", 6)
    changed = logits.copy()
    changed[1, 3] += 0.5
    theirs = changed, [*tokens[:4], tokens[4] + 1, tokens[5]]
    monkeypatch.setattr(compare, "theirs", lambda *given: theirs)
    for name in ("torch", "transformers"):
        monkeypatch.setitem(sys.modules, name, sys)
    compare.main(["--ckpt", ckpt, "--text", "KING.", "--tokens", "6"])
    said = f"{ckpt}: logits of {len(ids)} tokens differ by at most 0.5 (their standard deviation is"
    printed = capsys.readouterr().out
    assert printed.startswith(said) and printed.endswith(
        "; the first 4 of 6 greedy tokens are equal\n"
    )
    assert np.argmax(logits[-1]) == tokens[0]


def test_without_torch_it_is_said_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit) as stop:
        compare.main(["--ckpt", "anything"])
    told = capsys.readouterr().err
    assert stop.value.code == 2 and told.endswith("pip install torch transformers\n")
    assert told.count("\n") == 1

"""`python -m folio` finds the family of a checkpoint."""

import json
import runpy
import sys

import pytest
from engine import FIXTURES, ROOT, model_of
from families import SHOWN

from common.loading.shape import published_sizes
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
    ],
)
def test_the_command_line_is_that_of_the_family(words, run, monkeypatch):
    started = []
    monkeypatch.setattr(runpy, "run_module", lambda name, **_: started.append(name))
    monkeypatch.setattr(sys, "argv", ["folio", *words])
    main()
    assert started == [f"{run}.main"]


ADAPTER_ALONE = "--adapter needs --ckpt here: the base model, which says the family"


@pytest.mark.parametrize(
    "words, told",
    [
        (["--ckpt", "nothing"], "'nothing' is neither a directory nor a hub id like org/name"),
        (
            ["--adapter", "a/b"],
            ADAPTER_ALONE,
        ),
    ],
)
def test_a_mistake_is_one_line(words, told, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["folio", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2 and capsys.readouterr().err == f"error: {told}\n"

"""tools/planted_bugs.py takes hours. What is tested here is that it can still plant every bug."""

import tomllib

from engine import ROOT

from tools.planted_bugs import PLACES, bugs_of


def test_every_bug_replaces_code_that_its_file_contains_once():
    bugs = tomllib.loads((ROOT / "tools" / "planted_bugs.toml").read_text(encoding="utf-8"))
    planted = {bug.what for place in PLACES for bug in bugs_of(place)}
    assert planted == {what for family in bugs.values() for what in family}

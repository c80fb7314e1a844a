"""How a command reacts to its environment: a full disk, a platform that is not there, a compilation
cache that is damaged or has no place; and which parts of the library may touch it."""

import io
import os
import re
import subprocess
import sys
import time

import pytest
from engine import ENVIRONMENT, ROOT

from common.command import converse

COMMAND = f"{sys.executable} -m llama3.main --max-new-tokens 3 --max-len 64 --prompt x"


@pytest.fixture
def shell():
    def run(command, **environment):
        began = time.monotonic()
        env = {k: v for k, v in (ENVIRONMENT | environment).items() if v is not None}
        kept = dict(capture_output=True, text=True, cwd=ROOT, env=env, timeout=120)
        done = subprocess.run(["bash", "-c", command], stdin=subprocess.DEVNULL, **kept)
        assert "Traceback" not in done.stderr, done.stderr
        return done, time.monotonic() - began

    return run


def fails(done, message):
    """Asserts that the command ended with one line that holds `message`, and exit code 2."""
    assert done.returncode == 2 and done.stdout == "", done
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert message in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no full device")
def test_a_full_disk_is_one_line(shell):
    fails(shell(f"{COMMAND} >/dev/full")[0], "No space left on device")


def test_input_that_is_no_text_is_named(monkeypatch):
    class Args:
        prompt, prompts = None, ()

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xc3("), encoding="utf-8"))
    with pytest.raises(ValueError, match="standard input is not UTF-8 text"):
        converse.read_prompts(Args)


@pytest.mark.parametrize("platform", ["foo", "cuda"])
def test_a_platform_that_is_not_there_is_one_line(shell, platform):
    done, seconds = shell(COMMAND, JAX_PLATFORMS=platform)
    fails(done, "JAX does not start: ")
    assert f"(JAX_PLATFORMS is {platform!r})" in done.stderr and seconds < 20


@pytest.mark.full
def test_programs_are_cached_where_the_user_says_and_damage_or_no_place_changes_no_text(
    shell, tmp_path
):
    home = dict(XDG_CACHE_HOME=str(tmp_path))
    first, _ = shell(COMMAND, **home)
    entries = [*(tmp_path / "folio" / "programs").glob("*-cache")]
    assert len(entries) > 2 and first.stdout.strip()
    for entry, content in zip(
        entries, (b"", b"x" * 99, entries[0].read_bytes()[:-50]), strict=False
    ):
        entry.write_bytes(content)
    for again in (
        home,
        dict(XDG_CACHE_HOME="/dev/null"),
        dict(JAX_COMPILATION_CACHE_DIR="/dev/null"),
    ):
        done, _ = shell(COMMAND, **again)
        assert (done.returncode, done.stdout) == (0, first.stdout), done.stderr


# What several processes, or other programs, would have to share.
ONLY_IN = {
    r"\bsocket\b": ["common/server/http.py"],
    r"\bsubprocess\b|\bos\._exit\b": [],
    r"\bjax\._src\b": ["common/machines/hosts.py"],
}


@pytest.mark.parametrize("pattern", ONLY_IN)
def test_what_touches_the_machine_stands_in_one_place(pattern):
    files = [ROOT / x for x in ("common", "llama3", "qwen3", "gpt_oss", "deepseek_r1")]
    found = [
        str(file.relative_to(ROOT))
        for folder in files
        for file in sorted(folder.rglob("*.py"))
        if re.search(pattern, file.read_text())
    ]
    assert found == ONLY_IN[pattern]

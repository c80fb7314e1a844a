"""How a command reacts to its environment: closed streams, settings for other programs, a damaged
compilation cache."""

import io
import os
import subprocess
import sys
import time

import pytest
from engine import ENVIRONMENT, ROOT

from common.command import converse

COMMAND = f"{sys.executable} -m llama3.main --max-new-tokens 3 --max-len 64"
ASKED = f"{COMMAND} --prompt x"


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


# ---- streams


def test_closed_streams_take_nothing_away_but_the_text_needs_one(shell):
    done, _ = shell(f"{COMMAND} <&-")
    assert done.returncode == 0 and done.stdout.strip(), "no input, so it takes its own prompt"
    done, _ = shell(f"{ASKED} 2>&-")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.strip()
    fails(shell(f"{ASKED} >&-")[0], "standard output is closed")
    assert shell(f"{ASKED} >&- 2>&- <&-")[0].returncode == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no full device")
def test_a_full_disk_is_one_line(shell):
    fails(shell(f"{ASKED} >/dev/full")[0], "No space left on device")


def test_an_open_pipe_is_waited_for_with_a_word(monkeypatch, capsys):
    class Slow(io.StringIO):
        def read(self, *_):
            time.sleep(0.3)
            return "late"

    monkeypatch.setattr("sys.stdin", Slow())
    monkeypatch.setattr(converse, "WAIT_S", 0.1)
    assert converse.read_stdin() == "late"
    assert capsys.readouterr().err == "[waiting for a prompt on standard input]\n"
    monkeypatch.setattr(converse, "WAIT_S", 0.5)
    assert converse.read_stdin() == "late" and capsys.readouterr().err == ""


def test_input_that_is_no_text_is_named(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xc3("), encoding="utf-8"))
    with pytest.raises(ValueError, match="standard input is not UTF-8 text"):
        converse.read_stdin()


def test_of_many_prompts_it_is_said_now_and_then_how_many_are_answered(monkeypatch, capsys):
    replies = [converse.Reply([], [], [], finish) for finish in ("stop", "length", None)]
    told = time.perf_counter()
    assert converse.note_progress(replies, told) == told and capsys.readouterr().err == ""
    monkeypatch.setattr(converse, "PROGRESS_S", 0.0)
    assert converse.note_progress(replies, told) == told and capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)  # only a terminal gets more than a line
    assert converse.note_progress(replies, told) > told
    assert capsys.readouterr().err == "[2 of 3 prompts answered]\n"


# ---- settings


@pytest.mark.full
def test_settings_for_other_programs_change_nothing(shell):
    names = ("JAX_ENABLE_X64", "JAX_DISABLE_JIT")
    plain, _ = shell(ASKED)
    changed, _ = shell(ASKED, **dict.fromkeys(names, "1"), JAX_NUM_CPU_DEVICES="0")
    assert plain.returncode == changed.returncode == 0, changed.stderr
    assert plain.stdout == changed.stdout


@pytest.mark.parametrize("platform", ["foo", "cuda"])
def test_a_platform_that_is_not_there_is_one_line(shell, platform):
    done, seconds = shell(ASKED, JAX_PLATFORMS=platform)
    fails(done, "JAX does not start: ")
    assert f"(JAX_PLATFORMS is {platform!r})" in done.stderr and seconds < 20


# ---- the compilation cache


@pytest.mark.one_in(2)
@pytest.mark.parametrize("home", [None, "/dev/null/nowhere"])
def test_without_a_home_it_runs_and_keeps_what_it_can(shell, home, tmp_path):
    # If HOME were unset, the password file would give the user's real home.
    set_home = {"HOME": home} if home else {"HOME": str(tmp_path / "new")}
    done, _ = shell(ASKED, XDG_CACHE_HOME=None, **set_home)
    assert done.returncode == 0 and done.stdout.strip()
    lines = done.stderr.splitlines()
    assert len(lines) == (2 if home else 1)
    assert home is None or lines[0].startswith("[compiled programs are not kept: ")


@pytest.mark.full
def test_a_relative_cache_home_is_ignored(shell, tmp_path):
    done, _ = shell(ASKED, XDG_CACHE_HOME="relative", HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / ".cache" / "folio" / "programs").is_dir()
    assert not (ROOT / "relative").exists()


def other_program(entry):
    entry.write_bytes(
        max(entry.parent.glob("*-cache"), key=lambda f: f.stat().st_size).read_bytes()
    )


def folder_instead(entry):
    entry.unlink()
    entry.mkdir()
    (entry / "x").touch()


DAMAGE = {
    "empty": lambda entry: entry.write_bytes(b""),
    "truncated": lambda entry: entry.write_bytes(entry.read_bytes()[:-100]),
    "random": lambda entry: entry.write_bytes(os.urandom(5000)),
    "another program": other_program,
    "a directory": folder_instead,
    "unreadable": lambda entry: entry.chmod(0),
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A compilation cache with the programs of one command, and the text that it printed."""
    home = tmp_path_factory.mktemp("cache")
    env = ENVIRONMENT | {"XDG_CACHE_HOME": str(home)}
    done = subprocess.run(ASKED.split(), capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    return home, done.stdout


@pytest.mark.full
def test_a_program_that_cannot_be_written_takes_no_other_with_it(shell, tmp_path):
    """The limit on the size of a file stands for a full disk."""
    folder = tmp_path / "folio" / "programs"
    folder.mkdir(parents=True)
    other = folder / "jit_extend-of_another_model-cache"
    other.write_bytes(b"x" * 99)
    done, _ = shell(f"prlimit --fsize=4096 {ASKED}", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    first, *rest = done.stderr.splitlines()
    assert first.startswith("[compiled programs are not kept: ") and "File too large" in first
    assert len(rest) == 1 and other.read_bytes() == b"x" * 99
    assert not [*folder.glob("entries.json.*")]


@pytest.mark.full
@pytest.mark.parametrize("record", ["[1, 2]", "7", "[" * 9999], ids=["list", "number", "deep"])
def test_a_record_of_the_programs_that_is_none_is_ignored(shell, programs, record):
    home, text = programs
    (home / "folio" / "programs" / "entries.json").write_text(record)
    done, _ = shell(ASKED, XDG_CACHE_HOME=str(home))
    assert (done.returncode, done.stdout) == (0, text), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.full
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_dropped_with_one_line(shell, programs, damage):
    home, text = programs
    folder = home / "folio" / "programs"
    entry = next(folder.glob("jit_extend-*-cache"))
    whole = entry.read_bytes()
    damage(entry)
    done, _ = shell(ASKED, XDG_CACHE_HOME=str(home))
    assert (done.returncode, done.stdout) == (0, text), done.stderr
    lines = done.stderr.splitlines()
    if damage is not DAMAGE["unreadable"] or os.getuid():  # root can read everything
        assert len(lines) == 2 and lines[0].startswith(f"[dropped a damaged entry of {folder}: ")
        assert "jit_extend" in lines[0]
    again, _ = shell(ASKED, XDG_CACHE_HOME=str(home))
    assert len(again.stderr.splitlines()) == 1, again.stderr
    assert entry.is_file() and abs(len(entry.read_bytes()) - len(whole)) < 10_000

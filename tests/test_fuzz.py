"""Damaged checkpoints of all families. Each one either works, or is refused with a message that
names what is wrong.

A case damages one file of a small checkpoint, in a way that its seed draws. The library then opens
the checkpoint, encodes a prompt and reads the weights, in this process. If it reads weights from a
damaged file, they must be those that the `safetensors` package finds in it. If that package refuses
the file, so must the library.
"""

import copy
import functools
import json
import random
import signal
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors
from compare import assert_trees_equal
from engine import FIXTURES, ROOT, model_of
from families import FAMILIES

from common.loading.checkpoint import load_weights
from common.loading.files import MOST_LINES
from common.loading.stored import INDEX, SINGLE
from common.serving.load import open_model, read_weights
from common.sharding import make_mesh
from common.text.chat import encode_chat
from common.text.tokenizer import decode, encode

CASES = 286  # per family
LIMIT_S = 5  # no case takes a second, but the machine may be busy
LONGEST_LINE = 1200
TOKENIZERS = {
    "gpt2": FIXTURES / "tokenizer" / "gpt2",
    "kimi_k2": ROOT / "kimi_k2" / "embedded",
    "deepseek_r1": FIXTURES / "tokenizer" / "llama2",
}
# The variant of each family: the one with the most ways to go wrong, or its first.
RICH = dict(deepseek_r1="v2_lite", gpt2="wide_mlp", gpt_oss="mxfp4", kimi_k2="plain")
RICH |= dict(llama3="bf16_sharded", qwen3="fp8")
WEIGHTS = {family: RICH.get(family, facts.precise[0]) for family, facts in FAMILIES.items()}
TEXT = "Hello, wörld 123\n\t<s>"
TALK = [{"role": "user", "content": "hi"}]
TOKENS = ("tokenizer.json", "vocab.json", "merges.txt", "tiktoken.model")
TEMPLATE = "chat_template.jinja"


# ---- sound checkpoints


@functools.cache
def sound(family):
    """Returns the bytes of each file of a checkpoint that has all files that its family reads."""
    weights = FIXTURES / family / WEIGHTS[family]
    tokenizer = TOKENIZERS.get(family, FIXTURES / "tokenizer" / "llama3")
    files = {f.name: f.read_bytes() for f in weights.iterdir() if f.suffix != ".npz"}
    for name in ("tokenizer_config.json", *TOKENS):
        if (tokenizer / name).exists():
            files[name] = (tokenizer / name).read_bytes()
    files["generation_config.json"] = b'{"eos_token_id": [1, 2], "temperature": 0.6}'
    template = json.loads(files["tokenizer_config.json"]).get("chat_template")
    if template is None or family in ("qwen3", "llama4"):
        files[TEMPLATE] = (template or "{{ bos_token }}{{ messages[0].content }}").encode()
    return files


def is_weights(name):
    return name.endswith(".safetensors") or name == INDEX


# ---- damage to bytes and to JSON

ODD = [
    *(None, True, False, -1, 0, 1, 2, 3.0, 0.5, -0.0, 1e999, float("nan"), 1 << 31, 1 << 63),
    *(10**30, "", "x", "\x00", "\n" * 3, "\ud800", "<s>", "F16", "BF16", "U8", "I64", "F8_E4M3"),
    *([], [[]], [0], [1, 2, 3], {}, {"": {}}, {"content": []}, "9" * 200, "../x", "/etc/passwd"),
]
PIECES = [b"\x00", b"\xff", b'"', b"{", b"]", b",", b" ", b"\n", b"\xed\xa0\x80", b"\\u", b"9" * 20]


def damage_bytes(draw, content):
    """Makes one change to a file, without regard to its format."""
    i, j = sorted(draw.randrange(len(content) + 1) for _ in range(2))
    j = min(j, i + draw.choice((1, 4, 40, 4000)))
    piece = draw.choice(PIECES)
    other = content[draw.randrange(len(content)) :][: j - i]
    flipped = bytes(x ^ 1 << draw.randrange(8) for x in content[i : i + 1])
    return draw.choice(
        [
            content[:i] + flipped + content[i + 1 :],
            content[:i] + piece + content[i:],
            content[:i] + piece + content[j:],
            content[:i] + content[j:],
            content[:i] + content[i:j] * 2 + content[j:],
            content[:i] + other + content[j:],
            content[:i],
            content[i:],
            content + content[i:j],
            b"",
            b"\xef\xbb\xbf" + content,
            content.decode("latin-1").encode(draw.choice(("utf-16", "utf-32"))),
            content.replace(b"\n", b"\r\n"),
        ]
    )


def places(value, found):
    """Returns every (container, key) inside a parsed JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(inside):
        found.append((value, key))
        if isinstance(inner, dict | list):
            places(inner, found)
    return found


def damage_value(draw, value):
    """Makes one change to a parsed JSON value, in place."""
    container, key = draw.choice(places(value, []) or [([value], 0)])
    other, at = draw.choice(places(value, []) or [([value], 0)])
    here = container[key]
    numbers = [here + 1, here - 1, here * 2, -here] if type(here) in (int, float) else []
    match draw.randrange(8):
        case 0:
            del container[key]
        case 1 if isinstance(container, dict):
            container[draw.choice(("", "x", "a.0.b", "a.*", "{0}", key + "x", key.upper()))] = (
                container.pop(key)
            )
        case 2:
            container[key] = copy.deepcopy(other[at])
        case 3:
            container[key], other[at] = other[at], container[key]
        case 4:
            container[key] = [here]
        case 5 | 6 if numbers:
            container[key] = draw.choice(numbers)
        case _:
            container[key] = copy.deepcopy(draw.choice(ODD))


def dumps(draw, value):
    """Returns the value as JSON, in one of several spellings. Now and then a name occurs twice."""
    text = json.dumps(value, ensure_ascii=draw.random() < 0.5, indent=draw.choice((None, 1)))
    if isinstance(value, dict) and value and draw.random() < 0.1:
        name = draw.choice(list(value))
        again = json.dumps({name: draw.choice([value[name], *ODD])})
        text = draw.choice((text[:-1] + "," + again[1:], again[:-1] + "," + text[1:]))
    return text.encode("utf-8", "surrogatepass")


def damage_json(draw, content):
    value = json.loads(content)
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        damage_value(draw, value)
    return dumps(draw, value)


# ---- damage to safetensors


def split(content):
    """Returns the header of a safetensors file, and the rest."""
    start = 8 + int.from_bytes(content[:8], "little")
    return content[8:start], content[start:]


def joined(header, data):
    return len(header).to_bytes(8, "little") + header + data


def damage_tensors(draw, content):
    """Changes what the header says of one or two tensors, mostly to something almost sound."""
    header, data = split(content)
    entries = json.loads(header)
    names = [name for name in entries if name != "__metadata__"]
    a, b = entries[draw.choice(names)], entries[draw.choice(names)]
    (first, last), shape = a["data_offsets"], a["shape"]
    axis = draw.randrange(len(shape))
    match draw.randrange(8):
        case 0:
            a["data_offsets"] = [first, last + draw.choice((-8, -1, 1, 2, 4, 1 << 40))]
        case 1:
            a["data_offsets"], b["data_offsets"] = b["data_offsets"], a["data_offsets"]
        case 2:
            a["shape"] = shape[::-1]
        case 3:
            a["shape"] = draw.choice((shape[:-1], [*shape, 1], [0, *shape]))
        case 4:
            shape[axis] = draw.choice((shape[axis] + 1, 0, shape[axis] << 62))
        case 5:
            a["dtype"] = draw.choice(("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "U8", "I8", "Q"))
        case 6:
            entries[draw.choice(names)], entries["more"] = a, entries.pop(draw.choice(names))
        case 7:
            data = draw.choice((data + b"\x00" * 8, data[:first] + data[last:], data[8:] + data))
    mixed = draw.sample(list(entries.items()), len(entries))
    return joined(dumps(draw, dict(mixed)) + b" " * draw.randrange(9), data)


def damage_numbers(draw, content):
    header, data = split(content)
    i, n = draw.randrange(len(data)), draw.choice((1, 4, 64))
    return joined(header, data[:i] + bytes([draw.choice((0, 0x7F, 0xFF))] * n) + data[i + n :])


# ---- damage to a directory


def damage_index(draw, content):
    """Gives a tensor of the index another file, and sometimes another name."""
    index = json.loads(content)
    files, name = index["weight_map"], draw.choice(list(index["weight_map"]))
    elsewhere = ["../x", "", "config.json", SINGLE, INDEX]
    files[name] = draw.choice([*elsewhere, *files.values(), *ODD])
    if draw.random() < 0.5:
        files["more"] = files.pop(draw.choice(list(files)))
    return dumps(draw, index)


def damage(draw, directory):
    """Damages a file of the directory, and returns its name."""
    names = sorted(f.name for f in directory.iterdir())
    groups = [[n for n in names if n.endswith(".safetensors")], [n for n in names if n == INDEX]]
    groups += [["config.json"], [n for n in names if n in TOKENS], [TEMPLATE]]
    groups += [["tokenizer_config.json", "generation_config.json"]]
    weights = (6, 2, 4, 3, 1, 2)
    kept = [(g, w) for g, w in zip(groups, weights, strict=True) if set(g) & set(names)]
    [group] = draw.choices(*zip(*kept, strict=True))
    path = directory / draw.choice(group)
    ways = [damage_bytes]
    if path.suffix == ".safetensors":
        ways += [damage_numbers, *[damage_tensors] * 4]
    elif path.suffix == ".json":
        ways += [damage_json] * 4
    if path.name == INDEX:
        ways += [damage_index] * 3
    path.write_bytes(draw.choice(ways)(draw, path.read_bytes()))
    return path.name


# ---- what the library does with it


def use(model, directory):
    """Opens a checkpoint, encodes a text, and reads the weights as they are stored."""
    opened = open_model(model, str(directory), mesh=one_device(), dtype="float32")
    tokenizer = opened.tokenizer
    decode(tokenizer, encode(tokenizer, TEXT))
    if tokenizer.chat_template is not None:
        encode_chat(tokenizer, TALK)
    return read_weights(opened._replace(storage=None))


def one_device():
    return make_mesh(devices=jax.devices()[:1])


def tensors_of(directory):
    """Returns what the `safetensors` package finds in the checkpoint's files: a dict of dtype,
    shape and data, by name. If it refuses a file, its own exception is raised."""
    if not (directory / INDEX).exists():
        files = [directory / SINGLE]
        files = files if files[0].exists() else sorted(directory.glob("*.safetensors"))
        return {name: x for file in files for name, x in safetensors.deserialize(file.read_bytes())}
    named = json.loads((directory / INDEX).read_text(encoding="utf-8-sig"))["weight_map"]
    found = {f: dict(safetensors.deserialize((directory / f).read_bytes())) for f in named.values()}
    return {name: found[file][name] for name, file in named.items()}


def weights_of(tensors, model, config):
    """Returns the weights that the library reads from a sound file with these tensors."""
    header, data = {}, b""
    for name, x in tensors.items():
        place = [len(data), len(data) + len(x["data"])]
        header[name] = dict(dtype=x["dtype"], shape=x["shape"], data_offsets=place)
        data += x["data"]
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / SINGLE).write_bytes(joined(json.dumps(header).encode(), data))
        return load_weights(directory, model, config, one_device(), "float32")


def assert_names_it(message, damaged):
    """Asserts that the message has few short lines, and names a file or what the file holds."""
    lines = message.splitlines()
    assert 0 < len(lines) <= MOST_LINES + 1 and max(map(len, lines)) <= LONGEST_LINE, message[:3000]
    names = [damaged, "config.json", "chat template", "tokenizer", "the prompt"]
    names += (
        ["safetensors", "no file has"] if is_weights(damaged) or damaged == "config.json" else []
    )
    assert any(name in message for name in names), (damaged, message)


@pytest.fixture
def in_time():
    """Fails a test that hangs."""

    def stop(*_):
        raise AssertionError(f"not done after {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def checkpoint(family):
    """Yields a sound checkpoint that a test may damage."""
    with tempfile.TemporaryDirectory() as directory:
        for name, content in sound(family).items():
            (Path(directory) / name).write_bytes(content)
        yield Path(directory)


@pytest.mark.parametrize("family", WEIGHTS)
def test_the_checkpoints_are_sound(checkpoint, family):
    used = use(model_of(family), checkpoint)
    assert_trees_equal(used.weights, weights_of(tensors_of(checkpoint), used.module, used.config))


@pytest.mark.one_in(20)
@pytest.mark.parametrize("seed", range(CASES))
@pytest.mark.parametrize("family", WEIGHTS)
def test_a_damaged_checkpoint_works_or_is_refused_by_name(checkpoint, in_time, family, seed):
    damaged = damage(random.Random(f"{family} {seed}"), checkpoint)
    try:
        used = use(model_of(family), checkpoint)
    except (ValueError, OSError) as error:
        assert type(error) is not UnicodeDecodeError, error
        return assert_names_it(str(error), damaged)
    arrays = jax.tree.leaves(used.weights)
    assert all(np.isfinite(np.asarray(x).astype(np.float32)).all() for x in arrays)
    if is_weights(damaged):
        tensors = tensors_of(checkpoint)
        assert_trees_equal(used.weights, weights_of(tensors, used.module, used.config))


ROLES = {
    "config.json": "llama3",
    "generation_config.json": "llama3",
    "tokenizer.json": "llama3",
    "tokenizer_config.json": "llama3",
    "chat_template.jinja": "qwen3",
    "vocab.json": "gpt2",
    "merges.txt": "gpt2",
    "tiktoken.model": "kimi_k2",
    SINGLE: "gpt2",
    INDEX: "llama3",
    "model-00002-of-00005.safetensors": "llama3",
}
INSTEAD = {"a directory": Path.mkdir, "a link to nothing": lambda path: path.symlink_to("gone")}


@pytest.mark.parametrize("instead", INSTEAD)
@pytest.mark.parametrize("name", ROLES)
def test_what_stands_in_place_of_a_file_is_refused_by_name(tmp_path, name, instead):
    for file, content in sound(ROLES[name]).items():
        (tmp_path / file).write_bytes(content)
    (tmp_path / name).unlink()
    INSTEAD[instead](tmp_path / name)
    with pytest.raises((ValueError, OSError)) as caught:
        use(model_of(ROLES[name]), tmp_path)
    assert name in str(caught.value) and "\n" not in str(caught.value)

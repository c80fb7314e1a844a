"""The headers of safetensors files, and the index over them."""

import json
import re

import numpy as np
import pytest
from compare import refused
from safetensors.numpy import save_file

from common.loading.files import MOST_LINES
from common.loading.stored import INDEX, SINGLE, open_tensors

TENSORS = {f"t{i}": np.full((3, i + 1), i, np.float32) for i in range(7)}


@pytest.fixture
def checkpoint(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE, metadata={"format": "pt"})
    return tmp_path


def write_sharded(directory, files=("a.safetensors", "b of many.safetensors", "ZZ.safetensors")):
    """Writes the tensors to several files in turn, and an index. Returns the index."""
    weight_map = {name: files[i % len(files)] for i, name in enumerate(TENSORS)}
    for file in files:
        save_file({n: TENSORS[n] for n, f in weight_map.items() if f == file}, directory / file)
    return write_index(directory, weight_map)


def write_index(directory, weight_map):
    content = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(content))
    return weight_map


def files_of(directory):
    return {name: tensor.file.name for name, tensor in open_tensors(directory).items()}


# ---- which files


def test_an_index_is_followed_whatever_the_files_are_called(tmp_path):
    weight_map = write_sharded(tmp_path)
    save_file(TENSORS, tmp_path / "consolidated.safetensors")
    assert files_of(tmp_path) == weight_map


def test_several_files_without_an_index_are_read_together(tmp_path):
    weight_map = write_sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    assert files_of(tmp_path) == weight_map


def test_an_index_beside_a_file_that_it_does_not_name_is_ambiguous(tmp_path):
    write_sharded(tmp_path)
    save_file(TENSORS, tmp_path / SINGLE)
    refused(ValueError, "holds two checkpoints", open_tensors, tmp_path)


@pytest.mark.parametrize("damage", ["lacks a tensor", "cut short"])
def test_an_index_is_meant_where_the_file_beside_it_is_not_complete(tmp_path, damage):
    weight_map, single = write_sharded(tmp_path), tmp_path / SINGLE
    save_file(dict(list(TENSORS.items())[:-1]), single)
    if damage == "cut short":
        single.write_bytes(single.read_bytes()[:-5])
    assert files_of(tmp_path) == weight_map


def test_the_file_is_meant_where_the_index_beside_it_is_not_complete(tmp_path):
    write_sharded(tmp_path)
    save_file(TENSORS, tmp_path / SINGLE)
    (tmp_path / "ZZ.safetensors").unlink()
    assert set(files_of(tmp_path).values()) == {SINGLE}


# ---- what is refused


def rewrite_header(file, change):
    """Rewrites the file after `change` has changed its parsed header in place."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    text = json.dumps(change(header) or header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[start:])


def move(header, by):
    header["t6"]["data_offsets"] = [n + by for n in header["t6"]["data_offsets"]]


def overlap(header):
    """Moves the third tensor over the second."""
    first, last = header["t2"]["data_offsets"]
    header["t2"]["data_offsets"] = [first - 4, last - 4]


def twice(content):
    """Returns the content with one header entry repeated, and the header's length adjusted."""
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].rstrip()
    entry = json.dumps({"t0": json.loads(header)["t0"]}).encode()[1:-1]
    header = header[:-1] + b"," + entry + b"}"
    return len(header).to_bytes(8, "little") + header + content[8 + size :]


def recode(file, encoding):
    """Rewrites the file with its header in another encoding."""
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = content[8:start].decode().encode(encoding)
    file.write_bytes(len(header).to_bytes(8, "little") + header + content[start:])


DAMAGE = {
    "empty": lambda f: f.write_bytes(b""),
    "only a length": lambda f: f.write_bytes(f.read_bytes()[:8]),
    "half a header": lambda f: f.write_bytes(f.read_bytes()[:100]),
    "not safetensors": lambda f: f.write_text("<!DOCTYPE html><html>Sign in to download</html>"),
    "header not JSON": lambda f: f.write_bytes(f.read_bytes().replace(b"{", b"(", 1)),
    "header not text": lambda f: f.write_bytes(f.read_bytes().replace(b"{", b"\xff", 1)),
    "header a list": lambda f: rewrite_header(f, lambda h: [1]),
    "no shape": lambda f: rewrite_header(f, lambda h: h["t6"].pop("shape") and None),
    "no offsets": lambda f: rewrite_header(f, lambda h: h["t6"].update(data_offsets=[])),
    "offsets of another size": lambda f: rewrite_header(
        f, lambda h: h["t6"].update(data_offsets=[0, 4])
    ),
    "negative offset": lambda f: rewrite_header(f, lambda h: move(h, -10_000)),
    "offset past the end": lambda f: rewrite_header(f, lambda h: move(h, 10_000)),
    "negative shape": lambda f: rewrite_header(f, lambda h: h["t6"].update(shape=[-3, -7])),
    "infinite offset": lambda f: rewrite_header(
        f, lambda h: h["t6"].update(data_offsets=[0, 1e999])
    ),
    "nested to exhaustion": lambda f: f.write_bytes(
        (200_000).to_bytes(8, "little") + b"[" * 200_000
    ),
    "a hole": lambda f: rewrite_header(f, lambda h: h.pop("t3") and None),
    "tensors over each other": lambda f: rewrite_header(f, lambda h: overlap(h)),
    "a name twice": lambda f: f.write_bytes(twice(f.read_bytes())),
    "a shape of floats": lambda f: rewrite_header(f, lambda h: h["t6"].update(shape=[3.0, 7.0])),
    "a shape of strings": lambda f: rewrite_header(f, lambda h: h["t6"].update(shape=["3", "7"])),
    "a shape of truths": lambda f: rewrite_header(f, lambda h: h["t0"].update(shape=[3, True])),
    "a shape without end": lambda f: rewrite_header(f, lambda h: h["t6"].update(shape=[1] * 10**6)),
    "an entry that is a list": lambda f: rewrite_header(f, lambda h: h.update(t6=[1])),
    "UTF-16": lambda f: recode(f, "utf-16-le"),
    "a byte order mark": lambda f: recode(f, "utf-8-sig"),
    "not a number": lambda f: rewrite_header(f, lambda h: h["t6"].update(more=float("nan"))),
    "metadata of numbers": lambda f: rewrite_header(f, lambda h: h.update(__metadata__={"a": 1})),
    "metadata of text": lambda f: rewrite_header(f, lambda h: h.update(__metadata__="pt")),
    "half a character": lambda f: rewrite_header(f, lambda h: h["t6"].update(more="\ud800")),
    "a dtype of half a byte": lambda f: rewrite_header(f, lambda h: h["t6"].update(dtype="I4")),
    "a name with a star": lambda f: rewrite_header(f, lambda h: h.update({"t.*": h.pop("t6")})),
    "a name of two lines": lambda f: rewrite_header(f, lambda h: h.update({"a\nb": h.pop("t6")})),
    "a name without end": lambda f: rewrite_header(f, lambda h: h.update({"a" * 999: h.pop("t6")})),
    "a terabyte of header": lambda f: f.write_bytes((1 << 40).to_bytes(8, "little") + b"{}"),
    "cut short": lambda f: f.write_bytes(f.read_bytes()[:-1]),
    "too long": lambda f: f.write_bytes(f.read_bytes() + b"x"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_refused_by_name(checkpoint, damage):
    damage(checkpoint / SINGLE)
    message = refused(ValueError, str(checkpoint / SINGLE), open_tensors, checkpoint)
    assert re.search("is cut short|damaged header|incomplete download", message)
    assert len(message) < 1000


def test_a_missing_file_of_the_index_is_named_with_a_tensor_it_holds(tmp_path):
    weight_map, gone = write_sharded(tmp_path), tmp_path / "ZZ.safetensors"
    gone.unlink()
    message = refused(
        FileNotFoundError, f"{gone} is missing; {INDEX} says it holds ", open_tensors, tmp_path
    )
    assert weight_map[message.rsplit(" ", 1)[1]] == "ZZ.safetensors"


def test_a_tensor_that_its_file_does_not_hold_is_named_with_the_file(tmp_path):
    weight_map = write_sharded(tmp_path)
    write_index(tmp_path, weight_map | {"more.weight": "ZZ.safetensors"})
    what = f"{tmp_path / 'ZZ.safetensors'} lacks more.weight, which {INDEX} says it holds"
    refused(ValueError, what, open_tensors, tmp_path)


@pytest.mark.parametrize(
    "index", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[]", "{", "\xff"]
)
def test_a_damaged_index_is_named(checkpoint, index):
    (checkpoint / INDEX).write_text(index, encoding="latin-1")
    refused(ValueError, str(checkpoint / INDEX), open_tensors, checkpoint)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "sub/a.safetensors", ""])
def test_an_index_names_no_file_outside_its_directory(tmp_path, file):
    write_index(tmp_path, {"t0": file})
    refused(ValueError, f"names {file!r}, which is not a file beside it", open_tensors, tmp_path)


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "x" * 300])
def test_an_index_has_no_name_that_a_message_cannot_show(tmp_path, name):
    write_index(tmp_path, {name: "a.safetensors"})
    refused(ValueError, f"{INDEX} names {name[:60]!r}, which is no tensor", open_tensors, tmp_path)
    write_index(tmp_path, {"t0": name})
    refused(ValueError, "which is not a file beside it", open_tensors, tmp_path)


def test_of_many_missing_files_the_first_are_named(tmp_path):
    write_index(tmp_path, {f"t{i}": f"{i}.safetensors" for i in range(1000)})
    with pytest.raises(FileNotFoundError) as caught:
        open_tensors(tmp_path)
    lines = str(caught.value).splitlines()
    assert len(lines) == MOST_LINES + 1 and lines[-1] == "and 980 more such lines"


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path):
    for name in "ab":
        save_file({"x": np.zeros(3, np.float32)}, tmp_path / f"{name}.safetensors")
    message = refused(ValueError, "x is stored in a.safetensors as well", open_tensors, tmp_path)
    assert str(tmp_path / "b.safetensors") in message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickles_are_never_opened(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    refused(
        FileNotFoundError,
        f"only {name}: pickles can run code and are never opened",
        open_tensors,
        tmp_path,
    )


def test_a_directory_without_weights_is_an_error(tmp_path):
    refused(FileNotFoundError, f"{tmp_path} has no *.safetensors", open_tensors, tmp_path)

"""The headers of safetensors files, and the index over them."""

import json

import numpy as np
import pytest
from compare import refused
from safetensors.numpy import save_file

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


def test_a_tensor_that_the_index_leaves_out_counts_and_none_may_be_in_two_files(tmp_path):
    weight_map = write_sharded(tmp_path)
    write_index(tmp_path, dict([*weight_map.items()][1:]))
    assert files_of(tmp_path) == weight_map
    name, file = next(iter(weight_map.items()))
    other = next(x for x in weight_map.values() if x != file)
    both = {n: TENSORS[n] for n, f in weight_map.items() if f == other or n == name}
    save_file(both, tmp_path / other)
    write_index(tmp_path, weight_map)
    refused(ValueError, f"{name} is stored in {min(file, other)} as well", open_tensors, tmp_path)


def test_several_files_without_an_index_are_read_together(tmp_path):
    weight_map = write_sharded(tmp_path)
    (tmp_path / INDEX).unlink()
    assert files_of(tmp_path) == weight_map


def test_an_index_beside_a_file_that_it_does_not_name_is_ambiguous(checkpoint):
    write_sharded(checkpoint)
    refused(ValueError, "holds two checkpoints", open_tensors, checkpoint)
    weight_map = write_index(checkpoint, dict.fromkeys(TENSORS, SINGLE))
    assert files_of(checkpoint) == weight_map


# ---- what is refused


DAMAGE = {
    "empty": lambda content: b"",
    "half a header": lambda content: content[:100],
    "a page to sign in": lambda content: b"<!DOCTYPE html><html>Sign in to download</html>",
    "another shape": lambda content: content.replace(b"[3,7]", b"[3,9]"),
    "an unknown dtype": lambda content: content.replace(b'"F32"', b'"Q32"', 1),
    "cut short": lambda content: content[:-1],
    "too long": lambda content: content + b"x",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_refused_by_name(checkpoint, damage):
    file = checkpoint / SINGLE
    content = file.read_bytes()
    file.write_bytes(damage(content))
    assert file.read_bytes() != content
    message = refused(ValueError, f"{file} is damaged or cut short", open_tensors, checkpoint)
    assert message.endswith("; download it again")


def test_a_note_of_git_lfs_is_called_one(checkpoint):
    file = checkpoint / SINGLE
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    refused(ValueError, f"{file} is not here, only Git LFS's note", open_tensors, checkpoint)


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
    what = f"{tmp_path / 'ZZ.safetensors'} lacks more.weight, which {INDEX} says it holds; download"
    refused(ValueError, what, open_tensors, tmp_path)
    write_index(tmp_path, weight_map | {f"more.{i}": "ZZ.safetensors" for i in range(1000)})
    refused(ValueError, " lacks more.0, which", open_tensors, tmp_path)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "{"])
def test_a_damaged_index_is_named(checkpoint, index):
    (checkpoint / INDEX).write_text(index)
    refused(ValueError, str(checkpoint / INDEX), open_tensors, checkpoint)


def test_of_many_missing_files_the_first_is_named(tmp_path):
    write_index(tmp_path, {f"t{i}": f"{i}.safetensors" for i in range(1000)})
    what = (
        f"{tmp_path / '0.safetensors'} is missing, like 999 other files; {INDEX} says it holds t0"
    )
    refused(FileNotFoundError, what, open_tensors, tmp_path)


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path):
    for name in "ab":
        save_file({"x": np.zeros(3, np.float32)}, tmp_path / f"{name}.safetensors")
    message = refused(ValueError, "x is stored in a.safetensors as well", open_tensors, tmp_path)
    assert str(tmp_path / "b.safetensors") in message


def test_pickles_are_never_opened_and_a_directory_without_weights_is_an_error(tmp_path):
    what = f"{tmp_path} has no model*.safetensors"
    refused(FileNotFoundError, f"{what}; download these", open_tensors, tmp_path)
    save_file(TENSORS, tmp_path / "consolidated.safetensors")  # for the authors' own code
    refused(FileNotFoundError, f"{what}; download these", open_tensors, tmp_path)
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth"):
        (tmp_path / name).write_bytes(b"")
        only = f", only {name} (pickles can run code and are never opened); download these"
        refused(FileNotFoundError, what + only, open_tensors, tmp_path)
        (tmp_path / name).unlink()

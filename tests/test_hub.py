"""Where a checkpoint lies: in a directory, or in a repository on the hub."""

from pathlib import Path
from types import ModuleType

import huggingface_hub
import pytest
from compare import refused
from huggingface_hub import errors as hub
from huggingface_hub.utils import filter_repo_objects

from common.loading.hub import locate
from common.loading.shape import read_shape


@pytest.fixture
def downloads(monkeypatch):
    """Records the calls of the hub, which returns the path /snapshot."""
    calls = []

    def snapshot_download(repo, **options):
        calls.append((repo, options))
        return "/snapshot"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_directory_is_itself_and_asks_no_hub(tmp_path, monkeypatch, downloads):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert locate(str(tmp_path)) == tmp_path
    assert locate("org/name") == Path("org/name")
    assert locate("~/org") == tmp_path / "org"
    assert downloads == []


def test_one_call_downloads_what_is_read_and_nothing_else(downloads):
    assert locate("org/some.model-1", "v1") == Path("/snapshot")
    ((repo, options),) = downloads
    assert repo == "org/some.model-1" and options.pop("revision") == "v1"
    wanted = """
        config.json generation_config.json tokenizer.json tokenizer_config.json vocab.json
        special_tokens_map.json chat_template.jinja merges.txt tiktoken.model hf_quant_config.json
        model.safetensors model-00001-of-00002.safetensors model.safetensors.index.json
    """.split()
    others = """
        original/consolidated.00.pth original/params.json original/model.safetensors
        consolidated.safetensors consolidated.safetensors.index.json onnx/model.onnx model.onnx
        pytorch_model.bin pytorch_model.bin.index.json model-Q4.gguf rust_model.ot README.md
        metal/model.bin fp8/model.safetensors modeling_custom.py consolidated.00.pth
    """.split()
    assert list(filter_repo_objects(wanted + others, **options)) == wanted


HUB_ERRORS = {
    "gated": (
        hub.GatedRepoError,
        PermissionError,
        "accept the licence at https://huggingface.co/a/b and set HF_TOKEN",
    ),
    "missing": (hub.RepositoryNotFoundError, FileNotFoundError, "nor a repository on the hub"),
    "not a name": (hub.HFValidationError, FileNotFoundError, "nor a repository on the hub"),
    "revision": (
        hub.RevisionNotFoundError,
        FileNotFoundError,
        "a/b has no revision 'v9' on the hub",
    ),
    "unreachable": (hub.LocalEntryNotFoundError, ConnectionError, "the hub cannot be reached"),
    "anything else": (OSError, OSError, "a/b: the download failed: OSError"),
}


@pytest.mark.parametrize(("raised", "error", "match"), HUB_ERRORS.values(), ids=HUB_ERRORS)
def test_the_hub_refusing_is_one_line_that_says_what_to_do(monkeypatch, raised, error, match):
    def snapshot_download(repo, **options):
        raise raised.__new__(raised)  # their constructors need a response from the hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    refused(error, match, locate, "a/b", "v9")


def test_an_offline_hub_without_the_files_in_its_cache_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    refused(
        ConnectionError,
        "org/name is neither a directory here nor complete in the hub's cache",
        locate,
        "org/name",
    )


@pytest.mark.parametrize(
    "ckpt", ["", "name", "./no/such", "/no/such", "a/b/c", "~/nothing", "a b/c", "org/", "a/b\n"]
)
def test_a_path_that_is_not_there_and_no_hub_id_asks_no_hub(ckpt, downloads):
    refused(FileNotFoundError, f"{ckpt!r} is neither a directory nor a hub id", locate, ckpt)
    assert downloads == []


def test_a_file_or_a_local_revision_is_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    file = str(tmp_path / "model.safetensors")
    refused(NotADirectoryError, "is a file; give the directory that it lies in", locate, file)
    refused(ValueError, "has no revision 'main'", locate, str(tmp_path), "main")


def test_a_family_that_ships_no_model_asks_for_a_checkpoint(tmp_path):
    family = ModuleType("mine.model")
    family.__file__, family.__package__ = str(tmp_path / "model.py"), "mine"
    with pytest.raises(ValueError, match=r"^mine ships no model: give a checkpoint \(--ckpt\)$"):
        read_shape(family, None)


OTHER_LAYOUTS = {
    "original/consolidated.00.pth": "original is for its authors' own code",
    "consolidated.00.pth": "consolidated.00.pth is for its authors' own code",
    "dtypes.json": "dtypes.json is for its authors' own code",
    "hf_quant_config.json": "NVIDIA's ModelOpt quantised these weights",
    "config.json": "MLX quantised these weights",
}


@pytest.mark.parametrize("file", OTHER_LAYOUTS)
def test_files_that_are_not_made_for_transformers_are_named_in_one_line(tmp_path, file):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text('{"quantization": {"group_size": 64, "bits": 4}}')
    what = f"{tmp_path}: {OTHER_LAYOUTS[file]}"
    told = refused(ValueError, what, read_shape, None, str(tmp_path))
    assert told.endswith(", which is not read; give the model's plain files for transformers")


def test_other_layouts_next_to_files_for_transformers_change_nothing(tmp_path):
    (tmp_path / "original").mkdir()
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert read_shape(None, str(tmp_path)) == ({"model_type": "llama"}, tmp_path)

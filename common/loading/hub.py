"""Finds the directory of a checkpoint, which may first be downloaded from the hub."""

import os
import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from common.loading.files import first_line

ADAPTER = "adapter_config.json"  # of an adapter, which may lie beside a model
FILES = f"""config.json generation_config.json *.safetensors model.safetensors.index.json
tokenizer.json tokenizer_config.json special_tokens_map.json chat_template.jinja
added_tokens.json chat_template.json hf_quant_config.json {ADAPTER}
vocab.json merges.txt tiktoken.model""".split()
OTHER_LAYOUTS = ["*/*", "consolidated*"]  # the same weights, named as in the authors' own code


def locate(ckpt: str, revision: str | None = None, files: Sequence[str] = FILES) -> Path:
    """The directory `ckpt`, or that of its downloaded files. OSError or ValueError of one line."""
    path = Path(os.path.expanduser(ckpt))
    if path.suffix == ".gguf":
        raise ValueError(f"{ckpt}: GGUF files are not read; give a directory of safetensors files")
    if ckpt and path.is_dir():
        if revision is not None:
            raise ValueError(f"{ckpt} is a local directory and has no revision {revision!r}")
        return path
    if path.is_file():
        raise NotADirectoryError(f"{ckpt} is a file; give the directory that it lies in")
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", ckpt, re.ASCII):
        raise FileNotFoundError(f"{ckpt!r} is neither a directory nor a hub id like org/name")
    return download(ckpt, revision, files)


def is_of_checkpoint(file: Path) -> bool:
    """Whether a file of a directory is one that would be downloaded."""
    known, other = (any(fnmatch(file.name, p) for p in group) for group in (FILES, OTHER_LAYOUTS))
    return file.is_file() and known and not other


def download(repo: str, revision: str | None, files: Sequence[str]) -> Path:
    # Imported here because it takes a third of a second, and a local checkpoint does not need it.
    from huggingface_hub import errors, snapshot_download

    wanted: dict[str, Any] = {"allow_patterns": [*files], "ignore_patterns": OTHER_LAYOUTS}
    try:
        return Path(snapshot_download(repo, revision=revision, **wanted))
    except errors.GatedRepoError:
        what = f"accept the licence at https://huggingface.co/{repo} and set HF_TOKEN to your token"
        raise PermissionError(f"{repo} is gated: {what}") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        what = "neither a directory here nor a repository on the hub (a private one needs HF_TOKEN)"
        raise FileNotFoundError(f"{repo} is {what}") from None
    except errors.RevisionNotFoundError:
        raise FileNotFoundError(f"{repo} has no revision {revision!r} on the hub") from None
    except errors.LocalEntryNotFoundError:
        what = "complete in the hub's cache, and the hub cannot be reached; is HF_HUB_OFFLINE set?"
        raise ConnectionError(f"{repo} is neither a directory here nor {what}") from None
    except Exception as error:  # its type depends on the version of huggingface_hub
        raise OSError(f"{repo}: the download failed: {first_line(error)}") from error

"""The options of every model's command line."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from common.kernels.dispatch import Impl
from common.quant import storage_named
from common.serving.session import DRAFT_TOKENS

EXAMPLES = """
examples:
  python -m {name}.main                             the small model in this repository
  python -m {name}.main --ckpt DIR_OR_HUB_ID --prompt "Hello"
  python -m {name}.main --ckpt DIR_OR_HUB_ID --chat --system "Answer in verse."
  python -m {name}.main --ckpt DIR_OR_HUB_ID --prompts questions.txt --json > answers.jsonl
  python -m {name}.main --ckpt DIR_OR_HUB_ID --serve
  python -m {name}.main --ckpt DIR_OR_HUB_ID --quant int8 --kv-quant int8 --mesh expert=4,tensor=2
  python -m {name}.main --ckpt DIR_OR_HUB_ID --quant int8 --dry-run v5e:4x4 v5e:8x8
"""


class Parser(argparse.ArgumentParser):
    """Raises mistakes as ValueError, so that they are reported like all others."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see --help)")


def quant(text: str) -> str:
    try:
        storage_named(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def parser(name: str) -> argparse.ArgumentParser:
    ap = Parser(
        prog=f"python -m {name}.main",
        description=f"Generate text with a checkpoint of {name} on CPU, GPU or TPU.",
        epilog=EXAMPLES.format(name=name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = ap.add_argument_group("model")
    model.add_argument(
        "--ckpt",
        help="directory, or Hugging Face hub id such as org/name, of a published checkpoint "
        "(default: the small model in this repository)",
    )
    model.add_argument("--revision", help="branch, tag or commit of the hub repository")
    model.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="number format of activations and of unquantised weights (default: the checkpoint's)",
    )
    model.add_argument(
        "--quant",
        type=quant,
        metavar="{int8,int4,int4:GROUP}",
        help="store the weight matrices in 8 bits, one scale per output channel; or in 4 bits, "
        "with one scale per GROUP neighbours in a row, by default 64 (default: as published)",
    )
    model.add_argument(
        "--kv-quant",
        choices=["int8"],
        help="store the key/value cache as int8, with one scale per token and head (default: not "
        "quantised)",
    )
    model.add_argument(
        "--allow-nonfinite",
        action="store_true",
        help="load the checkpoint even if some weights are NaN or infinite (default: refuse it)",
    )
    model.add_argument(
        "--random",
        action="store_true",
        help="make random weights instead of reading them; --ckpt may then also be a config.json "
        "file, or the name of a published size",
    )
    model.add_argument(
        "--mesh",
        nargs="+",
        default=[],
        metavar="AXES",
        help="number of devices on each axis, such as data=2,expert=4,tensor=2: data splits the "
        "slots, expert and tensor split the model (default: the mesh with the shortest estimated "
        "decode step); --dry-run takes several meshes",
    )
    text = ap.add_argument_group("prompts (default: all of standard input, as one prompt)")
    text.add_argument(
        "--prompt", action="append", metavar="P", help="a prompt; may be given several times"
    )
    text.add_argument(
        "--prompts", type=Path, metavar="FILE", help="read prompts from FILE, one per line"
    )
    text.add_argument(
        "--chat",
        action="store_true",
        help="hold a conversation: each line of standard input is a turn, and the model's cache is "
        "kept between turns",
    )
    text.add_argument("--system", metavar="S", help="system message for the chat template")
    text.add_argument(
        "--raw",
        action="store_true",
        help="give the model the prompt as it is, without the checkpoint's chat template",
    )
    text.add_argument(
        "--show-analysis",
        action="store_true",
        help="also show the analysis that a model with channels (GPT-OSS) writes before its answer",
    )
    text.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="S",
        help="end the reply before this text; may be given several times",
    )
    sampling = ap.add_argument_group("sampling (default: greedy)")
    sampling.add_argument(
        "--max-new-tokens",
        type=int,
        default=256,
        metavar="N",
        help="the longest reply, in tokens (default: 256)",
    )
    sampling.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="how random the choice of tokens is; 0 always takes the likeliest (default: 0)",
    )
    sampling.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample only from the K likeliest tokens; 0 keeps all (default: 0)",
    )
    sampling.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample only from the likeliest tokens that together have probability P; 1 keeps all "
        "(default: 1)",
    )
    sampling.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="drop tokens with less than P times the probability of the likeliest; 0 drops none "
        "(default: 0)",
    )
    sampling.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="seed of the random numbers; prompt i, counted from 0, uses (S + i) mod 2**32 "
        "(default: 0)",
    )
    http = ap.add_argument_group("serving (needs pip install 'folio-jax[serve]')")
    http.add_argument(
        "--serve",
        nargs="?",
        const="127.0.0.1:8000",
        metavar="HOST:PORT",
        help="serve the OpenAI protocol, and a page to talk to (default: 127.0.0.1:8000)",
    )
    http.add_argument(
        "--api-key",
        metavar="KEY",
        help="refuse requests without this key (default: FOLIO_API_KEY, if that is set)",
    )
    http.add_argument(
        "--queue",
        type=int,
        default=256,
        metavar="N",
        help="how many requests may wait for a slot; others are refused (default: 256)",
    )
    http.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that replies may still take after SIGTERM or Ctrl-C (default: 30)",
    )
    http.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages of this origin call the server; may be given several times",
    )
    dry = ap.add_argument_group("dry run (needs no weights and no accelerator)")
    dry.add_argument(
        "--dry-run",
        nargs="+",
        metavar="TOPOLOGY",
        help="compile for other devices without running: print whether the model fits, and what a "
        "step moves and sends. A TOPOLOGY is v5e:4x4, v6e:8x8, v5p:2x2x4, tpu7x:2x2x1, h100:8, "
        "cpu:8, ...; --ckpt may be the name of a published size",
    )
    dry.add_argument(
        "--prompt-tokens",
        type=int,
        default=512,
        metavar="T",
        help="prompt tokens that are read at once (default: 512)",
    )
    dry.add_argument(
        "--layers", type=int, metavar="N", help="compile only N layers (default: all of them)"
    )
    dry.add_argument(
        "--implementation", choices=[*Impl], help="implementation of the kernels (default: auto)"
    )
    dry.add_argument(
        "--hlo", type=Path, metavar="DIR", help="write the compiled programs, as text, into DIR"
    )
    run = ap.add_argument_group("running")
    run.add_argument(
        "--max-len",
        type=int,
        metavar="N",
        help="cache positions per slot, for a prompt and its reply together (default: what the "
        "prompts need; at most 2048 in a dry run)",
    )
    run.add_argument(
        "--slots",
        type=int,
        metavar="N",
        help="how many prompts are decoded together (default: all of them, up to 8)",
    )
    run.add_argument(
        "--keep",
        type=int,
        default=0,
        metavar="N",
        help="the memory of N further slots keeps texts that have ended, for prompts that begin "
        "alike (default: 0)",
    )
    run.add_argument(
        "--keep-host",
        type=float,
        default=0.0,
        metavar="GB",
        help="host memory for texts that have no room there (default: 0)",
    )
    run.add_argument(
        "--draft",
        metavar="SOURCE",
        help="verify several drafted tokens in each step; SOURCE is lookup (what followed when the "
        "newest tokens last stood in the same text), auto (lookup, while that is faster), mtp (the "
        "layer in DeepSeek's files that drafts), or a smaller model's directory or hub id, which "
        "FAMILY: precedes if it is of another family",
    )
    run.add_argument(
        "--draft-tokens",
        type=int,
        metavar="K",
        help=f"how many tokens are drafted at once (default: {DRAFT_TOKENS}; mtp: 1)",
    )
    run.add_argument(
        "--json",
        action="store_true",
        help="print JSON instead of text: one record per prompt, or the figures of a dry run",
    )
    run.add_argument(
        "--profile",
        metavar="DIR",
        help="write a profiler trace into DIR; open it at ui.perfetto.dev",
    )
    run.add_argument(
        "--no-compile-cache",
        action="store_true",
        help="neither use nor fill the cache of compiled programs that is kept between runs",
    )
    add_host_options(ap)
    return ap


def add_host_options(ap: argparse.ArgumentParser) -> None:
    """Adds the options that say which of several processes this is."""
    hosts = ap.add_argument_group("several processes (see docs/multi_host.md)")
    hosts.add_argument(
        "--distributed",
        action=argparse.BooleanOptionalAction,
        help="this command runs in several processes, such as one per host (default: if the "
        "cluster's environment says so)",
    )
    hosts.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="the address of process 0 (default: what the environment says)",
    )
    hosts.add_argument("--process", metavar="I/N", help="this is process I of N, counted from 0")
    hosts.add_argument(
        "--join-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="how many seconds to wait for all processes to connect (default: 60)",
    )


def read_host_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads only these options of a command line, which may have mistakes elsewhere."""
    ap = Parser(add_help=False, allow_abbrev=False)
    add_host_options(ap)
    return ap.parse_known_args(argv)[0]

"""The options of every model's command line."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from common.kernels.dispatch import Impl

EXAMPLES = """
examples:
  python -m {name}.main                             the small model that the repository ships
  python -m {name}.main --ckpt DIR_OR_HUB_ID --prompt "Hello"
  python -m {name}.main --ckpt DIR_OR_HUB_ID --chat --system "Answer in verse."
  python -m {name}.main --ckpt DIR_OR_HUB_ID --prompts questions.txt --json > answers.jsonl
  python -m {name}.main --ckpt DIR_OR_HUB_ID --quant int8 --kv-quant int8 --mesh expert=4,tensor=2
  python -m {name}.main --ckpt DIR_OR_HUB_ID --quant int8 --dry-run v5e:4x4 v5e:8x8
"""


class Parser(argparse.ArgumentParser):
    """One whose mistakes are told as all others are."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (see --help)")


def parser(name: str) -> argparse.ArgumentParser:
    ap = Parser(
        prog=f"python -m {name}.main",
        description=f"Generate text with a checkpoint of {name} on CPU, GPU or TPU.",
        epilog=EXAMPLES.format(name=name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = ap.add_argument_group("model")
    model.add_argument(
        "--ckpt", help="directory or hub id of a published checkpoint (default: the embedded model)"
    )
    model.add_argument("--revision", help="branch, tag or commit of a hub repository")
    model.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="default: the checkpoint's own"
    )
    model.add_argument(
        "--quant", choices=["int8"], help="weights as int8 with a scale per output channel"
    )
    model.add_argument(
        "--kv-quant", choices=["int8"], help="cache as int8 with a scale per token and head"
    )
    model.add_argument(
        "--allow-nonfinite",
        action="store_true",
        help="load weights although some are NaN or infinite",
    )
    model.add_argument(
        "--random",
        action="store_true",
        help="random weights; --ckpt may then be a lone config.json or a named shape",
    )
    model.add_argument(
        "--mesh",
        nargs="+",
        default=[],
        metavar="AXES",
        help="e.g. expert=4,tensor=2 (default: that of the shortest estimated step); several with "
        "--dry-run",
    )
    text = ap.add_argument_group("prompts (default: standard input, whole)")
    text.add_argument("--prompt", action="append", metavar="P", help="may be given several times")
    text.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line")
    text.add_argument(
        "--chat", action="store_true", help="a conversation; the cache is kept between turns"
    )
    text.add_argument("--system", metavar="S", help="system message")
    text.add_argument(
        "--raw",
        action="store_true",
        help="the prompt as it is, without the checkpoint's chat template",
    )
    text.add_argument(
        "--show-analysis",
        action="store_true",
        help="also what a model that answers in channels (GPT-OSS) thinks before it answers",
    )
    sampling = ap.add_argument_group("sampling (default: greedy)")
    sampling.add_argument("--max-new-tokens", type=int, default=256, metavar="N")
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T")
    sampling.add_argument("--top-k", type=int, default=0, metavar="K")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P")
    sampling.add_argument("--min-p", type=float, default=0.0, metavar="P")
    sampling.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="prompt i (from 0) uses seed S + i mod 2**32",
    )
    dry = ap.add_argument_group("dry run (needs no weights and no accelerator)")
    dry.add_argument(
        "--dry-run",
        nargs="+",
        metavar="TOPOLOGY",
        help="compile for v5e:4x4, v6e:8x8, v5p:2x2x4, tpu7x:2x2x1, h100:8, cpu:8, ...: does it "
        "fit, what does a step move and send; --ckpt may be the name of a published size",
    )
    dry.add_argument(
        "--prompt-tokens", type=int, default=512, metavar="T", help="read at once (default: 512)"
    )
    dry.add_argument("--layers", type=int, metavar="N", help="instead of the model's own number")
    dry.add_argument("--implementation", choices=[*Impl], help="of the kernels (default: auto)")
    dry.add_argument("--hlo", type=Path, metavar="DIR", help="write the compiled programs")
    run = ap.add_argument_group("running")
    run.add_argument(
        "--max-len",
        type=int,
        metavar="N",
        help="cache positions a slot (default: what the prompts need)",
    )
    run.add_argument(
        "--slots", type=int, metavar="N", help="prompts decoded together (default: up to 8)"
    )
    run.add_argument(
        "--draft",
        action="store_true",
        help="decode up to two tokens a step with the layer that the files hold for it (DeepSeek)",
    )
    run.add_argument(
        "--json", action="store_true", help="one JSON record per prompt instead of text"
    )
    run.add_argument(
        "--profile", metavar="DIR", help="write a profiler trace; open it at ui.perfetto.dev"
    )
    run.add_argument(
        "--no-compile-cache", action="store_true", help="do not keep compiled programs between runs"
    )
    add_host_options(ap)
    return ap


def add_host_options(ap: argparse.ArgumentParser) -> None:
    """Which of several processes this is."""
    hosts = ap.add_argument_group("several processes (see docs/multi_host.md)")
    hosts.add_argument(
        "--distributed",
        action=argparse.BooleanOptionalAction,
        help="the same command runs on every host (default: if the cluster's environment says so)",
    )
    hosts.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of process 0, where the environment names none"
    )
    hosts.add_argument("--process", metavar="I/N", help="this is process I, from 0, of N")
    hosts.add_argument(
        "--join-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds in which all processes must have come (default: 60)",
    )


def read_host_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """These options alone, of a command line that may have mistakes elsewhere."""
    ap = Parser(add_help=False, allow_abbrev=False)
    add_host_options(ap)
    return ap.parse_known_args(argv)[0]

"""Which implementation of a kernel runs."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from jax import lax

# Which implementation of the kernels: "reference", "blocked", "tpu" or "gpu"; None for that of the
# platform.
Impl = str | None
# Those in which shard_map can check what is replicated: no Pallas call passes its check.
KERNEL_FREE = ("reference", "blocked")


class Kernel(NamedTuple):
    """An implementation that is made for one platform."""

    platform: str  # of the lowering: "tpu" or "cuda"
    call: Callable[..., Any]  # takes interpret=True to run anywhere
    refusal: str | None  # why it does not take these arrays, in a sentence


def choose(
    implementation: Impl,
    plain: Mapping[str, Callable[..., Any]],
    kernels: Callable[[], Mapping[str, Kernel]],
) -> Callable[..., Any]:
    """The implementation of that name, to be called with the arrays; for None, the platform's
    kernel if it takes them, else "blocked", which is settled when the program is lowered.

    `kernels` is only called for what is not plain, so that it may import what takes long. A kernel
    that is named is interpreted on other platforms. ValueError for one that refuses, and for an
    unknown name.
    """
    if implementation is not None and implementation in plain:
        return plain[implementation]
    known = kernels()
    if implementation is None:
        taken = {k.platform: k.call for k in known.values() if k.refusal is None}
        return partial(lax.platform_dependent, **taken, default=plain["blocked"])
    if implementation not in known:
        names = ", ".join(map(repr, (*plain, *known)))
        raise ValueError(f"unknown implementation {implementation!r}: use {names} or None")
    kernel = known[implementation]
    if kernel.refusal is not None:
        raise ValueError(kernel.refusal)
    native, interpreted = {kernel.platform: kernel.call}, partial(kernel.call, interpret=True)
    return partial(lax.platform_dependent, **native, default=interpreted)

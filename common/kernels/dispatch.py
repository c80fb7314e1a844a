"""Which implementation of a kernel runs."""

import enum
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax


@jax.tree_util.register_static
class Impl(enum.StrEnum):
    """The implementations of a kernel. Every function that takes one also takes its name.

    An Impl holds no arrays. As a field of a pytree it is part of the structure, so `jit` compiles a
    program for each.
    """

    AUTO = "auto"  # the platform's kernel if it takes the arrays, else BLOCKED
    REFERENCE = "reference"  # the definition: short, in float32, differentiable, slow
    BLOCKED = "blocked"  # plain jnp that runs anywhere
    TPU = "tpu"
    GPU = "gpu"

    @classmethod
    def _missing_(cls, value: object) -> None:
        raise ValueError(f"unknown implementation {value!r}: use one of {', '.join(cls)}")


AUTO = Impl.AUTO
# shard_map can check what is replicated in these. No Pallas call passes its check.
KERNEL_FREE = (Impl.REFERENCE, Impl.BLOCKED)


class Kernel(NamedTuple):
    """An implementation that is made for one platform."""

    platform: str  # that programs are lowered for: "tpu" or "cuda"
    call: Callable[..., Any]  # takes interpret=True to run anywhere
    refusal: str | None  # a sentence that says why it does not take these arrays


def choose(
    implementation: str,
    plain: Mapping[str, Callable[..., Any]],
    kernels: Callable[[], Mapping[str, Kernel]],
) -> Callable[..., Any]:
    """The implementation of that name, to be called with the arrays.

    For AUTO that is the platform's kernel if it takes the arrays, else BLOCKED; which platform is
    settled when the program is lowered. A kernel that is named is interpreted on other platforms.
    `kernels` is called only if it is needed, because it may import modules that take long to
    import. ValueError for a kernel that refuses, and for an unknown name.
    """
    if implementation in plain:
        return plain[implementation]
    known = kernels()
    if implementation == AUTO:
        taken = {k.platform: k.call for k in known.values() if k.refusal is None}
        return partial(lax.platform_dependent, **taken, default=plain[Impl.BLOCKED])
    kernel = known[Impl(implementation)]
    if kernel.refusal is not None:
        raise ValueError(kernel.refusal)
    native, interpreted = {kernel.platform: kernel.call}, partial(kernel.call, interpret=True)
    return partial(lax.platform_dependent, **native, default=interpreted)

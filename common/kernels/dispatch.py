"""Which form of a kernel runs."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from jax import lax


class Kernel(NamedTuple):
    """A form that is made for one platform."""

    platform: str  # of the lowering: "tpu" or "cuda"
    run: Callable[..., Any]  # takes interpret=True to run anywhere
    refusal: str | None  # why it does not take these arrays, in a sentence


def dispatch(
    implementation: str | None,
    args: tuple[Any, ...],
    plain: Mapping[str, Callable[..., Any]],
    kernels: Mapping[str, Kernel],
) -> Any:
    """The form of that name, on these arguments; or None to choose when the program is lowered: the
    kernel of the platform if it takes them, else "blocked".

    A kernel that is named runs interpreted on other platforms. ValueError for one that refuses, and
    for an unknown name.
    """
    if implementation is None:
        taken = {k.platform: k.run for k in kernels.values() if k.refusal is None}
        return lax.platform_dependent(*args, **taken, default=plain["blocked"])
    if implementation in plain:
        return plain[implementation](*args)
    if implementation not in kernels:
        names = ", ".join(map(repr, (*plain, *kernels)))
        raise ValueError(f"unknown implementation {implementation!r}: use {names} or None")
    kernel = kernels[implementation]
    if kernel.refusal is not None:
        raise ValueError(kernel.refusal)
    native, interpreted = {kernel.platform: kernel.run}, partial(kernel.run, interpret=True)
    return lax.platform_dependent(*args, **native, default=interpreted)

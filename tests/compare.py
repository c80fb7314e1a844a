"""How all tests compare floating-point numbers, and how they check error messages."""

from typing import Any

import jax
import numpy as np
import pytest


def assert_close(
    got: Any,
    want: Any,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    rms: float | None = None,
    what: str = "",
) -> tuple[float, float]:
    """Asserts equal shapes, finite numbers, and errors within the bounds. Prints the errors, and
    returns (max-abs error, relative error).

    The relative error is the largest difference divided by the largest wanted number, so numbers
    near zero do not decide. `rms` bounds the root mean square of the differences divided by that of
    the wanted numbers, so one unlucky number does not decide either. numpy's own assert_allclose
    accepts NaN = NaN and broadcasts.
    """
    assert any(bound is not None for bound in (atol, rtol, rms)), "state a bound"
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    assert got.shape == want.shape, f"{what} has shape {got.shape}, not {want.shape}"
    for name, x in dict(got=got, want=want).items():
        bad = np.argwhere(~np.isfinite(x))
        assert not len(bad), (
            f"{what}: {len(bad)} of {x.size} numbers of {name} are not finite, first at {bad[0]}"
        )
    difference = np.abs(got - want)
    error = float(difference.max(initial=0))
    relative = error / max(float(np.abs(want).max(initial=0)), np.finfo(np.float32).tiny)
    where = np.unravel_index(difference.argmax(), difference.shape) if difference.size else ()
    spread = float(np.sqrt((difference**2).mean() / max((want**2).mean(), 1e-30)))
    line = (
        f"{what}: max abs error {error:.3g} (bound {atol}), relative {relative:.3g} (bound {rtol})"
    )
    line += f", root mean square {spread:.3g} (bound {rms})"
    line += f" at {tuple(map(int, where))} of {got.shape}"
    print(line)
    within = [
        bound is None or value <= bound
        for value, bound in ((error, atol), (relative, rtol), (spread, rms))
    ]
    assert all(within), line
    return error, relative


def assert_trees_equal(got: Any, want: Any) -> None:
    """Asserts that two trees have the same structure and, bit for bit, the same arrays."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape) and x.tobytes() == y.tobytes()


def rounding(n: int) -> float:
    """The bound on a float32 sum of n products, relative to the largest of several such sums, in
    whatever order a processor adds. An addition rounds by up to 2**-24 of the sum so far, and n
    such errors add up like the steps of a random walk; this allows twice that, and 8 units."""
    return 2**-23 * max(8.0, n**0.5)


def refused(error: type[Exception], match: str, function: Any, *args: Any, **options: Any) -> str:
    """Asserts that the call raises `error`, with a message of one line that contains `match`.
    Returns the message."""
    with pytest.raises(error) as caught:
        function(*args, **options)
    message = str(caught.value)
    assert match in message and "\n" not in message, message
    return message

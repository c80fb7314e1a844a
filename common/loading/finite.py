"""Whether stored numbers are finite, from their bits alone: that is as fast as memory.

Read as integers, NaN and infinity are the largest: the positive ones of signed integers, the
negative ones of unsigned.
"""

import numpy as np

from common.loading.stored import StoredTensor

Limits = tuple[tuple[np.dtype, int], ...]  # an integer type, and the least value that is no number


def limits(signed: type, unsigned: type, infinity: int) -> Limits:
    sign = 1 << (8 * np.dtype(unsigned).itemsize - 1)
    return (np.dtype(signed), infinity), (np.dtype(unsigned), sign + infinity)


LIMITS: dict[str, Limits] = {
    "F32": limits(np.int32, np.uint32, 0x7F800000),
    "BF16": limits(np.int16, np.uint16, 0x7F80),
    "F16": limits(np.int16, np.uint16, 0x7C00),
    "F8_E4M3": limits(np.int8, np.uint8, 0x7F),  # which has NaN, and no infinity
}
EXPONENTS: Limits = ((np.dtype(np.uint8), 255),)  # of the scales of 4-bit weights


def limits_of(path: str, dtype: str) -> Limits:
    """Those of the weight at `path`, stored in `dtype`; none where any bits are a number."""
    if dtype == "U8" and path.endswith(".scale"):
        return EXPONENTS
    return LIMITS.get(dtype, ())


def check_finite(tensor: StoredTensor, numbers: np.ndarray, limits: Limits) -> None:
    """ValueError if some of these `numbers` of a stored tensor, a contiguous array, are none."""
    flat = numbers.reshape(-1)
    if any(flat.size and flat.view(kind).max() >= least for kind, least in limits):
        raise ValueError(
            f"{tensor.file}: {tensor.name} holds NaN or infinity; download it again, or run it as "
            "it is with --allow-nonfinite"
        )

"""Checks from their bits alone whether stored numbers are finite. It is as fast as memory.

If bits are read as integers, NaN and infinity are the largest of all: the positive ones as signed
integers, the negative ones as unsigned integers.
"""

import numpy as np

from common.loading.stored import StoredTensor

Limits = tuple[tuple[np.dtype, int], ...]  # (integer type, least value that is NaN or infinity)


def limits(signed: type, unsigned: type, infinity: int) -> Limits:
    sign = 1 << (8 * np.dtype(unsigned).itemsize - 1)
    return (np.dtype(signed), infinity), (np.dtype(unsigned), sign + infinity)


LIMITS: dict[str, Limits] = {
    "F32": limits(np.int32, np.uint32, 0x7F800000),
    "BF16": limits(np.int16, np.uint16, 0x7F80),
    "F16": limits(np.int16, np.uint16, 0x7C00),
    "F8_E4M3": limits(np.int8, np.uint8, 0x7F),  # has NaN but no infinity
}
EXPONENTS: Limits = ((np.dtype(np.uint8), 255),)  # for the scales of 4-bit weights


def limits_of(path: str, dtype: str) -> Limits:
    """Returns the limits for the weight at `path`, stored in `dtype`; () if all bits are finite."""
    if dtype == "U8" and path.endswith(".scale"):
        return EXPONENTS
    return LIMITS.get(dtype, ())


def check_finite(tensor: StoredTensor, numbers: np.ndarray, limits: Limits) -> None:
    """ValueError if `numbers`, a contiguous part of a stored tensor, hold NaN or infinity."""
    flat = numbers.reshape(-1)
    if any(flat.size and flat.view(kind).max() >= least for kind, least in limits):
        raise ValueError(
            f"{tensor.file}: {tensor.name} holds NaN or infinity; download it again, or run it as "
            "it is with --allow-nonfinite"
        )

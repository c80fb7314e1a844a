"""What quantised files mean, in NumPy: the numbers of one matrix from its published tensors.

This is the oracle. It shares nothing with the library, and computes number by number.
"""

from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]  # of one matrix, by the last word of their names
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the numbers in a word, from its low end


def numbers_of(words: np.ndarray, bits: int) -> np.ndarray:
    """Returns the unsigned numbers of each word, from its low end: [.., 32 / bits]."""
    places = np.arange(0, 32, bits)
    return words.astype(np.int64)[..., None] >> places & (1 << bits) - 1


def along_rows(words: np.ndarray, bits: int) -> np.ndarray:
    """[rows, columns] of words as [rows, columns * numbers in a word]."""
    return numbers_of(words, bits).reshape(len(words), -1)


def along_columns(words: np.ndarray, bits: int) -> np.ndarray:
    return along_rows(words.T, bits).T


def awq(tensors: Tensors, config: Any) -> np.ndarray:
    def unpack(words: np.ndarray) -> np.ndarray:
        numbers = np.empty((*words.shape, 8), np.int64)
        numbers[..., AWQ_COLUMNS] = numbers_of(words, 4)
        return numbers.reshape(len(words), -1)

    group = np.arange(len(tensors["qweight"])) // config["group_size"]
    zero, scale = unpack(tensors["qzeros"])[group], tensors["scales"].astype(np.float32)[group]
    return ((unpack(tensors["qweight"]) - zero) * scale).T


def gptq(tensors: Tensors, config: Any) -> np.ndarray:
    bits = config["bits"]
    q, zero = along_columns(tensors["qweight"], bits), along_rows(tensors["qzeros"], bits)
    if config.get("checkpoint_format", "gptq") == "gptq":
        zero = (zero + 1) % (1 << bits)
    group = tensors["g_idx"]
    return ((q - zero[group]) * tensors["scales"].astype(np.float32)[group]).T


def compressed_tensors(tensors: Tensors, config: Any) -> np.ndarray:
    scale = tensors["weight_scale"].astype(np.float32)
    if config["format"] == "float-quantized":
        return tensors["weight"].astype(np.float32) * scale
    (scheme,) = (group["weights"] for group in config["config_groups"].values())
    bits, (n_out, n_in) = scheme["num_bits"], tensors["weight_shape"].tolist()
    q = along_rows(tensors["weight_packed"], bits)[:, :n_in] - (1 << (bits - 1))
    group = np.arange(n_in) // (scheme["group_size"] or n_in)
    zero = np.zeros_like(scale)
    if not scheme["symmetric"]:
        zero = along_columns(tensors["weight_zero_point"], bits)[:n_out] - (1 << (bits - 1))
    return (q - zero[:, group]) * scale[:, group]


def fbgemm_fp8(tensors: Tensors, config: Any) -> np.ndarray:
    return tensors["weight"].astype(np.float32) * tensors["weight_scale"]


METHODS = {
    "awq": awq,
    "gptq": gptq,
    "compressed-tensors": compressed_tensors,
    "fbgemm_fp8": fbgemm_fp8,
}


def meaning(tensors: Tensors, config: Any) -> np.ndarray:
    """Returns the float32 matrix [out, in] of its tensors and `quantization_config`."""
    return METHODS[config["quant_method"]](tensors, config).astype(np.float32)

"""The text of the fixtures in tests/fixtures/far, and where it is looked at."""

import numpy as np

END, VOCAB = 140_000, 61
SHOWN = 8  # tokens at each point
# Tokens from these positions on. 8,192 and its multiples are the borders of Llama 4's chunks.
POINTS = (4_000, 8_188, 16_380, 24_572, 32_766, 65_532, 98_300, 131_068, END - SHOWN)


def tokens() -> np.ndarray:
    """Random tokens [END]. The old generator, because its numbers are promised never to change."""
    return np.random.RandomState(29).randint(VOCAB, size=END)

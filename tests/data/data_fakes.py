"""Deterministic text of a few words."""

WORDS = (
    "the",
    "a",
    "river",
    "stone",
    "light",
    "of",
    "under",
    "over",
    "house",
    "green",
    "walks",
    "sings",
    "1984",
    "café",
)


def passage(seed, num_words):
    return f"{seed}: " + " ".join(WORDS[(seed * seed + i * (seed + 3) + i * i) % len(WORDS)] for i in range(num_words))

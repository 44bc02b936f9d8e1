"""How much of the logits is there at a time."""

import math

# A chunk's logits are at most 1/16 of all, or 256 rows: fewer make matrix products of too thin matrices.
_NUM_CHUNKS = 16
_MIN_ROWS = 256
# Logits that are turned to float32 at a time: 4 MiB stay in a CPU's cache; a GPU needs more, or its kernels would take
# less time than their launch.
_BLOCK_SIZE = 2**20
_CUDA_BLOCK_SIZE = 2**21


def chunk_rows(num_tokens: int) -> int:
    """Tokens whose logits a head makes at a time.

    Args:
        num_tokens (int): of the mini-batch.

    Returns:
        int: 1/16 of them, or 256.
    """
    return max(_MIN_ROWS, math.ceil(num_tokens / _NUM_CHUNKS))


def block_rows(vocab_size: int, *, is_cuda: bool) -> int:
    """Tokens whose logits are turned to float32 at a time.

    Args:
        vocab_size (int): logits of a token.
        is_cuda (bool): whether they are on a GPU.

    Returns:
        int: as many as 4 MiB hold, on a GPU 8 MiB, or 1.
    """
    return max(1, (_CUDA_BLOCK_SIZE if is_cuda else _BLOCK_SIZE) // vocab_size)

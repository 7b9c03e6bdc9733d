"""Buckets of batch sizes that share statistics: 1, 2, 3-4, 5-8, 9-16, 17-32, ..."""

from __future__ import annotations


def bucket_of(batch: int) -> int:
    """Index of the bucket that ``batch`` running requests fall in; ``batch`` is at least 1.

    Example:
        >>> [bucket_of(batch) for batch in (1, 2, 3, 4, 5, 32, 33)]
        [0, 1, 2, 2, 3, 5, 6]
    """
    assert batch >= 1, f"a batch of {batch} requests has no bucket"
    return (batch - 1).bit_length()


def bucket_name(index: int) -> str:
    """The batch sizes of a bucket, as shown in metrics: ``"1"``, ``"2"``, ``"3-4"``, ``"5-8"``, ..."""
    if index <= 1:
        return str(index + 1)
    return f"{2 ** (index - 1) + 1}-{2**index}"

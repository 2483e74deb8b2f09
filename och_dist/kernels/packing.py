"""Packed binary codes: (n, ceil(bits / 8)) uint8, bit k in byte k // 8 at position k % 8, pad bits zero."""

from __future__ import annotations

import numpy as np

from och_dist.errors import BadInputError


def pack_bits(bits: np.ndarray) -> np.ndarray:
    """Codes (n, ceil(r / 8)) uint8 of the truth values ``bits`` (n, r)."""
    if bits.ndim != 2:
        raise BadInputError(f"bits have shape {bits.shape}; expected (rows, bits): reshape them")
    return np.packbits(bits.astype(bool, copy=False), axis=1, bitorder="little")


def unpack_bits(codes: np.ndarray, n_bits: int) -> np.ndarray:
    """Truth values (n, n_bits) bool of ``codes`` (n, ceil(n_bits / 8)) uint8; pad bits are left out."""
    _check_codes(codes, n_bits)
    return np.unpackbits(codes, axis=1, count=n_bits, bitorder="little").view(bool)


def check_padding(codes: np.ndarray, n_bits: int, name: str = "codes") -> None:
    """Refuse ``codes`` that are not (n, ceil(n_bits / 8)) uint8, or have bits set beyond ``n_bits``."""
    _check_codes(codes, n_bits, name)
    if n_bits % 8 and (codes[:, -1] >> (n_bits % 8)).any():
        raise BadInputError(
            f"some {name} have bits set beyond bit {n_bits}; expected codes of {n_bits} bits, padded with zeros: "
            "encode both with one model"
        )


def code_words(codes: np.ndarray) -> np.ndarray:
    """``codes`` (n, bytes) uint8 as (n, ceil(bytes / 8)) uint64 words, zero-padded.

    A view where the rows already fill whole words of aligned contiguous memory, otherwise a copy.
    """
    if codes.ndim != 2 or codes.dtype != np.uint8:
        raise BadInputError(
            f"codes are {codes.dtype} of shape {codes.shape}; expected uint8 (rows, bytes): pack the bits"
        )
    n, n_bytes = codes.shape
    aligned = codes.ctypes.data % 8 == 0
    if n_bytes and n_bytes % 8 == 0 and codes.flags.c_contiguous and aligned:
        return codes.view(np.uint64)
    padded = np.zeros((n, max(1, -(-n_bytes // 8))), dtype=np.uint64)
    padded.view(np.uint8)[:, :n_bytes] = codes
    return padded


def check_words(words: np.ndarray, n_bits: int) -> None:
    """Refuse ``words`` that are not (n, ceil(n_bits / 64)) uint64, or have bits set beyond ``n_bits``."""
    if words.ndim != 2 or words.dtype != np.uint64 or words.shape[1] != -(-n_bits // 64):
        raise BadInputError(
            f"words are {words.dtype} {words.shape}; expected uint64 (rows, {-(-n_bits // 64)}) "
            f"for {n_bits} bits: encode both with one model"
        )
    if n_bits % 64 and (words[:, -1] >> np.uint64(n_bits % 64)).any():
        raise BadInputError(f"codes have bits set beyond bit {n_bits}; expected zero padding: encode them again")


def count_ones(codes: np.ndarray, n_bits: int) -> np.ndarray:
    """Set bits (n_bits,) int64 per bit position over all rows of ``codes`` (n, ceil(n_bits / 8)) uint8."""
    _check_codes(codes, n_bits)
    values = np.array([np.bincount(column, minlength=256) for column in codes.T])
    bit_of_value = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (values @ bit_of_value.astype(np.int64)).reshape(-1)[:n_bits]


def _check_codes(codes: np.ndarray, n_bits: int, name: str = "codes") -> None:
    if n_bits < 1 or codes.ndim != 2 or codes.dtype != np.uint8 or codes.shape[1] != -(-n_bits // 8):
        raise BadInputError(
            f"{name} are {codes.dtype} of shape {codes.shape}; expected uint8 (rows, {-(-n_bits // 8)}) "
            f"for {n_bits} bits: encode both with one model"
        )

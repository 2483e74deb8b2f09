"""Packed codes against one loop over bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from och_dist.errors import BadInputError
from och_dist.kernels.packing import check_padding, code_words, count_ones, pack_bits, unpack_bits


def random_bits(n, r, seed=0):
    return np.random.default_rng(seed).random((n, r)) < 0.4


def test_bit_k_is_in_byte_k_div_8_at_position_k_mod_8():
    bits = random_bits(6, 21)
    codes = pack_bits(bits)
    assert codes.shape == (6, 3)
    assert codes.dtype == np.uint8
    for i in range(6):
        for k in range(24):
            expected = bits[i, k] if k < 21 else False
            assert (codes[i, k // 8] >> (k % 8)) & 1 == expected


@settings(deadline=None, max_examples=30)
@given(n=st.integers(0, 20), r=st.integers(1, 200), seed=st.integers(0, 1000))
def test_round_trip_ones_and_words(n, r, seed):
    bits = random_bits(n, r, seed)
    codes = pack_bits(bits)
    unpacked = unpack_bits(codes, r)
    assert unpacked.dtype == bool
    assert np.array_equal(unpacked, bits)
    ones = count_ones(codes, r)
    assert ones.dtype == np.int64
    assert np.array_equal(ones, bits.sum(axis=0))
    check_padding(codes, r)
    words = code_words(codes)
    assert words.dtype == np.uint64
    assert words.shape == (n, -(-r // 64))
    for i in range(n):
        text = b"".join(int(word).to_bytes(8, "little") for word in words[i])
        assert text == codes[i].tobytes() + bytes(len(text) - codes.shape[1])


def test_words_are_a_view_only_where_memory_allows():
    codes = pack_bits(random_bits(10, 128))
    assert np.shares_memory(code_words(codes), codes)
    shifted = np.empty(codes.size + 1, np.uint8)[1:].reshape(codes.shape)
    shifted[:] = codes
    for other in (shifted, np.asfortranarray(codes), np.hstack([codes, codes])[:, :16]):
        assert np.array_equal(code_words(other), code_words(codes))
    assert not np.shares_memory(code_words(codes[:, :5]), codes)


def test_bits_in_the_padding_are_found():
    codes = pack_bits(random_bits(10, 11))
    codes[7, 1] |= 8
    with pytest.raises(BadInputError, match="some codes have bits set beyond bit 11"):
        check_padding(codes, 11)
    check_padding(codes, 12)
    check_padding(np.full((2, 2), 255, np.uint8), 16)


def test_foreign_codes_are_refused():
    with pytest.raises(BadInputError, match="for 17 bits"):
        unpack_bits(np.zeros((3, 2), np.uint8), 17)
    with pytest.raises(BadInputError, match="codes are int64"):
        count_ones(np.zeros((3, 2), np.int64), 16)
    with pytest.raises(BadInputError, match="expected uint8"):
        code_words(np.zeros((3, 2), np.int8))
    with pytest.raises(BadInputError, match=r"expected \(rows, bits\)"):
        pack_bits(np.zeros(3, bool))

"""The checksum of bytes on a disk: its definition, by Python's integers, and what it notices."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from hf_pyao.engine.checksums import checksum

SECTION_BYTES = 2**20
GOLDEN, JOIN, MODULUS = 0x9E3779B97F4A7C15, 0xD1342543DE82EF95, 2**64


def weight_of(position: int) -> int:
    """SplitMix64 of the position (from 1 on), made odd."""
    z = (position + 1) * GOLDEN % MODULUS
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULUS
    return (z ^ (z >> 31)) | 1


def by_definition(content: bytes) -> int:
    whole = len(content) // 8 * 8
    total = len(content) * GOLDEN
    for first in range(0, whole, SECTION_BYTES):
        section = content[first : min(first + SECTION_BYTES, whole)]
        of_section = 0
        for position in range(len(section) // 8):
            word = int.from_bytes(section[8 * position : 8 * position + 8], "little")
            of_section += (word ^ (word >> 32)) * weight_of(position)
        total = (total * JOIN + of_section) % MODULUS
    return (total * JOIN + int.from_bytes(content[whole:], "little")) % MODULUS


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 4096, 70001])
def test_it_is_what_the_note_says(nbytes: int) -> None:
    content = random.Random(nbytes).randbytes(nbytes)
    assert checksum(memoryview(content)) == by_definition(content)


def test_sections_are_joined_as_the_note_says() -> None:
    content = random.Random(0).randbytes(SECTION_BYTES + 4096 + 3)
    assert checksum(memoryview(content)) == by_definition(content)


def damaged(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield what drives, cables and memory make of bytes, and what it is called."""
    draw = random.Random(1)
    nbytes = len(content)
    for _ in range(50):
        bit = draw.randrange(8 * nbytes)
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        yield f"bit {bit}", bytes(flipped)
    for _ in range(50):  # a line that is stuck: the same bit of several words
        bit = draw.randrange(64)
        stuck = bytearray(content)
        for word in draw.sample(range(nbytes // 8), 2):
            stuck[8 * word + bit // 8] ^= 1 << bit % 8
        yield f"bit {bit} of two words", bytes(stuck)
    top = bytearray(content)
    top[7] ^= 0x80
    top[8 * 77 + 7] ^= 0x80
    yield "the upper bits of two words", bytes(top)
    for _ in range(20):
        one, other = sorted(draw.sample(range(0, nbytes - 511, 512), 2))
        sector = content[one : one + 512]
        yield f"sector {one} twice", content[:other] + sector + content[other + 512 :]
        yield f"sector {one} of zeros", content[:one] + bytes(512) + content[one + 512 :]
        exchanged = content[:one] + content[other : other + 512] + content[one + 512 : other]
        yield f"sectors {one}, {other}", exchanged + sector + content[other + 512 :]
    yield "a byte later", content[-1:] + content[:-1]
    yield "a word later", content[-8:] + content[:-8]
    page = 4096
    yield "a page later", content[-page:] + content[:-page]
    yield "the halves of a word", content[4:8] + content[:4] + content[8:]
    yield "shorter", content[:-1]
    yield "longer by a zero", content + bytes(1)


@pytest.mark.parametrize("nbytes", [8192, 2 * SECTION_BYTES + 8192])
def test_damage_is_noticed(nbytes: int) -> None:
    content = random.Random(2).randbytes(nbytes)
    whole = checksum(memoryview(content))
    for what, other in damaged(content):
        assert checksum(memoryview(other)) != whole, what


def test_exchanged_sections_and_zeros_of_other_lengths_are_noticed() -> None:
    one, other = (random.Random(seed).randbytes(SECTION_BYTES) for seed in (3, 4))
    assert checksum(memoryview(one + other)) != checksum(memoryview(other + one))
    sums = [checksum(memoryview(bytes(n))) for n in (0, 1, 8, 512, 4096, SECTION_BYTES)]
    assert len(set(sums)) == len(sums)

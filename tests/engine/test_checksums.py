"""The checksum of bytes on a disk: its definition, by Python's integers, and what it notices."""

from __future__ import annotations

import random

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

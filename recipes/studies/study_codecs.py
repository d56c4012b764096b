"""The codecs of hf_pyao, and the variants of them that the error study looks at."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from hf_pyao.engine.codecs import CODECS
from hf_pyao.engine.codecs.base import BoundedCodec
from hf_pyao.engine.codecs.int8 import Int8Codec
from hf_pyao.engine.codecs.narrow import NarrowCodec

STUDY_CODECS: Mapping[str, Callable[[], BoundedCodec]] = {
    **CODECS,
    "int8_group": functools.partial(Int8Codec, "group"),
    "int8_tensor": functools.partial(Int8Codec, "tensor"),
    "narrow": NarrowCodec,
}
"""Name in tables -> what makes the codec; configurations know those of ``CODECS`` by name."""


def study_codec(name: str) -> BoundedCodec:
    """Return the codec called *name*, to be given to a configuration as it is."""
    return STUDY_CODECS[name]()

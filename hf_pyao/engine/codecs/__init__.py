"""Codecs: how a saved tensor is written on its way to the host.

A codec turns one saved tensor into *payload* tensors (exactly what crosses the link) and a *spec*
(plain Python values that stay on this side), and back. To add one: a module in this package and a
row in :data:`CODECS`; the contract tests parametrise over the table.
"""

from __future__ import annotations

from collections.abc import Callable

from hf_pyao.engine.codecs.base import BoundedCodec, Codec, Encoded
from hf_pyao.engine.codecs.bitmask import BitmaskCodec
from hf_pyao.engine.codecs.fp8 import Fp8Codec
from hf_pyao.engine.codecs.identity import IdentityCodec
from hf_pyao.engine.codecs.int4 import Int4Codec
from hf_pyao.engine.codecs.int8 import Int8Codec
from hf_pyao.errors import ConfigError, unknown_name
from hf_pyao.text import echo

__all__ = ["CODECS", "Codec", "Encoded", "get_codec"]

CODECS: dict[str, Callable[[], BoundedCodec]] = {
    "identity": IdentityCodec,
    "int8": Int8Codec,
    "fp8": Fp8Codec,
    "int4": Int4Codec,
    "bitmask": BitmaskCodec,
}
"""Codecs that a configuration names. Any other is given to it as an object."""


def get_codec(codec: str | Codec) -> Codec:
    """Return the codec named *codec*, or *codec* itself if it is one already.

    Raises:
        ConfigError: the name is not in :data:`CODECS`, or the object is no codec.
    """
    if isinstance(codec, str):
        if codec not in CODECS:
            raise unknown_name("codec", codec, CODECS)
        return CODECS[codec]()
    if not isinstance(codec, Codec):
        raise ConfigError(
            f"codec is {echo(codec)}; expected one of {sorted(CODECS)} or a Codec.",
            key="wrong-argument",
        )
    return codec

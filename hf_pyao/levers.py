"""What changes the step itself, before any policy decides on what it saves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from hf_pyao.config import PyAOConfig
from hf_pyao.errors import PyAOError
from hf_pyao.text import describe_error

Result = TypeVar("Result")


class LeversRefusedError(PyAOError, RuntimeError):
    """A step cannot be had with these levers; says why."""

    key = "levers-refused"


def or_refuse(record: Callable[[], Result]) -> Result:
    """Return what *record* returns.

    Raises:
        LeversRefusedError: it raised, whatever it was: of a model's own code, mostly.
    """
    try:
        return record()
    except LeversRefusedError:
        raise
    except Exception as error:  # the step can be had without these levers
        raise LeversRefusedError(describe_error(error)) from error


@dataclass(frozen=True, kw_only=True)
class Levers:
    """Fields of :class:`~hf_pyao.PyAOConfig` without which a step is another one.

    A recording of a step with these shows what there is to decide on with them.
    """

    head_loss: str = "off"
    mlp_tiles: int | str = "off"
    checkpoint_every: int = 0
    checkpoint_nested: bool = False
    save_attention: bool = False
    attention_groups: int | str = "off"

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the fields, in order."""
        return tuple(each.name for each in fields(cls))

    @classmethod
    def of(cls, config: PyAOConfig) -> Levers:
        """Return those of *config*."""
        effective = config.effective()
        return cls(
            head_loss=effective.head_loss,
            mlp_tiles=effective.mlp_tiles,
            checkpoint_every=effective.checkpoint_every,
            checkpoint_nested=effective.checkpoint_nested,
            save_attention=effective.save_attention,
            attention_groups=effective.attention_groups,
        )

    def settings(self) -> dict[str, Any]:
        """Return them as :meth:`PyAOConfig.from_dict` takes them."""
        return dict(vars(self))

    def given(self) -> dict[str, Any]:
        """Return those that change something."""
        plain = vars(NO_LEVERS)
        return {name: value for name, value in vars(self).items() if value != plain[name]}

    def kept_layers(self, num_layers: int, keep_last_layers: int) -> int:
        """Return how many last layers are kept: those of whole segments.

        Args:
            num_layers: of the model.
            keep_last_layers: ``PyAOConfig.keep_last_layers``.
        """
        first_kept = max(0, num_layers - keep_last_layers)
        if keep_last_layers and self.checkpoint_every:  # a segment's input is its first layer's
            first_kept -= first_kept % self.checkpoint_every
        return num_layers - first_kept

    @property
    def scales(self) -> bool:
        """True if steps at other sizes can be computed from a few recorded sizes.

        The numbers of chunks, tiles and groups are whole numbers that depend on the size.
        """
        parts = (self.head_loss, self.mlp_tiles, self.attention_groups)
        return parts == ("off", "off", "off")

    @property
    def less_memory(self) -> str:
        """What would take less of the device, besides plans, in words."""
        unused = {"head_loss='chunked'": self.head_loss, "mlp_tiles='auto'": self.mlp_tiles}
        levers = [words for words, value in unused.items() if value == "off"]
        return ", ".join([*levers, "a smaller micro-batch, shorter sequences"])

    def described_beside(self, other: Levers) -> str:
        """Return in words what of them differs from *other*; empty if nothing does."""
        parts = []
        names = "mlp_tiles", "head_loss", "attention_groups"
        apart: dict[str, Any] = dict.fromkeys(names, "off")
        only = dataclasses.replace(self, **apart)
        if only != dataclasses.replace(other, **apart):
            parts.append(only.describe() or "layers do not run again as a whole")
        if self.mlp_tiles != other.mlp_tiles:
            parts.append(Levers(mlp_tiles=self.mlp_tiles).describe() or "MLPs in no tiles")
        if self.attention_groups != other.attention_groups:
            groups = Levers(attention_groups=self.attention_groups).describe()
            parts.append(groups or "attention in no groups")
        if self.head_loss != other.head_loss:
            parts.append(f"{self.head_loss} loss")
        return ", ".join(parts)

    def describe(self) -> str:
        """Return what they change, in words, such as ``chunked loss, MLPs in 8 tiles``."""
        count = "" if self.mlp_tiles == "auto" else f"{self.mlp_tiles} "
        groups = "" if self.attention_groups == "auto" else f"{self.attention_groups} "
        every = "each layer" if self.checkpoint_every == 1 else f"{self.checkpoint_every} layers"
        one_by_one = " one by one" if self.checkpoint_nested else ""
        parts = {
            f"{self.head_loss} loss": self.head_loss != "off",
            f"MLPs in {count}tiles": self.mlp_tiles != "off",
            f"{every} run again{one_by_one}": self.checkpoint_every > 0,
            "attention saved": self.save_attention,
            f"attention in {groups}groups": self.attention_groups != "off",
        }
        return ", ".join(part for part, is_on in parts.items() if is_on)


NO_LEVERS = Levers()
"""The step as the model runs it by itself."""

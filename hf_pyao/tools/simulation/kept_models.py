"""Models on fake tensors that are built once and used for several recordings.

A command records dozens of steps of one model. Building it takes a fifth of a recording of a small
model, and most of a recording of a large one with adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_pyao.auto.recording.shrunk_model import EqualLayers


class KeptModels:
    """Keeps models with the mode that their tensors belong to.

    A model is kept as long as the steps that use it end without an error, and leave it as it was:
    whoever changes its modules puts them back. Gradients, and hooks on parameters, are removed
    here.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[nn.Module, FakeTensorMode]] = {}
        self.equal_layers = EqualLayers()
        """What is known of their layers."""

    @contextmanager
    def model(
        self,
        key: Hashable,
        build: Callable[[], nn.Module],
        around: Callable[[], AbstractContextManager[None]],
    ) -> Iterator[tuple[nn.Module, FakeTensorMode]]:
        """Take the model out for one use; it comes back unless the use raises.

        Args:
            key: what the model follows from.
            build: makes it, if none is kept.
            around: what is active, under the mode, while it is built and used.

        Yields:
            The model, and the mode.
        """
        model, fake_mode = self._kept.pop(key, (None, new_mode()))
        with fake_mode, around():
            if model is None:
                model = build()
            yield model, fake_mode
            for parameter in model.parameters():
                parameter.grad = None
                hooks = getattr(parameter, "_post_accumulate_grad_hooks", None)
                if hooks:
                    hooks.clear()
        self._kept[key] = model, fake_mode


def new_mode() -> FakeTensorMode:
    """Return a mode for one model."""
    return FakeTensorMode(allow_non_fake_inputs=True)

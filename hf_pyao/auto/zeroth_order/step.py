"""``ZerothOrder`` and ``zeroth_order_step``: fine-tuning by two forwards a step, for a loop."""

from __future__ import annotations

import contextlib
import logging
import math
import typing
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hf_pyao.auto.install.links import device_of
from hf_pyao.auto.zeroth_order.checks import check_model
from hf_pyao.auto.zeroth_order.visiting_weights import VisitingWeights
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.engine.zeroth_order.block_layout import VisitBlock
from hf_pyao.engine.zeroth_order.perturbation import (
    PastStep,
    ZerothOrderSettings,
    projected_gradient,
)
from hf_pyao.engine.zeroth_order.trained import TrainedWeights
from hf_pyao.errors import ConfigError, ConflictError, unknown_name, warn
from hf_pyao.model.head.head_loss import install_head_loss
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.model.map.wrappers import plain_path, unwrap_model
from hf_pyao.ranks import process_rank
from hf_pyao.settings.removed import refuse_removed
from hf_pyao.settings.sizes import Count, Gibibytes
from hf_pyao.text import echo

logger = logging.getLogger(__name__)

SIGNS = (1, -1)
"""Of the passes of a step; with two ranks, that of each rank."""


class ZerothOrder:
    """Zeroth-order fine-tuning of one model: its weights, from now until :meth:`close`.

    Parameters that require gradients are trained; no gradient is ever computed. Layers visit the
    device one at a time (ZO2, arXiv 2503.12668), and their updates go back to the host. Layers that
    stay are on the device, and so are embeddings and head, unless these visit by rows.

    ```python
    with ZerothOrder(model, ZerothOrderSettings(epsilon=1e-3), device="cuda") as zeroth_order:
        for batch in batches:
            loss = zeroth_order_step(
                model, lambda model: model(**batch).loss, zeroth_order, learning_rate=1e-6
            )
    ```

    Args:
        model: on the host or on the device; of any architecture whose layers are found.
        settings: epsilon, momentum and seed.
        device: where compute runs; None: where the model is.
        num_resident: layers that stay on the device, evenly spread; None: all.
        host_memory_gib: most memory of the host, in GiB; None: this process's share of it.
        stream_embeddings: ``"on"``: the weights of embeddings and head are on the host, too, and
            visit by rows; ``"off"``: they stay on the device.
        head_loss: ``"chunked"`` or ``"auto"``: both passes compute the loss over chunks of tokens,
            without all logits; ``"off"``: the model's own loss.
        layers: names or patterns of the layers, as ``PyAOConfig.layers``.
        transport: copies bytes; None: what suits the device.

    Raises:
        ConfigError: nothing is trained, the host has no room, or a setting is unknown.
        ConflictError: the model is attached, or someone else moves, shards or compiles its weights;
            a number of ranks other than one and two; or a module keeps references to its weights,
            which would be read without the perturbation.
        NoLayersFoundError: no layers were found.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: ZerothOrderSettings | None = None,
        *,
        device: torch.device | str | None = None,
        num_resident: int | None = 0,
        host_memory_gib: float | None = None,
        stream_embeddings: str = "off",
        head_loss: str = "off",
        layers: tuple[str, ...] = (),
        transport: Transport | None = None,
    ) -> None:
        self.settings = settings or ZerothOrderSettings()
        for what, given, kind in (
            ("model", model, nn.Module),
            ("settings", self.settings, ZerothOrderSettings),
        ):
            if not isinstance(given, kind):
                raise ConfigError(
                    f"{what} is {echo(given)}; expected a {kind.__name__}.", key="wrong-argument"
                )
        _check_given(num_resident, host_memory_gib, stream_embeddings, head_loss)
        root = unwrap_model(model)
        self.device = device_of(root) if device is None else torch.device(device)
        check_model(root)
        found = find_layers(root, layers)
        parameters = [
            (plain_path(name), each) for name, each in root.named_parameters() if each.requires_grad
        ]
        if not parameters:
            raise ConfigError(
                "no parameter of the model requires gradients, so zeroth order has nothing to "
                "train. Call model.requires_grad_(True), or add adapters.",
                key="zeroth-order-untrained",
            )
        self._trained = TrainedWeights(parameters, self.settings)
        self._weights = VisitingWeights(
            root,
            found.layers,
            self._trained,
            self.device,
            len(found.layers) if num_resident is None else num_resident,
            host_memory_gib=host_memory_gib,
            ends_visit=stream_embeddings == "on",
            transport=transport,
        )
        self._is_open = True
        self._is_flushed = False
        """Whether :meth:`close` has updated all weights."""
        self._losses: tuple[tuple[float, float], ...] = ()
        """By micro-batch of the step that runs, those of both passes."""
        self.num_skipped_steps = 0
        """Steps whose losses were not finite: they have changed nothing."""
        try:
            self._weights.put_on()
            self._hooks = self._hook(root)
            self.head_loss = install_head_loss(root, head_loss, without_gradients=True)
            """What computes the loss in chunks, and says why where it does not."""
        except BaseException:
            self._weights.take_off()
            raise

    # ---- steps ---------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Steps that were made."""
        return self._trained.num_steps

    @property
    def blocks(self) -> list[VisitBlock]:
        """What visits the device: the weights of each layer that is on the host."""
        return self._weights.blocks

    def accumulate(self, model: nn.Module, loss_fn: Callable[[nn.Module], Any]) -> torch.Tensor:
        """Run both passes over a micro-batch; the step ends with :meth:`end_step`.

        Args:
            model: the model, or what wraps it; given to *loss_fn*.
            loss_fn: returns a scalar loss; called once for each pass that this rank runs.

        Returns:
            The mean of both losses, float32, on the device.

        Raises:
            ConfigError: *loss_fn* has returned something else than one number, or *model* is
                another one.
        """
        self._check_open()
        if not any(each is self._weights.model for each in model.modules()):
            raise ConfigError(
                f"model is a {type(model).__name__} that does not have the model of this "
                "ZerothOrder: its weights would not be perturbed. Give the model that it was made "
                "for, or what wraps it.",
                key="wrong-argument",
            )
        visits = self._weights.visits
        if visits.sign is not None:
            raise ConflictError(
                "loss_fn has begun a step of zeroth order inside of one.", key="wrong-argument"
            )
        if not visits.in_use.acquire(blocking=False):
            raise ConflictError(
                "a step of zeroth order runs on another thread. Make steps and other forwards one "
                "after the other.",
                key="zeroth-order-threads",
            )
        try:
            losses = self._passes(model, loss_fn)
        finally:
            visits.in_use.release()
            visits.end_pass()
        self._losses = (*self._losses, losses)
        return torch.tensor((losses[0] + losses[1]) / 2, device=self.device)

    def _passes(self, model: nn.Module, loss_fn: Callable[[nn.Module], Any]) -> tuple[float, float]:
        own = process_rank()
        signs = SIGNS if own.num_ranks == 1 else (SIGNS[own.rank],)
        if own.num_ranks > 1:
            _share_generators(self.device)
        visits = self._weights.visits
        visits.begin_step()

        def run(sign: int) -> torch.Tensor:
            with visits.reading(sign):
                return _checked(loss_fn(model))

        with torch.no_grad():
            found = [float(each) for each in self._weights.turns.run([_of(run, s) for s in signs])]
        losses = found if own.num_ranks == 1 else _exchanged(found[0], self.device)
        return losses[0], losses[1]

    def end_step(self, learning_rate: float) -> float:
        """End a step: every weight is updated by it when it is read next.

        Args:
            learning_rate: of this step.

        Returns:
            The projected gradient, of the mean loss over the micro-batches.
        """
        self._check_open()
        losses = self._losses
        if not losses:
            raise ConfigError(
                "a step has ended without a micro-batch. Call accumulate() first.",
                key="wrong-argument",
            )
        plus, minus = (sum(each) / len(losses) for each in zip(*losses, strict=True))
        gradient = projected_gradient(plus, minus, self.settings.epsilon)
        self._losses = ()
        if math.isfinite(gradient) and math.isfinite(learning_rate):
            self._trained.end_step(PastStep(self.num_steps, learning_rate, gradient))
        else:
            self.num_skipped_steps += 1
            warn(
                logger,
                "zeroth-order-loss",
                "step %d of zeroth order has the losses %r and %r, and the learning rate %r: the "
                "weights stay as they are.",
                self.num_steps,
                plus,
                minus,
                learning_rate,
            )
            self._trained.end_step(None)
        return gradient

    def drop_step(self) -> None:
        """Forget the micro-batches since the last step's end, as after one that has failed."""
        self._losses = ()

    # ---- weights -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Have all weights updated by all steps, before they are saved or looked at."""
        self._check_open()
        self._weights.visits.flush()

    def close(self) -> None:
        """Update all weights, and give the model its plain weights back. Idempotent.

        Layers that came from the host stay there; those that came from the device go back.
        """
        if not self._is_open:
            return
        if self._weights.visits.sign is not None:
            raise ConflictError(
                "close() was called in a forward of the model. Call it after the step.",
                key="wrong-argument",
            )
        try:
            if not self._is_flushed:
                self._weights.visits.flush()
                self._is_flushed = True
        finally:
            for hook in self._hooks:
                hook.remove()
            self.head_loss.uninstall()
            self._weights.take_off()
            self._is_open = False  # last: an interrupted call can be made again

    def __enter__(self) -> ZerothOrder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def figures(self) -> dict[str, Any]:
        """Return what the copies came to: uploads, copies back, bytes, times in ms."""
        return self._weights.visits.figures()

    def state_dict(self) -> dict[str, Any]:
        """Return what a run goes on from, beside the weights. All weights are updated first."""
        self.flush()
        return {
            "num_steps": self.num_steps,
            "seed": self.settings.seed,
            "epsilon": self.settings.epsilon,
            "transfer_dtype": self.settings.transfer_dtype,
            "momentum": {
                each.name: torch.cat([part.state.cpu() for part in each.parts])  # type: ignore[union-attr]
                for each in self._trained.weights
                if self.settings.momentum
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from *state*; the model has the weights of that moment.

        Raises:
            ConfigError: what the noise depends on differs, or momenta do not fit the weights.
        """
        self.flush()
        for name in ("zo2_order", "transfer_dtype"):  # of a run of an earlier version
            refuse_removed(name, f"{name} of the run that is resumed", state.get(name))
        for name in ("seed", "transfer_dtype"):
            own, found = getattr(self.settings, name), state.get(name)
            if own != found:
                raise ConfigError(
                    f"{name} is {own!r}; the run that is resumed has {found!r}. Give the same: the "
                    "noise depends on it.",
                    key="zeroth-order-resume",
                )
        momenta = state["momentum"]
        for weight in self._trained.weights:
            found = momenta.get(weight.name)
            if found is not None and found.numel() != weight.num_elements:
                raise ConfigError(
                    f"the momentum of {weight.name!r} has {found.numel()} elements; the weight has "
                    f"{weight.num_elements}. Resume with the same model.",
                    key="zeroth-order-resume",
                )
        for part, found in self._momenta(momenta):
            part.copy_(found)
        self._losses = ()
        self._trained.start_at(state["num_steps"])
        self._weights.visits.forget_all()

    def _momenta(
        self, momenta: dict[str, torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the momentum of each part, and what *momenta* have for it; zeros for none."""
        for weight in self._trained.weights:
            for part in weight.parts:
                if part.state is None:
                    continue
                found = momenta.get(weight.name)
                end = part.first + part.num_elements
                yield part.state, torch.zeros(()) if found is None else found[part.first : end]

    def _check_open(self) -> None:
        if not self._is_open:
            raise ConflictError(
                "this ZerothOrder was closed. Make another one for the model.", key="wrong-argument"
            )

    def _hook(self, model: nn.Module) -> list[Any]:
        """Flush before anyone takes the weights, or gives others."""
        flush, anything = _Flush(self), typing.cast(Any, model)
        return [
            anything.register_state_dict_pre_hook(flush),
            anything.register_load_state_dict_pre_hook(flush),
        ]


class _Flush:
    """A hook of the model that has weights updated; in copies of the model it does nothing."""

    __slots__ = ("_zeroth_order",)

    def __init__(self, zeroth_order: ZerothOrder) -> None:
        self._zeroth_order = zeroth_order

    def __call__(self, *_: object, **__: object) -> None:
        if self._zeroth_order._is_open:
            self._zeroth_order.flush()

    def __reduce__(self) -> Any:
        # A callable that takes anything, and that is there where hf_pyao is not installed.
        return typing.cast, (None, nn.Identity)


def _check_given(
    num_resident: int | None,
    host_memory_gib: float | None,
    stream_embeddings: str,
    head_loss: str,
) -> None:
    """Refuse arguments of :class:`ZerothOrder` that are out of range."""
    if num_resident is not None:
        Count("layers").check("num_resident", num_resident)
    Gibibytes().check("host_memory_gib", host_memory_gib)
    if stream_embeddings not in ("on", "off"):
        raise unknown_name("stream_embeddings", stream_embeddings, ("on", "off"))
    if head_loss not in ("off", "auto", "chunked"):
        raise unknown_name("head_loss", head_loss, ("off", "auto", "chunked"))


def zeroth_order_step(
    model: nn.Module,
    loss_fn: Callable[[nn.Module], Any],
    zeroth_order: ZerothOrder,
    *,
    learning_rate: float,
) -> torch.Tensor:
    """Make one step of MeZO-SGD: two forwards of one batch, and one number as the gradient.

    Both passes have the same noise and the same random numbers (dropout). With two ranks of a
    process group, rank 0 runs the pass at +epsilon and rank 1 that at -epsilon; give both the same
    batch. Source: MeZO (Malladi et al., 2023, algorithm 1); ZO2 (arXiv 2503.12668) for the visits.

    Args:
        model: the model, or what wraps it; given to *loss_fn*.
        loss_fn: returns a scalar loss.
        zeroth_order: made for the model.
        learning_rate: of this step.

    Returns:
        The mean of both losses, float32, on the device.

    Raises:
        ConfigError: *loss_fn* has returned something else than one number.
    """
    loss = zeroth_order.accumulate(model, loss_fn)
    zeroth_order.end_step(learning_rate)
    return loss


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Keep a model of transformers from saving keys and values while it trains."""
    config = getattr(unwrap_model(model), "config", None)
    before = getattr(config, "use_cache", None)
    if before is None:
        yield
        return
    assert config is not None
    config.use_cache = False
    try:
        yield
    finally:
        config.use_cache = before


def _of(run: Callable[[int], torch.Tensor], sign: int) -> Callable[[], torch.Tensor]:
    return lambda: run(sign)


def _checked(loss: Any) -> torch.Tensor:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    kind = (
        f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss)
    )
    raise ConfigError(
        f"loss_fn has returned {kind}; expected a tensor with one number.", key="wrong-argument"
    )


def _exchanged(loss: float, device: torch.device) -> list[float]:
    """Return the losses of both ranks, in the order of the ranks."""
    distributed = torch.distributed
    where = device if distributed.get_backend() == "nccl" else torch.device("cpu")
    own = torch.tensor([loss], dtype=torch.float64, device=where)
    found = [torch.zeros_like(own) for _ in SIGNS]
    distributed.all_gather(found, own)
    return [float(each) for each in found]


def _share_generators(device: torch.device) -> None:
    """Let torch's generators of both ranks have the state of rank 0: both passes draw the same."""
    distributed = torch.distributed
    where = device if distributed.get_backend() == "nccl" else torch.device("cpu")
    for kind in dict.fromkeys((torch.device("cpu"), device)):
        generators: Any = torch if kind.type == "cpu" else torch.get_device_module(kind)
        place = () if kind.type == "cpu" else (kind,)
        state = generators.get_rng_state(*place).to(where)
        distributed.broadcast(state, src=0)
        generators.set_rng_state(state.cpu(), *place)

"""``ZerothOrder`` and ``zeroth_order_step``: fine-tuning by two forwards a step, for a loop."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hf_pyao.auto.install.links import device_of, pool_for
from hf_pyao.auto.install.weight_readers import Around, WeightReaders
from hf_pyao.auto.zeroth_order.checks import check_model
from hf_pyao.auto.zeroth_order.layer_blocks import blocks_of, reserve
from hf_pyao.engine.rerun.generators import RandomState
from hf_pyao.engine.transfer.link import LinkContext
from hf_pyao.engine.transfer.stream_transport import transport_for
from hf_pyao.engine.transfer.transport import Transport
from hf_pyao.engine.zeroth_order.perturbation import ZerothOrderSettings
from hf_pyao.engine.zeroth_order.trained import TrainedWeights
from hf_pyao.engine.zeroth_order.visits import WeightVisits
from hf_pyao.errors import ConfigError, ConflictError, warn
from hf_pyao.model.head.head_loss import install_head_loss
from hf_pyao.model.map.module_map import find_layers
from hf_pyao.model.map.wrappers import plain_path, unwrap_model
from hf_pyao.model.weights.places import ComputeDevice, move_others
from hf_pyao.ranks import process_rank
from hf_pyao.settings.removed import refuse_removed
from hf_pyao.settings.sizes import Count, Gibibytes
from hf_pyao.text import echo

logger = logging.getLogger(__name__)

_SIGNS = (1, -1)
"""Of the passes of a step; with two ranks, that of each rank."""
_KEY = "_pyao_zeroth_order"
_FILES = ("state_dict", "_load_from_state_dict")
"""Methods by which others take a model's weights, or give it others."""


class ZerothOrder:
    """Zeroth-order fine-tuning of one model: its weights, from now until :meth:`close`.

    Parameters that require gradients are trained; no gradient is ever computed. Layers visit the
    device one at a time (ZO2, arXiv 2503.12668), and their updates go back to the host. Layers that
    stay are on the device, and so are embeddings and head.

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
        stream_embeddings: ``"off"``: weights of embeddings and head are on the device.
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
        if num_resident is not None:
            Count("layers").check("num_resident", num_resident)
        Gibibytes().check("host_memory_gib", host_memory_gib)
        refuse_removed("ZerothOrder.stream_embeddings", "stream_embeddings", stream_embeddings)
        root = unwrap_model(model)
        self.device = device_of(root) if device is None else torch.device(device)
        check_model(root)
        found = find_layers(root, layers).layers
        parameters = [(plain_path(name), p) for name, p in root.named_parameters()]
        self._trained = TrainedWeights(
            [(name, each) for name, each in parameters if each.requires_grad], self.settings
        )
        if not self._trained.weights:
            raise ConfigError(
                "no parameter of the model requires gradients, so zeroth order has nothing to "
                "train. Call model.requires_grad_(True), or add adapters.",
                key="zeroth-order-untrained",
            )
        transport = transport or transport_for(self.device)
        self.store = pool_for(host_memory_gib, transport, self.device)
        """Host memory of the blocks."""
        self.blocks = blocks_of(root, found, num_resident, self._trained)
        """What visits the device: the weights of each layer that is on the host."""
        link = LinkContext(transport, self.store, None)
        self.visits = WeightVisits(self.blocks, self._trained, link, self.device)
        """Has the blocks on the device as modules read their weights."""
        self._model = weakref.ref(root)
        self._memory: list[torch.Tensor] = []
        self._readers = WeightReaders(self.visits.streams, self.device)
        self._compute_device = ComputeDevice(self.device)
        self._is_open = True
        self._losses: tuple[list[float], ...] = ()
        """By micro-batch of the step that runs, those of both passes."""
        self.num_skipped_steps = 0
        """Steps whose losses were not finite: they have changed nothing."""
        try:
            self._put_on(root, {id(layer) for _, layer in found})
            self.head_loss = install_head_loss(root, head_loss, without_gradients=True)
            """What computes the loss in chunks, and says why where it does not."""
        except BaseException:
            self._take_off()
            raise

    def _put_on(self, model: nn.Module, layers: set[int]) -> None:
        """Move layers to the host and the rest to the device, and have modules read them there."""
        for block in self.blocks:
            self._memory.append(reserve(self.store, block))
            block.move_to(self._memory[-1])
        for weight in self._trained.weights if self.settings.momentum else ():
            if not self.visits.streams(weight.ref()):
                state = torch.zeros(weight.num_elements, device=self.device)
                self._trained.give_state(weight, state)
        move_others(model, self.visits.streams, self.device)
        self._readers.put_on(model, self._is_read, lambda _: self.visits)
        self._compute_device.put_on(model)
        for module in model.modules():
            has_forward = type(module).forward is not nn.Module.forward
            if id(module) in layers:
                self._readers.exchange(module, _KEY, Around(self._layer))
            elif has_forward and any(map(self._is_read, module.parameters())):
                self._readers.exchange(module, _KEY, Around(self._forward))
        for name in _FILES:
            self._readers.exchange(model, f"{_KEY}_{name}", Around(self._flushed), name)

    def _is_read(self, parameter: object) -> bool:
        return self.visits.streams(parameter) or self._trained.of(parameter) is not None

    def _forward(self, own: Callable[[], Any]) -> Any:
        """Run the forward of a module; outside of a step (evaluation) it reads updated weights."""
        if self.visits.sign is not None:
            return own()
        with torch.no_grad(), self.visits.in_use:
            self.visits.begin_forward()
            with self.visits.reading(0):
                return own()

    def _layer(self, own: Callable[[], Any]) -> Any:
        """Run the forward of a layer, and let go of its weights."""
        result = self._forward(own)
        if self.visits.sign is not None:
            self.visits.end_layer()
        return result

    def _flushed(self, own: Callable[[], Any]) -> Any:
        self.visits.flush()
        return own()

    def _take_off(self) -> None:
        """Undo :meth:`_put_on`, wholly or in part done."""
        self._readers.take_off()
        self._compute_device.take_off()
        self.visits.stop()
        for block in self.blocks:
            block.masters.move_back()
        for memory in self._memory:
            self.store.return_reserved(memory)
        self._memory = []

    # ---- steps ---------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Steps that were made."""
        return self._trained.num_steps

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
        if not any(each is self._model() for each in model.modules()):
            raise ConfigError(
                f"model is a {type(model).__name__} that does not have the model of this "
                "ZerothOrder: its weights would not be perturbed. Give the model that it was made "
                "for, or what wraps it.",
                key="wrong-argument",
            )
        if not self.visits.in_use.acquire(blocking=False):
            raise ConflictError(
                "a step of zeroth order runs on another thread. Make steps and other forwards one "
                "after the other.",
                key="zeroth-order-threads",
            )
        try:
            losses = self._passes(model, loss_fn)
        finally:
            self.visits.in_use.release()
            self.visits.end_pass()
        self._losses = (*self._losses, losses)
        return torch.tensor((losses[0] + losses[1]) / 2, device=self.device)

    def _passes(self, model: nn.Module, loss_fn: Callable[[nn.Module], Any]) -> list[float]:
        """Run the passes one after the other, all with the same random numbers; see the page.

        The generators are left where the first pass leaves them.
        """
        own = process_rank()
        if own.num_ranks > 1:
            _share_generators(self.device)
        start = end = RandomState([self.device])
        found: list[torch.Tensor] = []
        for sign in _SIGNS if own.num_ranks == 1 else (_SIGNS[own.rank],):
            start.restore()
            self.visits.begin_forward()
            with torch.no_grad(), self.visits.reading(sign):
                found.append(_checked(loss_fn(model)))
            end = end if len(found) > 1 else start.now()
        end.restore()
        losses: list[Any] = [float(each) for each in found]
        if own.num_ranks > 1:
            losses *= own.num_ranks
            torch.distributed.all_gather_object(losses, losses[0])
        return losses

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
        gradient: float = (plus - minus) / (2.0 * self.settings.epsilon)
        self._losses = ()
        is_finite = math.isfinite(gradient) and math.isfinite(learning_rate)
        if not is_finite:
            self.num_skipped_steps += 1
            what = f"losses {plus!r} and {minus!r}, and the learning rate {learning_rate!r}"
            warn(
                logger,
                "zeroth-order-loss",
                "step %d of zeroth order has the %s: the weights stay as they are.",
                self.num_steps,
                what,
            )
        self.visits.end_step(learning_rate, gradient if is_finite else None)
        return gradient

    def drop_step(self) -> None:
        """Forget the micro-batches since the last step's end, as after one that has failed."""
        self._losses = ()

    # ---- weights -------------------------------------------------------------------------------

    def flush(self) -> None:
        """Have all weights updated by all steps, before they are saved or looked at."""
        self._check_open()
        self.visits.flush()

    def close(self) -> None:
        """Update all weights, and give the model its plain weights back. Idempotent.

        Layers that came from the host stay there; those that came from the device go back.
        """
        if not self._is_open:
            return
        self._check_open()
        try:
            self.visits.flush()
        finally:
            self.head_loss.uninstall()
            self._take_off()
            self._is_open = False  # last: an interrupted call can be made again

    def __enter__(self) -> ZerothOrder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def figures(self) -> dict[str, Any]:
        """Return what the copies came to: uploads, copies back, bytes, times in ms."""
        return self.visits.figures()

    def state_dict(self) -> dict[str, Any]:
        """Return what a run goes on from, beside the weights. All weights are updated first."""
        self.flush()
        return {
            "num_steps": self.num_steps,
            "seed": self.settings.seed,
            "epsilon": self.settings.epsilon,
            "transfer_dtype": self.settings.transfer_dtype,
            "momentum": {
                each.name: each.state.cpu().clone()
                for each in self._trained.weights
                if each.state is not None
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from *state*; the model has the weights of that moment.

        Raises:
            ConfigError: what the noise depends on differs.
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
        for weight in self._trained.weights:
            if weight.state is not None:
                weight.state.copy_(state["momentum"].get(weight.name, torch.zeros(())))
        self._losses = ()
        self._trained.start_at(state["num_steps"])
        self.visits.forget_all()

    def _check_open(self) -> None:
        found = "was closed. Make another one for the model" if not self._is_open else ""
        if self.visits.sign is not None:
            found = "is in use by a forward of its model. Call it after the step"
        if found:
            raise ConflictError(f"this ZerothOrder {found}.", key="wrong-argument")


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


def _checked(loss: Any) -> torch.Tensor:
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    what = f"a tensor of shape {tuple(loss.shape)}" if hasattr(loss, "shape") else type(loss)
    raise ConfigError(
        f"loss_fn has returned {what}; expected a tensor with one number.", key="wrong-argument"
    )


def _share_generators(device: torch.device) -> None:
    """Let torch's generators of both ranks have the state of rank 0: both passes draw the same."""
    generators: list[tuple[Any, tuple[Any, ...]]] = [(torch, ())]
    if device.type != "cpu":
        generators.append((torch.get_device_module(device), (device,)))
    states = [module.get_rng_state(*place) for module, place in generators]
    torch.distributed.broadcast_object_list(states, src=0)
    for (module, place), state in zip(generators, states, strict=True):
        module.set_rng_state(state, *place)

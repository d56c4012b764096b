"""Several models on one link: the window has one owner, whoever came first."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

from hf_pyao import Offloader, PyAOConfig, attach
from hf_pyao.errors import ConfigError
from hf_pyao.plan.options.plan_request import PlanRequest
from tests.engine.transfer.test_run_ahead import SLOT_BYTES, FarAhead, batch, stack
from tests.helpers import EVERY_LAYER, gradients_of
from tests.helpers.simulation.transport import SimulatedTransport

WINDOW = 4 * SLOT_BYTES
CONFIG = replace(EVERY_LAYER, window=WINDOW)


def attached(exits: ExitStack, num_models: int, transport: FarAhead | SimulatedTransport) -> list:
    """Attach *num_models* models to one link; return them and their offloaders."""
    found: list[tuple[torch.nn.Module, Offloader]] = []
    for _ in range(num_models):
        how = {"link": found[0][1].link} if found else {"transport": transport}
        model = stack(4)
        found.append((model, exits.enter_context(attach(model, CONFIG, **how))))
    return found


def run_all(found: list, seed: int = 0) -> None:
    x = batch(seed)
    for model, _ in found:
        x = model(x)
    x.sum().backward()


@pytest.mark.parametrize("num_models", [2, 3])
def test_several_models_keep_within_one_window(num_models: int) -> None:
    transport = FarAhead()
    with ExitStack() as exits:
        found = attached(exits, num_models, transport)
        for _, offloader in found:
            offloader.engine.observe_too(transport)
        for seed in range(2):
            run_all(found, seed)
        assert transport.num_ahead > 4 * num_models
        assert transport.most_bytes < WINDOW
        assert transport.freed_early == []


@pytest.mark.parametrize("num_models", [2, 3])
def test_gradients_are_right_whoever_tightens(num_models: int) -> None:
    transport = SimulatedTransport(0)
    plain = [stack(4) for _ in range(num_models)]
    run_all([(model, None) for model in plain])
    with ExitStack() as exits:
        found = attached(exits, num_models, transport)
        found[-1][1].engine.link.set_limit(0)
        run_all(found)
    transport.finish()
    assert transport.violations == []
    for ours, (model, _) in zip(plain, found, strict=True):
        expected = gradients_of(ours)
        for name, gradient in gradients_of(model).items():
            assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("who", [0, 1, 2])
def test_where_one_waits_for_every_copy_all_do(who: int) -> None:
    """They have one device: what one of them may not hold, another may not either."""
    transport = FarAhead()
    with ExitStack() as exits:
        found = attached(exits, 3, transport)
        for _, offloader in found:
            offloader.engine.observe_too(transport)
        found[who][1].engine.link.set_limit(0)
        run_all(found)
        assert transport.num_ahead == 0
        assert transport.num_on_demand > 0
        assert transport.most_bytes == 0


@pytest.mark.parametrize("who", [0, 1, 2])
def test_no_one_of_several_sets_the_window(who: int) -> None:
    with ExitStack() as exits:
        found = attached(exits, 3, FarAhead())
        with pytest.raises(ConfigError, match="3 models share the link"):
            found[who][1].engine.link.set_window(SLOT_BYTES)
        assert found[0][1].link.limit_bytes == WINDOW


def test_more_models_come_to_a_window_that_the_first_has_changed() -> None:
    """They were configured alike; what the first one's plan has come to goes on to hold."""
    with attach(stack(4), CONFIG, transport=FarAhead()) as one:
        one.engine.link.set_window(SLOT_BYTES)
        with attach(stack(4), CONFIG, link=one.link) as two:
            with attach(stack(4), CONFIG, link=one.link) as three:
                assert two.link.limit_bytes == three.link.limit_bytes == SLOT_BYTES
            with pytest.raises(ConfigError, match=f"expected the window .* {WINDOW}. Give both"):
                attach(stack(4), replace(CONFIG, window=SLOT_BYTES), link=one.link)
        one.engine.link.set_window(2 * SLOT_BYTES)  # alone again
        assert one.link.limit_bytes == 2 * SLOT_BYTES


def test_after_the_last_model_the_window_is_as_configured() -> None:
    with attach(stack(4), CONFIG, transport=FarAhead()) as one:
        one.engine.link.set_limit(0)
        assert one.link.limit_bytes == 0
    with attach(stack(4), CONFIG, link=one.link) as other:
        assert other.link.limit_bytes == WINDOW


def test_plans_of_the_first_learn_of_the_others() -> None:
    """What binds a plan is asked for when it is made: models come and go."""
    with attach(stack(4), CONFIG, transport=FarAhead()) as one:
        request = PlanRequest.of_config(PyAOConfig(), window=one.link)
        assert request.may_set_window
        one.engine.link.set_window(SLOT_BYTES)
        assert request.window_now_bytes == request.window_bytes, "it may be set to that"
        with attach(stack(4), CONFIG, link=one.link):
            assert not request.may_set_window
            assert request.window_now_bytes == SLOT_BYTES
        assert request.may_set_window
    given = PlanRequest.of_config(PyAOConfig(window=WINDOW), window=one.link)
    assert not given.may_set_window

"""What the doctor concludes from a machine, and how it looks at one."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from typing import Any

import pytest

from hf_pyao.plan.hardware.device_speed import DeviceSpeed
from hf_pyao.tools.bench.doctor import Finding, Machine, examine, render, report_of
from hf_pyao.tools.bench.doctor_verdict import hardware_of, verdict_on

GIB = 2**30
GOOD = Machine(
    device={"name": "Some GPU", "memory_gib": 12.0, "driver": "580.1"},
    link={
        "d2h_gib_per_s": 24.0,
        "h2d_gib_per_s": 25.0,
        "both_gib_per_s": 45.0,
        "d2h_pageable_gib_per_s": 6.0,
    },
    has_mps=False,
    device_node=0,
    device_cores=frozenset(range(8)),
    own_cores=frozenset(range(8)),
    locked_bytes=None,
    available_bytes=64 * GIB,
)


def _findings(**changes: Any) -> dict[str, Finding]:
    machine = dataclasses.replace(GOOD, **changes)
    return {finding.name: finding for finding in examine(machine)}


@pytest.mark.parametrize(
    ("changes", "name", "advice"),
    [
        ({"link": {**GOOD.link, "h2d_gib_per_s": 3.0}}, "link, to the host", "moves 3.0 GiB/s"),
        ({"available_bytes": 2 * GIB}, "host memory available", "Little host memory is left"),
        (
            {"locked_bytes": 8 * 2**20},
            "locked memory (ulimit -l)",
            "At most 0.01 GiB may be locked",
        ),
        (
            {"device_node": 1, "own_cores": frozenset(range(8, 16))},
            "NUMA node of the device",
            "numactl --cpunodebind=1 --preferred=1",
        ),
    ],
)
def test_what_is_wrong_is_said_with_the_remedy(
    changes: dict[str, Any], name: str, advice: str
) -> None:
    assert advice in _findings(**changes)[name].advice
    assert advice not in str(_findings()), "it would be said of a good machine too"


def test_some_near_cores_are_enough() -> None:
    """The pool moves to one of them to reserve its memory."""
    findings = _findings(own_cores=frozenset(range(4, 16)))
    assert findings["NUMA node of the device"].advice == ""


def test_one_engine_for_both_directions_is_seen() -> None:
    value = _findings(link={**GOOD.link, "both_gib_per_s": 26.0})["link, both at once"].value
    assert "share one engine" in value
    assert "share" not in _findings()["link, both at once"].value


@pytest.mark.parametrize(("has_mps", "advice"), [(False, "no memory is saved"), (True, "refuses")])
def test_without_a_device_it_says_what_that_means(has_mps: bool, advice: str) -> None:
    device = {"name": "CPU", "memory_gib": None}
    findings = _findings(device=device, link={}, has_mps=has_mps, locked_bytes=0)
    assert advice in findings["device"].advice
    assert not any(name.startswith(("link", "window")) for name in findings)
    assert findings["locked memory (ulimit -l)"].advice == "", "nothing is pinned there"


def test_old_and_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        found = {"torch": "2.13.1+cpu", "transformers": "4.57.0", "trl": "9.0.0.dev1"}
        if name not in found:
            raise importlib.metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    findings = _findings()
    assert findings["torch"] == Finding("torch", "2.13.1+cpu, tested")
    assert findings["transformers"].value == "4.57.0, older than tested"
    assert "4.57.0 is older" in findings["transformers"].advice
    assert "Install accelerate" in findings["accelerate"].advice
    assert findings["trl"].value.startswith("9.0.0.dev1, newer than tested (")
    assert "peft" not in findings, "nobody needs it"


def test_a_verdict_takes_the_speeds_that_were_measured() -> None:
    machine = dataclasses.replace(GOOD, speed=DeviceSpeed(tflop_per_s=50.0, memory_gib_per_s=400.0))
    hardware = hardware_of(machine)
    assert hardware is not None
    assert (hardware.memory_gib, hardware.device.tflop_per_s) == (12.0, 50.0)
    assert hardware.context_gib == 0.0
    machine = dataclasses.replace(machine, device={**GOOD.device, "context_gib": 0.4})
    measured = hardware_of(machine)
    assert measured is not None
    assert measured.context_gib == 0.4
    assert (hardware.link.d2h_gib_per_s, hardware.link.copy_engines) == (24.0, 2)
    assert hardware_of(GOOD) is None  # without its own speed


@pytest.mark.thorough
def test_it_ends_with_the_fastest_way_to_train_on_this_machine() -> None:
    """A machine with a fast device behind a slow link checkpoints; behind a fast one it offloads."""
    model = "opt:hidden_size=256,word_embed_proj_dim=256,ffn_dim=1024,num_attention_heads=4"
    model += ",num_hidden_layers=6,vocab_size=512"
    speed = DeviceSpeed(tflop_per_s=50.0, memory_gib_per_s=400.0)
    fast = {"d2h_gib_per_s": 400.0, "h2d_gib_per_s": 400.0, "both_gib_per_s": 800.0}
    slow = {"d2h_gib_per_s": 1.0, "h2d_gib_per_s": 1.0, "both_gib_per_s": 1.0}
    words = {}
    for name, link in (("fast", fast), ("slow", slow)):
        device = {"name": "Some GPU", "memory_gib": 0.5}
        machine = dataclasses.replace(GOOD, device=device, link=link, speed=speed)
        hardware = hardware_of(machine)
        assert hardware is not None
        assert hardware.link.copy_engines == (2 if name == "fast" else 1)
        words[name] = verdict_on(machine, model, sequence_length=128).words
        text = render(examine(machine), words[name])
        assert text.endswith(words[name])
    assert "about equally fast" in words["fast"] and "Checkpointing is" not in words["fast"]
    assert "Checkpointing is" in words["slow"]
    report = report_of(GOOD, examine(GOOD), words["fast"])
    assert report.facts["verdict"] == words["fast"]


def test_without_an_accelerator_there_is_no_verdict_on_speed() -> None:
    machine = dataclasses.replace(GOOD, device={"name": "CPU", "memory_gib": None}, link={})
    assert "pyao estimate --model opt:1.3b --device" in verdict_on(machine, "opt:1.3b").words

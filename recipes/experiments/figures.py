"""PyAO's figures and tables on memory, as experiments."""

from __future__ import annotations

from experiments import memory
from experiments.measured import bench_rows, held_rows, methods_of_all
from experiments.rows import Result
from experiments.runner import Experiment, Mode, Options, is_not_built

MICRO_BATCHES = (1, 2, 4, 8)
COUNTED = (
    "small models in float32 on a CPU: bytes are exact, and no device memory is measured",
    "policy 'all' in the place of 'pyao': the rule has no device to time",
)
MEASURED = (
    "one device, one process: gradients are let go as they are complete, and AdamW is left out",
)


def _held(figure: str) -> Mode:
    def run(options: Options) -> Result:
        return Result(rows=list(held_rows(options, figure, MICRO_BATCHES)), assumptions=COUNTED)

    return run


def _measured(figure: str) -> Mode:
    def run(options: Options) -> Result:
        rows = bench_rows(options, figure, MICRO_BATCHES, methods_of_all())
        return Result(rows=list(rows), assumptions=MEASURED)

    return run


FIGURE_1 = Experiment(
    name="figure1",
    title="PyAO Figure 1: activations' share of device memory under ZeRO-2",
    predict=memory.predict_shares,
    miniature=is_not_built("miniature", "Figure 4's counts what autograd holds"),
    real=_measured("Figure 1"),
    section=memory.figure_1_section,
    plot=memory.plot_shares,
)
FIGURE_4 = Experiment(
    name="figure4",
    title="PyAO Figure 4: peak device memory by micro-batch",
    predict=memory.predict_device,
    miniature=_held("Figure 4"),
    real=_measured("Figure 4"),
    section=memory.figure_4_section,
    plot=memory.plot_peaks,
)
FIGURE_5 = Experiment(
    name="figure5",
    title="PyAO Figure 5 and Table 1: peak host memory by micro-batch, and its components",
    predict=memory.predict_host,
    miniature=is_not_built("miniature", "Figure 4's counts what leaves for the host"),
    real=_measured("Figure 5"),
    section=memory.figure_5_section,
    plot=memory.plot_host,
)

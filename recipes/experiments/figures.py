"""PyAO's figures and tables that one device has, as experiments."""

from __future__ import annotations

from experiments import memory, memory_page, overheads, throughput
from experiments.experiment import Experiment, Mode, Options, need_accelerator
from experiments.measured import bench_rows, held_rows, host_rows, method_of, methods_of_all
from experiments.rows import Result
from hf_pyao.errors import ConfigError

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


def _host(options: Options) -> Result:
    return Result(
        rows=list(host_rows(options, "Figure 5", MICRO_BATCHES)),
        assumptions=[
            *COUNTED,
            "float32 weights and AdamW's states: of a fifth of the parameters, after a real step "
            "of torch's AdamW; activations: the host pool's peak; the process and its libraries "
            "are not counted",
        ],
    )


def _measured(figure: str) -> Mode:
    def run(options: Options) -> Result:
        rows = bench_rows(options, figure, MICRO_BATCHES, methods_of_all())
        return Result(rows=list(rows), assumptions=MEASURED)

    return run


def _table_2(options: Options) -> Result:
    methods = {system.name: method_of(system) for system in overheads.COMPARED[:-1]}
    rows = bench_rows(options, "Table 2", (4,), methods)
    return Result(rows=list(rows), assumptions=MEASURED)


def _table_3(options: Options) -> Result:
    methods = {
        "one stream": "pyao-single-stream",
        "two streams": "pyao-one-copy-stream",
        "a stream each way": "pyao-window",
    }
    return Result(rows=list(bench_rows(options, "Table 3", (4,), methods)), assumptions=MEASURED)


def _profile(options: Options) -> Result:
    need_accelerator("an accelerator; `pyao profile` times sub-modules on one")
    raise ConfigError(
        "--real of Figure 2 is `pyao profile --model gpt2:0.8b --micro-batch 3`, whose report has "
        "the activation throughput of each sub-module."
    )


FIGURE_1 = Experiment(
    name="figure1",
    title="PyAO Figure 1: activations' share of device memory under ZeRO-2",
    predict=memory.predict_shares,
    miniature="Figure 4's counts what autograd holds",
    real=_measured("Figure 1"),
    section=memory_page.figure_1_section,
    plot=memory_page.plot_shares,
)
FIGURE_4 = Experiment(
    name="figure4",
    title="PyAO Figure 4: peak device memory by micro-batch",
    predict=memory.predict_device,
    miniature=_held("Figure 4"),
    real=_measured("Figure 4"),
    section=memory_page.figure_4_section,
    plot=memory_page.plot_peaks,
)
FIGURE_5 = Experiment(
    name="figure5",
    title="PyAO Figure 5 and Table 1: peak host memory by micro-batch, and its components",
    predict=memory.predict_host,
    miniature=_host,
    real=_measured("Figure 5"),
    section=memory_page.figure_5_section,
    plot=memory_page.plot_host,
)
FIGURE_2 = Experiment(
    name="figure2",
    title="PyAO Figure 2: activation throughput by sub-module",
    predict=throughput.predict_throughput,
    miniature="a CPU has no device whose time could be taken",
    real=_profile,
    section=throughput.figure_2_section,
    plot=throughput.plot_throughput,
)
TABLE_2 = Experiment(
    name="table2",
    title="PyAO Table 2: offloading everything, and with selective recomputation",
    predict=overheads.predict_components,
    miniature="a CPU copies and computes on the same cores",
    real=_table_2,
    section=overheads.table_2_section,
    plot=overheads.plot_components,
)
TABLE_3 = Experiment(
    name="table3",
    title="PyAO Table 3: copies on the compute stream, and on one of their own",
    predict=overheads.predict_streams,
    miniature="a CPU has no streams",
    real=_table_3,
    section=overheads.table_3_section,
    plot=overheads.plot_streams,
)

"""All experiments, in the order of the page."""

from __future__ import annotations

from experiments import (
    hiding,
    hiding_page,
    memory,
    memory_page,
    modules,
    neurocache,
    neurocache_page,
    overheads,
    scaling,
    scaling_page,
    throughput,
    time_page,
    time_to_target,
    zeroth_order,
    zeroth_order_page,
)
from experiments.experiment import Experiment, Options, need_accelerator
from experiments.measured import (
    MICRO_BATCHES,
    benched,
    count_held,
    count_host,
    method_of,
    methods_of_all,
)
from experiments.rows import MINIATURE, PREDICT, Result
from hf_pyao.errors import ConfigError


def _profile(options: Options) -> Result:
    need_accelerator("an accelerator; `pyao profile` times sub-modules on one")
    raise ConfigError(
        "--real of Figure 2 is `pyao profile --model gpt2:0.8b --micro-batch 3`, whose report has "
        "the activation throughput of each sub-module."
    )


EXPERIMENTS = (
    Experiment(
        name="figure1",
        title="PyAO, Figure 1: what memory holds under ZeRO-2",
        predict=memory.predict_shares,
        miniature="Figure 4's counts what autograd holds",
        real=benched(MICRO_BATCHES, methods_of_all()),
        parts={PREDICT: memory_page.predicted_shares},
        plot=memory_page.plot_shares,
    ),
    Experiment(
        name="figure2",
        title="PyAO, Figure 2: activation throughput by sub-module",
        predict=throughput.predict_throughput,
        miniature="a CPU has no device whose time could be taken",
        real=_profile,
        parts={PREDICT: throughput.predicted_rates},
        plot=throughput.plot_throughput,
    ),
    Experiment(
        name="figure4",
        title="PyAO, Figure 4: peak device memory by micro-batch",
        predict=memory.predict_device,
        miniature=count_held,
        real=benched(MICRO_BATCHES, methods_of_all()),
        parts={PREDICT: memory_page.predicted_peaks, MINIATURE: memory_page.counted_peaks},
        plot=memory_page.plot_peaks,
    ),
    Experiment(
        name="figure5",
        title="PyAO, Figure 5 and Table 1: peak host memory, and its components",
        predict=memory.predict_host,
        miniature=count_host,
        real=benched(MICRO_BATCHES, methods_of_all()),
        parts={PREDICT: memory_page.predicted_host, MINIATURE: memory_page.counted_host},
        plot=memory_page.plot_host,
    ),
    Experiment(
        name="figure6",
        title="PyAO, Figure 6: time to 256 accumulated micro-batches",
        predict=time_to_target.predict_times,
        miniature=time_to_target.miniature_times,
        real=time_to_target.real_times,
        parts={PREDICT: time_page.predicted_times, MINIATURE: time_page.measured_times},
        plot=time_page.plot,
    ),
    Experiment(
        name="table2",
        title="PyAO, Table 2: offloading everything, and with selective recomputation",
        predict=overheads.predict_components,
        miniature="a CPU copies and computes on the same cores",
        real=benched((4,), {each.name: method_of(each) for each in overheads.COMPARED[:-1]}),
        parts={PREDICT: overheads.predicted_components},
        plot=overheads.plot_components,
    ),
    Experiment(
        name="table3",
        title="PyAO, Table 3: one stream and two",
        predict=overheads.predict_streams,
        miniature="a CPU has no streams",
        real=benched((4,), overheads.STREAM_METHODS),
        parts={PREDICT: overheads.predicted_streams},
        plot=overheads.plot_streams,
    ),
    Experiment(
        name="communication_grid",
        title="Where a larger micro-batch pays: the communication model",
        predict=scaling.predict_scaling,
        miniature=scaling.miniature_scaling,
        real="figure6 --real times steps over real links",
        parts={MINIATURE: scaling_page.calibrated, PREDICT: scaling_page.predicted_grid},
        introduction=scaling_page.INTRODUCTION,
        plot=scaling_page.plot,
    ),
    Experiment(
        name="neurocache_table1",
        title="NeuroCache, Table 1: four configurations",
        predict=neurocache.predict_table_1,
        miniature="neurocache_table2 sweeps, with the same rows",
        real=neurocache.real_table_2,
        parts={PREDICT: neurocache_page.predicted_table_1},
        plot=neurocache_page.plot_configurations,
    ),
    Experiment(
        name="neurocache_table2",
        title="NeuroCache, Table 2: the sweep over k",
        predict=neurocache.predict_table_2,
        miniature=neurocache.miniature_table_2,
        real=neurocache.real_table_2,
        parts={
            PREDICT: neurocache_page.predicted_table_2,
            MINIATURE: neurocache_page.measured_sweep,
        },
        plot=neurocache_page.plot_sweep,
    ),
    Experiment(
        name="neurocache_validation",
        title="NeuroCache, the 20-step validation",
        predict=neurocache.predict_validation,
        miniature=neurocache.miniature_validation,
        real=neurocache.real_validation,
        parts={
            PREDICT: neurocache_page.predicted_validation,
            MINIATURE: neurocache_page.measured_sweep,
        },
        plot=neurocache_page.plot_configurations,
    ),
    Experiment(
        name="megatron_modules",
        title="Megatron-Core: memory and throughput by offloaded module",
        predict=modules.predict_modules,
        miniature=modules.miniature_modules,
        real=benched(
            (modules.MEGATRON_BATCH,), modules.METHODS, ("forward and backward, one device",)
        ),
        parts={PREDICT: modules.predicted_modules, MINIATURE: modules.counted_modules},
        plot=modules.plot_modules,
    ),
    Experiment(
        name="inequality",
        title="The guide's inequality: where a transfer hides under compute",
        predict=hiding.predict_inequality,
        miniature="a CPU's copies and compute share its cores",
        real="`pyao doctor` measures the link, table2 --real the step",
        parts={PREDICT: hiding_page.predicted_inequality},
        plot=hiding_page.plot_inequality,
    ),
    Experiment(
        name="zeroth_order_overlap",
        title="ZO2, experiment 1: overlap of copies and compute",
        predict=zeroth_order.predict_overlap,
        miniature="a CPU copies and computes on the same cores",
        real="the board and `pyao doctor` measure a step and the link",
        parts={PREDICT: zeroth_order_page.predicted_overlap},
    ),
    Experiment(
        name="zeroth_order_compression",
        title="ZO2, experiment 2: the dtype of weights and transfers",
        predict=zeroth_order.predict_compression,
        miniature=zeroth_order.miniature_compression,
        real="the board measures a step in each dtype",
        parts={
            PREDICT: zeroth_order_page.predicted_compression,
            MINIATURE: zeroth_order_page.trained_compression,
        },
        plot=zeroth_order_page.plot_task,
    ),
    Experiment(
        name="zeroth_order_scaling",
        title="ZO2, experiment 3: memory and throughput over the model's size",
        predict=zeroth_order.predict_scaling,
        miniature="tests count the device's bytes of small models",
        real="the board measures memory and steps of one size",
        parts={PREDICT: zeroth_order_page.predicted_scaling},
        plot=zeroth_order_page.plot_scaling,
    ),
)

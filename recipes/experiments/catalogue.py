"""All experiments, in the order of the page."""

from __future__ import annotations

from experiments import (
    hiding,
    measured,
    memory,
    modules,
    neurocache,
    overheads,
    scaling,
    throughput,
    time_to_target,
    zeroth_order,
)
from experiments.communication import COUNTINGS
from experiments.experiment import Experiment
from experiments.plots import Plot, loss_curves
from experiments.rows import MINIATURE, PREDICT
from experiments.systems import MODELS, PYAO_INT8

BENCH = "`pyao bench --model opt:1.3b --dtype float16 --gradients release` measures it"
SWEEP = "`pyao sweep --model gpt2:... --checkpointing` measures it"
SMALL_SWEEP = "`pyao sweep --model gpt2:... --checkpointing --device cpu` sweeps small models"
MICRO_BATCH = "micro-batch"
OURS_AND_PAPERS = (
    ("{system}", "ours", "{value}"),
    ("{system}", "the paper's, MB", "{published}"),
)
BUDGETS = Plot(
    x_label="k, tensors that leave",
    y_label="memory, MiB",
    where={"{unit}": "MiB"},
    series=(
        ("{quantity}", "ours", "{system}", "{value}"),
        ("{quantity}", "the paper's, MB", "{system}", "{published}"),
    ),
)
CONFIGURATIONS = Plot(y_label="memory, MiB", where={"{unit}": "MiB"}, series=OURS_AND_PAPERS)

EXPERIMENTS = (
    Experiment(
        name="figure1",
        title="PyAO, Figure 1: what memory holds under ZeRO-2",
        predict=memory.predict_shares,
        miniature="Figure 4's counts what autograd holds",
        real=BENCH,
        plots={PREDICT: Plot(x_label=MICRO_BATCH, y_label="activations' share of the peak")},
    ),
    Experiment(
        name="figure2",
        title="PyAO, Figure 2: activation throughput by sub-module",
        predict=throughput.predict_throughput,
        miniature="a CPU has no device whose time could be taken",
        real="`pyao profile --model gpt2:0.8b --micro-batch 3` times sub-modules",
        plots={
            PREDICT: Plot(
                y_label="activation throughput, GB/s",
                where={"{model}": MODELS["gpt2"]},
                series=(("{system}", "{quantity}", "{value}"),),
            )
        },
    ),
    Experiment(
        name="figure4",
        title="PyAO, Figure 4: peak device memory by micro-batch",
        predict=memory.predict_device,
        miniature=measured.count_held,
        real=BENCH,
        plots={
            PREDICT: Plot(
                x_label=MICRO_BATCH, y_label="peak device memory, GB", where={"{unit}": "GB"}
            ),
            MINIATURE: Plot(x_label=MICRO_BATCH, y_label="held after forward, MB"),
        },
    ),
    Experiment(
        name="figure5",
        title="PyAO, Figure 5 and Table 1: peak host memory, and its components",
        predict=memory.predict_host,
        miniature=measured.count_host,
        real=BENCH,
        plots=dict.fromkeys(
            (PREDICT, MINIATURE), Plot(x_label=MICRO_BATCH, y_label="peak host memory, {unit}")
        ),
    ),
    Experiment(
        name="figure6",
        title="PyAO, Figure 6: time to 256 accumulated micro-batches",
        predict=time_to_target.predict_times,
        miniature=time_to_target.miniature_times,
        real="`recipes/train_opt.py` prints the time of a step, on five nodes too",
        plots={
            PREDICT: Plot(
                y_label=f"s to 256 micro-batches ({COUNTINGS[3].name})",
                where={
                    "{quantity}": time_to_target.SECONDS,
                    "{detail[counting]}": COUNTINGS[3].name,
                    "{detail[speed]}": "tensor cores",
                },
                series=(("{model}", "{system}", "{value}"),),
            ),
            MINIATURE: Plot(
                y_label="s to the target",
                series=(("{model}", "{system}, {micro_batch}", "{detail[target_s]}"),),
            ),
        },
    ),
    Experiment(
        name="table2",
        title="PyAO, Table 2: offloading everything, and with selective recomputation",
        predict=overheads.predict_components,
        miniature="a CPU copies and computes on the same cores",
        real=BENCH,
        plots={
            PREDICT: Plot(
                y_label="ms of a micro-batch",
                where={"{quantity}": "step"},
                series=(("{model}", "{system}", "{value}"),),
            )
        },
    ),
    Experiment(
        name="table3",
        title="PyAO, Table 3: one stream and two",
        predict=overheads.predict_streams,
        miniature="a CPU has no streams",
        real="`pyao bench --methods pyao-single-stream pyao-window` measures it",
        plots={
            PREDICT: Plot(
                y_label="ms of a micro-batch, int8",
                where={"{system}": PYAO_INT8.name},
                series=(
                    ("{model}", "one stream", "{detail[one_ms]}"),
                    ("{model}", "two streams", "{detail[two_ms]}"),
                ),
            )
        },
    ),
    Experiment(
        name="communication_grid",
        title="Where a larger micro-batch pays: the communication model",
        predict=scaling.predict_scaling,
        miniature="commit dca8bb21bb87 fits the model to what recipes/local_cluster.py measured",
        real="steps over real links are figure6's",
        plots={
            PREDICT: Plot(
                x_label="link, Gbit/s",
                y_label="times as fast as ZeRO-2 at micro-batch 4",
                where={"{detail[nodes]}": "5", "{detail[change]}": scaling.AS_IT_IS},
                series=(("{model}", "{system}", "{detail[gbit_per_s]}", "{value}"),),
                has_log_x=True,
            )
        },
    ),
    Experiment(
        name="neurocache_table1",
        title="NeuroCache, Table 1: four configurations",
        predict=neurocache.predict_table_1,
        miniature="neurocache_table2 sweeps, with the same rows",
        real=SWEEP,
        plots={PREDICT: CONFIGURATIONS},
    ),
    Experiment(
        name="neurocache_table2",
        title="NeuroCache, Table 2: the sweep over k",
        predict=neurocache.predict_table_2,
        miniature=SMALL_SWEEP,
        real=SWEEP,
        plots={PREDICT: BUDGETS},
    ),
    Experiment(
        name="neurocache_validation",
        title="NeuroCache, the 20-step validation",
        predict=neurocache.predict_validation,
        miniature=SMALL_SWEEP,
        real=SWEEP,
        plots={PREDICT: CONFIGURATIONS},
    ),
    Experiment(
        name="megatron_modules",
        title="Megatron-Core: memory and throughput by offloaded module",
        predict=modules.predict_modules,
        miniature=modules.miniature_modules,
        real="`pyao bench --methods none pyao:policy=modules,modules=mlp_act` measures it",
        plots={
            mode: Plot(
                y_label=f"{quantity} (1: all)",
                where={"{quantity}": quantity},
                series=(("{model}", "{system}", "{value}"),),
            )
            for mode, quantity in (
                (PREDICT, "throughput, less"),
                (MINIATURE, "held after forward, less"),
            )
        },
    ),
    Experiment(
        name="inequality",
        title="The guide's inequality: where a transfer hides under compute",
        predict=hiding.predict_inequality,
        miniature="a CPU's copies and compute share its cores",
        real="`pyao doctor` measures the link, `pyao bench` the step",
        plots={
            PREDICT: Plot(
                x_label="link, GB/s each way",
                y_label="step over keeping all",
                where={"{quantity:.9}": "step with"},
                series=(("{model}", "{system}", "{detail[link_gb_per_s]}", "{value}"),),
                has_log_x=True,
            )
        },
    ),
    Experiment(
        name="zeroth_order_overlap",
        title="ZO2, experiment 1: overlap of copies and compute",
        predict=zeroth_order.predict_overlap,
        miniature="a CPU copies and computes on the same cores",
        real="the board and `pyao doctor` measure a step and the link",
    ),
    Experiment(
        name="zeroth_order_compression",
        title="ZO2, experiment 2: the dtype of weights and transfers",
        predict=zeroth_order.predict_compression,
        miniature=zeroth_order.miniature_compression,
        real="the board measures a step in each dtype",
        plots={
            PREDICT: Plot(
                y_label="ms of a step at 6.25 GB/s",
                where={"{quantity}": "step at 6.25 GB/s"},
                series=(("{model}", "{system}", "{value}"),),
            ),
            MINIATURE: loss_curves,
        },
    ),
    Experiment(
        name="zeroth_order_scaling",
        title="ZO2, experiment 3: memory and throughput over the model's size",
        predict=zeroth_order.predict_scaling,
        miniature="tests count the device's bytes of small models",
        real="the board measures memory and steps of one size",
        plots={
            PREDICT: Plot(
                y_label="device memory, GB",
                where={"{quantity}": "device memory"},
                series=(
                    ("{model}", "ours", "{value}"),
                    ("{model}", "published", "{published}"),
                ),
            )
        },
    ),
)

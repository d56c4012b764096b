"""All experiments, in the order of the page."""

from __future__ import annotations

from experiments import (
    hiding,
    hiding_page,
    modules,
    neurocache,
    neurocache_page,
    scaling,
    scaling_page,
    time_page,
    time_to_target,
    zeroth_order,
    zeroth_order_page,
)
from experiments.experiment import Experiment
from experiments.figures import FIGURE_1, FIGURE_2, FIGURE_4, FIGURE_5, TABLE_2, TABLE_3

FIGURE_6 = Experiment(
    name="figure6",
    title="PyAO Figure 6: time to 256 accumulated micro-batches on five nodes over 1 Gbit/s",
    predict=time_to_target.predict_times,
    miniature=time_to_target.miniature_times,
    real=time_to_target.real_times,
    section=time_page.section,
    plot=time_page.plot,
)
NEUROCACHE_1 = Experiment(
    name="neurocache_table1",
    title="NeuroCache Table 1: four configurations",
    predict=neurocache.predict_table_1,
    miniature="neurocache_table2 sweeps, with the same rows",
    real=neurocache.real_table_2,
    section=neurocache_page.table_1_section,
    plot=neurocache_page.plot_configurations,
)
NEUROCACHE_2 = Experiment(
    name="neurocache_table2",
    title="NeuroCache Table 2: memory, throughput and pack time over the budget k",
    predict=neurocache.predict_table_2,
    miniature=neurocache.miniature_table_2,
    real=neurocache.real_table_2,
    section=neurocache_page.table_2_section,
    plot=neurocache_page.plot_sweep,
)
NEUROCACHE_20 = Experiment(
    name="neurocache_validation",
    title="NeuroCache's 20-step validation over five seeds",
    predict=neurocache.predict_validation,
    miniature=neurocache.miniature_validation,
    real=neurocache.real_validation,
    section=neurocache_page.validation_section,
    plot=neurocache_page.plot_configurations,
)
INEQUALITY = Experiment(
    name="inequality",
    title="The guide's inequality: where a transfer hides under compute",
    predict=hiding.predict_inequality,
    miniature="a CPU's copies and compute share its cores",
    real="`pyao doctor` measures the link, table2 --real the step",
    section=hiding_page.inequality_section,
    plot=hiding_page.plot_inequality,
)
MEGATRON = Experiment(
    name="megatron_modules",
    title="Megatron-Core: memory and throughput by offloaded module",
    predict=modules.predict_modules,
    miniature=modules.miniature_modules,
    real=modules.real_modules,
    section=modules.modules_section,
    plot=modules.plot_modules,
)
COMMUNICATION = Experiment(
    name="communication_grid",
    title="The communication model: where a larger micro-batch pays",
    predict=scaling.predict_scaling,
    miniature=scaling.miniature_scaling,
    real="figure6 --real times steps over real links",
    section=scaling_page.section,
    plot=scaling_page.plot,
)
ZEROTH_ORDER_OVERLAP = Experiment(
    name="zeroth_order_overlap",
    title="ZO2, experiment 1: overlap of copies and compute",
    predict=zeroth_order.predict_overlap,
    miniature="a CPU copies and computes on the same cores",
    real="the board and `pyao doctor` measure a step and the link",
    section=zeroth_order_page.overlap_section,
)
ZEROTH_ORDER_COMPRESSION = Experiment(
    name="zeroth_order_compression",
    title="ZO2, experiment 2: the dtype of weights and transfers",
    predict=zeroth_order.predict_compression,
    miniature=zeroth_order.miniature_compression,
    real="the board measures a step in each dtype",
    section=zeroth_order_page.compression_section,
    plot=zeroth_order_page.plot_task,
)
ZEROTH_ORDER_SCALING = Experiment(
    name="zeroth_order_scaling",
    title="ZO2, experiment 3: memory and throughput over the model's size",
    predict=zeroth_order.predict_scaling,
    miniature="tests count the device's bytes of small models",
    real="the board measures memory and steps of one size",
    section=zeroth_order_page.scaling_section,
    plot=zeroth_order_page.plot_scaling,
)

EXPERIMENTS = (
    FIGURE_1,
    FIGURE_2,
    FIGURE_4,
    FIGURE_5,
    FIGURE_6,
    TABLE_2,
    TABLE_3,
    COMMUNICATION,
    NEUROCACHE_1,
    NEUROCACHE_2,
    NEUROCACHE_20,
    MEGATRON,
    INEQUALITY,
    ZEROTH_ORDER_OVERLAP,
    ZEROTH_ORDER_COMPRESSION,
    ZEROTH_ORDER_SCALING,
)

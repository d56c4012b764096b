"""All experiments, in the order of the page."""

from __future__ import annotations

from experiments import hiding, neurocache, scaling
from experiments.figures import FIGURE_1, FIGURE_2, FIGURE_4, FIGURE_5, TABLE_2, TABLE_3
from experiments.runner import Experiment, is_not_built
from experiments.time_to_target import FIGURE_6

NEUROCACHE_1 = Experiment(
    name="neurocache_table1",
    title="NeuroCache Table 1: four configurations",
    predict=neurocache.predict_table_1,
    miniature=is_not_built("miniature", "neurocache_table2.py sweeps, with the same rows"),
    real=neurocache.real_table_2,
    section=neurocache.table_1_section,
)
NEUROCACHE_2 = Experiment(
    name="neurocache_table2",
    title="NeuroCache Table 2: memory, throughput and pack time over the budget k",
    predict=neurocache.predict_table_2,
    miniature=neurocache.miniature_table_2,
    real=neurocache.real_table_2,
    section=neurocache.table_2_section,
    plot=neurocache.plot_sweep,
)
NEUROCACHE_20 = Experiment(
    name="neurocache_validation",
    title="NeuroCache's 20-step validation over five seeds",
    predict=neurocache.predict_validation,
    miniature=neurocache.miniature_validation,
    real=neurocache.real_validation,
    section=neurocache.validation_section,
)
INEQUALITY = Experiment(
    name="inequality",
    title="The guide's inequality: where a transfer hides under compute",
    predict=hiding.predict_inequality,
    miniature=is_not_built("miniature", "a CPU's copies and compute share its cores"),
    real=is_not_built("real", "`pyao doctor` measures the link, table2.py --real the step"),
    section=hiding.inequality_section,
    plot=hiding.plot_inequality,
)
MEGATRON = Experiment(
    name="megatron_modules",
    title="Megatron-Core: memory and throughput by offloaded module",
    predict=hiding.predict_modules,
    miniature=is_not_built("miniature", "a CPU's copies and compute share its cores"),
    real=hiding.real_modules,
    section=hiding.modules_section,
    plot=hiding.plot_modules,
)
COMMUNICATION = Experiment(
    name="communication_grid",
    title="The communication model: where a larger micro-batch pays",
    predict=scaling.predict_scaling,
    miniature=scaling.miniature_scaling,
    real=is_not_built("real", "figure6.py --real times steps over real links"),
    section=scaling.section,
    plot=scaling.plot,
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
)

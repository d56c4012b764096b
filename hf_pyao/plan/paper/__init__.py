"""Rules of the PyAO paper: outliers of throughput, sweeps over budgets and their knee."""

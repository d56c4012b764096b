"""Several nodes that are one machine: for `local_cluster.py`."""

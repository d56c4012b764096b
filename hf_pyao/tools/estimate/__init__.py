"""Answers before a GPU is rented: what a training step of a model would take, on which card.

``model_sizes`` (shapes), ``fake_step`` (one step on fake tensors, no memory), ``recorded_step``
(the same as a program of plain numbers, of as few layers as will do). The arithmetic is in
``hf_pyao/plan/``, the judge of it in ``tests/helpers/simulation/``.
"""

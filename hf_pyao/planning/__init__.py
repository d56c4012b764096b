"""Decides what becomes of saved tensors, from numbers: a step, a device, a link.

In reading order: ``step_program`` (a step as numbers), ``step_recorder`` (records one),
``stretch`` (of four layers, of many), ``scaling`` (at other sizes), ``copy_lanes`` and ``predict``
(time and peak of a plan), ``peak_cause`` (what sets the peak), ``activation_throughput`` and
``iqr`` (PyAO's rule), ``plan`` (a plan as a document, and the policy that follows it), ``budget``.

Programs, predictions and rules are arithmetic: no device, no tensor. No code is shared with
``simulation``, which judges the predictions; only the table of costs in ``hardware``.
"""

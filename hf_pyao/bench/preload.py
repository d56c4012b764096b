"""Imported once by the server that measuring processes are forked from. Touches no device."""

import gc

import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama
import transformers.models.opt.modeling_opt  # noqa: F401

import hf_pyao.bench.worker
import hf_pyao.integrations.attach  # noqa: F401

# What was imported lives on in every fork: a collector that walks it writes to shared pages, and
# takes longer than a small step.
gc.freeze()

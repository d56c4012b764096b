"""From hidden states to the loss without the logits, in chunks of tokens.

Imports only torch and ``hf_pyao.errors``; what is known about transformers' models is in
``hf_pyao/model/head/head_loss.py``. The facts (bounds, the chunk rule, losing rows) are in
``hf_pyao/model/head/HEAD_LOSS.md``.
"""

"""From hidden states to the loss without the logits, in chunks of tokens.

Imports only torch and ``hf_pyao.errors``; what is known about transformers' models is in
``hf_pyao/model/head/head_loss.py``. The facts (bounds, the chunk rule, losing rows) are in
``hf_pyao/model/head/HEAD_LOSS.md``.
"""

from hf_pyao.model.losses.chunking import ChunkPlan as ChunkPlan
from hf_pyao.model.losses.chunking import choose_chunk_tokens as choose_chunk_tokens
from hf_pyao.model.losses.cross_entropy import (
    chunked_linear_cross_entropy as chunked_linear_cross_entropy,
)
from hf_pyao.model.losses.through_module import (
    chunked_module_cross_entropy as chunked_module_cross_entropy,
)
from hf_pyao.model.losses.transforms import Cast as Cast
from hf_pyao.model.losses.transforms import Divide as Divide
from hf_pyao.model.losses.transforms import LogitTransform as LogitTransform
from hf_pyao.model.losses.transforms import Scale as Scale
from hf_pyao.model.losses.transforms import Tanh as Tanh
from hf_pyao.model.losses.transforms import softcap as softcap

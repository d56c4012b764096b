"""Imported once by the server that measuring processes are forked from. Touches no device.

What cannot be imported is passed over: the server must not die of it, and each process that needs
it meets the same error, and says so.
"""

import atexit
import gc
import signal

from hf_pyao.tools.packages import import_failure

# Ctrl-C on a terminal goes to the server and its forks too: they end without a word.
signal.signal(signal.SIGINT, signal.SIG_DFL)

for name in (
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.opt.modeling_opt",
    "hf_pyao.tools.bench.worker",
    "hf_pyao.attachment",
):
    import_failure(name)

# What was imported lives on in every fork: a collector that walks it writes to shared pages, and
# takes longer than a small step. When the server ends it is collected after all: libraries whose
# objects are left over then say so at length.
gc.freeze()
atexit.register(gc.unfreeze)

"""The engine: one saved tensor's journey from pack to unpack.

Reading order: ``policy`` (what to do), ``saved_tensor`` (what autograd holds), ``parameters`` (what
never moves), ``tape`` (layer calls of a micro-batch), ``transport`` (how bytes move), ``engine``
(the sentence that ties them), ``lifecycle`` (the module hooks that drive it). This package imports
torch alone.
"""

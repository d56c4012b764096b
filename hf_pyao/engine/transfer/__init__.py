"""How bytes travel between the device and the host; knows no autograd and no layers.

Reading order: ``layout`` (which bytes), ``transport`` (how bytes cross the link, and [Note: Stream
order]), ``moved_bytes`` (where one byte range is), ``schedule`` (what moves when: arithmetic,
without torch), ``mover`` and ``window`` (who carries that out), ``link`` (what several movers
share). This package imports torch alone.
"""

"""How bytes travel between the device and the host; knows no autograd and no layers.

Reading order: ``layout`` (which bytes), ``transport`` (how bytes cross the link, and [Note: Stream
order]), ``schedule`` (what moves when: arithmetic, without torch), ``link`` (what waits to leave,
and what several movers share), ``mover`` (where one byte range is, and who moves it). This package
imports torch alone.
"""

"""Decides in a run which policy an attached model follows.

``states`` has the values, ``table`` the table (modes times events), ``driver`` performs what the
table says. The first two import neither torch nor anything of the package.
"""

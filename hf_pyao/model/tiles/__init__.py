"""Functions of tokens that run over tiles of them: what runs, how it is cut, and what may."""

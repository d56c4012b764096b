"""What settings should do, against what is seen: see ``hf_pyao/no_effect.py``."""

"""Train OPT with its activations offloaded: `accelerate launch recipes/train_opt.py --help`."""

from causal_lm import main

if __name__ == "__main__":
    main("opt")

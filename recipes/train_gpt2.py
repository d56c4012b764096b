"""Train GPT-2 with its activations offloaded: `accelerate launch recipes/train_gpt2.py --help`."""

from causal_lm import main

if __name__ == "__main__":
    main("gpt2")

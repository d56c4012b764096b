"""Train Llama with its activations offloaded: `accelerate launch recipes/train_llama.py --help`."""

from causal_lm import main

if __name__ == "__main__":
    main("llama")

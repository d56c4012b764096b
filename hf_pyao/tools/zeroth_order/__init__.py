"""What zeroth-order fine-tuning takes, without a GPU."""

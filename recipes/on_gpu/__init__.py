"""What a GPU is asked on the day that it comes: see ``../gpu_day.py``."""

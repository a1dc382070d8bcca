"""Crops, resizing and augmentation, on a CPU and on a GPU."""

"""Crops, flips and color effects of images, on the CPU and on the GPU."""

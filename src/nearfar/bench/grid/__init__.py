"""Grids of training runs: losses, networks, dimensions, datasets, settings and seeds, each with each."""

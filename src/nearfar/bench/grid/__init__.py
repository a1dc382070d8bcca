"""Grids of runs: cells, protocols, and the runner."""

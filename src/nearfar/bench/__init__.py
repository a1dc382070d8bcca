"""Comparing losses fairly: protocols, grids, tuning, tournaments."""

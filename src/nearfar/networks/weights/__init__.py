"""Weights: published ones, downloads, saving and export."""

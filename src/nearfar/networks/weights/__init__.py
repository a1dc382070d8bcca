"""Weights of networks: published files, state dicts, saving, loading and export."""

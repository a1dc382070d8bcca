"""Embeddings of trained models and their metrics."""

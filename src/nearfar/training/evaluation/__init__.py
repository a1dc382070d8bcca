"""Evaluation: one container of embeddings (``EmbeddingSet``) and one way to measure it."""

"""Comparison of finished runs: reading them, fairness, significance, ranking and tables."""

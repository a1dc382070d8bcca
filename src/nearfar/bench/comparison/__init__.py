"""Comparison of finished runs: fairness, significance, ranking, tables."""

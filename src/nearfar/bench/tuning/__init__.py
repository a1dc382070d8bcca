"""Hyperparameter search on validation classes, with Optuna."""

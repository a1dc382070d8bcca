"""Recipes: the checked description of one run."""

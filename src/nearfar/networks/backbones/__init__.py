"""Backbones, with the state-dict keys of their published weights."""

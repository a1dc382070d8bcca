"""Backbones, whose state-dict keys are those of their published weights."""

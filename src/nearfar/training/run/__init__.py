"""Run folders: checkpoints, manifest, logs."""

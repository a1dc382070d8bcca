"""Images decoded once and kept as pixels."""

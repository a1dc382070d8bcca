"""The training loop and everything it steps through."""

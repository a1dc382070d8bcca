"""How an index is kept on disk and in memory."""

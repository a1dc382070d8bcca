"""A server and a page to search with."""

"""Stores of decoded images: image sources, decoding, and packed pixels on disk."""

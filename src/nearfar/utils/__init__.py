"""Small helpers that every package uses: validation, atomic files, paths, progress, precision, plugins."""

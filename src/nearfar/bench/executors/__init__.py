"""Where the cells of a grid are trained: local processes, the current process, or a Ray cluster."""

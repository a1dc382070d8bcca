"""Where the cells of a grid run: this process, local processes, or Ray."""

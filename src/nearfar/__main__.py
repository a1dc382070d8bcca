"""``python -m nearfar`` is the command line."""

from nearfar.cli import main

if __name__ == "__main__":
    main()

"""`python -m kvcache_core`: the same as the command `kvcache`."""

from kvcache_core.cli import main

if __name__ == "__main__":
    main()

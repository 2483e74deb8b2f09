"""``python -m och_dist.cli``: the command ``och`` where it is not on the PATH."""

from och_dist.cli.app import main

if __name__ == "__main__":
    main()

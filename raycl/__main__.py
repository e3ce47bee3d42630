"""``python -m raycl``: the command ``raycl``, where no script of it is installed."""

from raycl.cli.main import main

if __name__ == "__main__":
    main()

"""`python -m blockscale`: the command line, also from a source tree where nothing is installed."""

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())

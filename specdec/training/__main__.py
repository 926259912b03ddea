"""`python -m specdec.training`: see `specdec.cli.train`."""

import sys

from specdec.cli.train import main

if __name__ == "__main__":
    sys.exit(main())

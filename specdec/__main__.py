"""`python -m specdec`."""

import sys

from specdec.lab.cli import main

sys.exit(main())

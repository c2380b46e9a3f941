"""`python -m mtmd` is the `mtmd` command."""

import sys

from mtmd.cli import main

sys.exit(main())

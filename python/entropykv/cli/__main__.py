"""Let `python -m entropykv.cli` run the command line."""

import sys

from entropykv.cli import main

sys.exit(main())

"""`python -m entropykv.cli`."""

import sys

from entropykv.cli import main

sys.exit(main())

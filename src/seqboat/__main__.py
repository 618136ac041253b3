"""`python -m seqboat`."""

import sys

from seqboat.cli import main

sys.exit(main())

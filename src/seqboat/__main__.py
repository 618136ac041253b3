"""`python -m seqboat`."""

import sys

from seqboat.cli.main import main

sys.exit(main())

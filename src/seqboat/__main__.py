"""`python -m seqboat`: like the command `seqboat`, it takes no module from the folder where it works."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]

from seqboat.cli.main import main

sys.exit(main())

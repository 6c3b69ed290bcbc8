"""`python -m kmem`: the `kmem` command, where that is not on the path."""

import sys

from kmem.commands.cli import main

sys.exit(main())

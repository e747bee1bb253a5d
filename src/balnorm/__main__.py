"""``python -m balnorm`` is the command ``balnorm``."""

import sys

from balnorm.cli import main

sys.exit(main())

"""``python -m balnorm``, for torchrun and for clones that are not installed: the command ``balnorm``."""

import sys

from balnorm_command import main

if __name__ == "__main__":
    sys.exit(main())

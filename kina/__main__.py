"""``python -m kina``"""

import sys

from kina.cli import main

if __name__ == "__main__":
    sys.exit(main())

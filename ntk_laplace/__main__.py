"""``python -m ntk_laplace`` is the command ``ntk-laplace``."""

import sys

from ntk_laplace.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())

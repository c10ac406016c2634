"""``python -m ntk_laplace`` is the command ``ntk-laplace``."""

import sys

from ntk_laplace_command import main

if __name__ == "__main__":
    sys.exit(main())

"""`foredraft` and `python -m foredraft`: from the first line on, Ctrl-C ends it without a traceback."""

import sys
from typing import NoReturn


def main() -> NoReturn:
    try:
        from foredraft.cli.main import main as run_process  # most of the start is this import

        run_process()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

"""`foredraft` and `python -m foredraft`: from the first line on, Ctrl-C and SIGTERM end it without a traceback."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> NoReturn:
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: _exit}
    minded = [number for number in handlers if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores some
    for number in minded:
        signal.signal(number, _leave)
    from foredraft.cli.main import main as run_process  # most of the start is this import

    try:
        for number in minded:
            signal.signal(number, handlers[number])
        run_process()
    except KeyboardInterrupt:
        sys.exit(130)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """While importing: there is nothing to clean up, and an exception may be swallowed in the depths of the import."""
    os._exit(128 + number)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    """What is begun is cleaned up, as after Ctrl-C."""
    sys.exit(128 + number)


if __name__ == "__main__":
    main()

"""What a child sees that was forked from this process, threads and all."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable

ENDS_S = 20  # a child that hangs


def forked(work: Callable[[], object]) -> str:
    """What `work` gives in a child, as text, or the error that it raises there; "" where the child
    ends otherwise, as one that hangs does after a while.
    """
    ours, its = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads
        pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(ENDS_S)
            try:
                reported = str(work())
            except BaseException as error:
                reported = f"{type(error).__name__}: {error}"
            os.write(its, reported.encode()[:4096])
        finally:
            os._exit(0)
    os.close(its)
    with os.fdopen(ours, "rb") as pipe:
        reported = pipe.read().decode()
    os.waitpid(pid, 0)
    return reported

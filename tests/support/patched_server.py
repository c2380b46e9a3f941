"""The web server in a process that gevent has patched, as `mtmd serve` has it, with a service
without a model: `python patched_server.py WORDS PACE_S` says its port, and drains on SIGTERM.
"""

from __future__ import annotations

from mtmd.__main__ import patch

patch()

import signal  # noqa: E402
import sys  # noqa: E402

from fake_service import FakeService  # noqa: E402

from mtmd.web.app import create_app  # noqa: E402
from mtmd.web.server import Server, bind  # noqa: E402
from mtmd.web.settings import ServerSettings  # noqa: E402

if __name__ == "__main__":
    service = FakeService(pace_s=float(sys.argv[2]))
    service.words = " ".join(["word"] * int(sys.argv[1]))
    settings = ServerSettings(port=0, queue=4096)
    server = Server(create_app(service, settings), settings, bind(settings))
    signal.signal(signal.SIGTERM, lambda *_: server.drain(60))
    print(server.port, flush=True)
    server.serve(service.close)
    print(len(service.tickets), flush=True)

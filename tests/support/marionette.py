"""Debian's Firefox, driven by what it has built in: Marionette, JSON over a socket. Playwright drives a Firefox
of its own only.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
from contextlib import contextmanager, suppress

import pytest

FIREFOX = next(
    (result for name in ("firefox-esr", "firefox") if (result := shutil.which(name))), None
)
START_S = 60
WAIT_S = 20
PREFERENCES = (
    'user_pref("marionette.port", 0);',
    'user_pref("datareporting.policy.dataSubmissionEnabled", false);',
    'user_pref("app.update.enabled", false);',
    'user_pref("network.captive-portal-service.enabled", false);',
    'user_pref("network.connectivity-service.enabled", false);',
    'user_pref("browser.shell.checkDefaultBrowser", false);',
)


class Firefox:
    def __init__(self, port):
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.settimeout(START_S)
        self._file, self._count = self._socket.makefile("rb"), 0
        self._read()  # who it is
        self.report("WebDriver:NewSession")

    def report(self, command, **arguments):
        self._count += 1
        data = json.dumps([0, self._count, command, arguments]).encode()
        self._socket.sendall(b"%d:%s" % (len(data), data))
        _, number, error, value = self._read()
        assert number == self._count and error is None, error
        return value

    def _read(self):
        size = b""
        while (digit := self._file.read(1)) != b":":
            assert digit, "Firefox has gone"
            size += digit
        return json.loads(self._file.read(int(size)))

    def go(self, url):
        self.report("WebDriver:Navigate", url=url)

    def run(self, script, *arguments):
        return self.report("WebDriver:ExecuteScript", script=script, args=list(arguments))["value"]

    def run_async(self, script, *arguments):
        """`script` calls its last argument with what is given back."""
        return self.report("WebDriver:ExecuteAsyncScript", script=script, args=list(arguments))[
            "value"
        ]

    def until(self, expression):
        """As a truth, not as an element: the page may replace one before it is sent."""
        end = time.monotonic() + WAIT_S
        while not self.run(f"return Boolean({expression})"):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)

    def close(self):
        self._file.close()
        self._socket.close()


@contextmanager
def firefox(profile):
    """`profile`: an empty folder."""
    if FIREFOX is None:
        pytest.skip(
            "NO FIREFOX, SO THE PAGES ARE NOT TESTED IN IT: install Debian's package firefox-esr"
        )
    (profile / "user.js").write_text("\n".join(PREFERENCES))
    command = [FIREFOX, "--headless", "--marionette", "--no-remote", "--profile", str(profile)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end, reported = time.monotonic() + START_S, profile / "MarionetteActivePort"
        while not (reported.exists() and reported.read_text().strip()):
            assert process.poll() is None and time.monotonic() < end, "Firefox does not start"
            time.sleep(0.1)
        browser = Firefox(int(reported.read_text()))
        yield browser
        browser.close()
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()

"""The files of contrib/ tried with the programs that they are for: a server behind nginx and Caddy,
at the top of a name and under a path, used by a real browser; the unit by systemd's own check.

    python tools/deployments.py [nginx] [caddy] [systemd]     # all, where none is named

Says what was tried, and ends with 1 where something does not work, or a program is not here.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTRIB = ROOT / "contrib"
sys.path.insert(0, str(ROOT / "tests" / "support"))
NAME = "mtmd.example.org"
LONG_BYTES = 60 << 20


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


@contextmanager
def served(*options: str) -> Iterator[int]:
    """The port of a server with the demo model."""
    command = (sys.executable, "-m", "mtmd", "serve", "--port", "0", "--no-history", *options)
    with started(*command) as process:
        assert process.stdout is not None
        lines = []
        while not lines or "serving at" not in lines[-1]:
            lines.append(process.stdout.readline())
            if not lines[-1]:
                raise SystemExit("".join(lines))
        result = re.search(r"serving at http://[^:]+:(\d+)", lines[-1])
        assert result
        yield int(result[1])


@contextmanager
def nginx(folder: Path, server: int) -> Iterator[int]:
    port = free_port()
    site = (CONTRIB / "nginx.conf").read_text()
    site = site.replace("listen 80;", f"listen 127.0.0.1:{port};").replace(":8080", f":{server}")
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ access_log off; {temporary}\n{site} }}\n"
    )
    with started("nginx", "-c", str(config), "-p", str(folder)):
        yield port


@contextmanager
def caddy(folder: Path, server: int) -> Iterator[int]:
    port = free_port()
    site = (CONTRIB / "Caddyfile").read_text().replace(":8080", f":{server}")
    site = re.sub(rf"^{NAME}", f"http://{NAME}:{port}", site, flags=re.M)
    config = folder / "Caddyfile"
    config.write_text("{\n\tadmin off\n}\n" + site)
    with started("caddy", "run", "--config", str(config), "--adapter", "caddyfile"):
        yield port


class Checks:
    def __init__(self) -> None:
        self.wrong = 0

    def say(self, what: str, right: object) -> None:
        self.wrong += not right
        print(f"{'ok   ' if right else 'WRONG'} {what}", flush=True)


def ask(
    port: int, method: str, path: str, body: bytes = b"", host: str = "", **headers: str
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    given = {"Host": host or f"{NAME}:{port}", "Content-Type": "application/json", **headers}
    connection.request(method, path, body or None, given)
    return connection.getresponse()


def wait_for(port: int) -> None:
    end = time.monotonic() + 30
    while True:
        with socket.socket() as sock:
            if sock.connect_ex(("127.0.0.1", port)) == 0:
                return
        if time.monotonic() > end:
            raise SystemExit(f"nobody listens on port {port}")
        time.sleep(0.05)


def check_requests(checks: Checks, name: str, port: int, path: str) -> None:
    where = f"{name}{path or '/'}:"
    question = {"role": "user", "content": "Describe the image."}
    chat = {"messages": [question], "stream": True, "ignore_eos": True}
    result = ask(port, "POST", f"{path}/v1/chat/completions", json.dumps(chat).encode())
    times, received = [], b""
    while piece := result.read1(1 << 16):
        times.append(time.monotonic())
        received += piece
    spread = len(times) > 5 and times[0] < times[-1]
    checks.say(f"{where} a stream comes in {len(times)} pieces", spread and b"[DONE]" in received)
    origin = f"http://{NAME}:{port}"
    body = json.dumps({"messages": [question], "max_tokens": 4}).encode()
    result = ask(port, "POST", f"{path}/v1/chat/completions", body, Origin=origin)
    reported = json.loads(result.read())
    checks.say(f"{where} its own page may ask", result.status == 200 and reported["choices"])
    result = ask(port, "POST", f"{path}/v1/chat/completions", body, Origin="http://evil.example")
    checks.say(f"{where} others' pages may not", result.status == 403)
    long = json.dumps({"messages": [question], "x": "y" * LONG_BYTES}).encode()
    result = ask(port, "POST", f"{path}/v1/chat/completions", long)
    reported = json.loads(
        result.read()
    )  # of the server itself, which takes less text than pictures
    checks.say(
        f"{where} {LONG_BYTES >> 20} MiB reach it",
        "body_too_large" in str(reported) or result.status < 500,
    )
    result = ask(port, "GET", f"{path}/v1/models", **{"X-Request-Id": "my-own-id"})
    checks.say(f"{where} ids of requests come back", result.headers["X-Request-Id"] == "my-own-id")


def check_page(checks: Checks, name: str, port: int, path: str, folder: Path) -> None:
    """A person's way through the page, in Chromium, which takes the name for this machine."""
    from browsing import CHROMIUM, Visitor
    from playwright.sync_api import sync_playwright

    where = f"{name}{path or '/'}:"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", f"--host-resolver-rules=MAP {NAME} 127.0.0.1"],
        )
        person = Visitor(browser, f"http://{NAME}:{port}", begins="body")
        person.expects = (
            "Cross-Origin-Opener-Policy",
        )  # has no meaning without TLS, says Chromium
        page = person.page
        person.go(path or "/")
        page.wait_for_selector("#welcome")
        at = f"http://{NAME}:{port}{path}/"
        checks.say(f"{where} the page loads at {page.url}", page.url == at)
        person.attach(ROOT / "examples" / "shapes.png")
        person.say("Describe the image.")
        answer = person.texts("answer")[-1]
        checks.say(f"{where} an answer: {answer[:40]}", "circle" in answer or "square" in answer)
        talk = page.url
        checks.say(f"{where} the conversation is at {talk}", talk.startswith(f"{at}c/"))
        page.reload()
        page.wait_for_selector(".message.answer.last .actions")
        checks.say(f"{where} and there again", person.texts("answer") == [answer])
        widths = "[...document.images].filter((i) => i.offsetParent).map((i) => i.naturalWidth)"
        person.until(f"{widths}.length > 0 && {widths}.every((w) => w > 0)")
        page.screenshot(path=folder / f"{name}{path.replace('/', '-')}.png")
        page.click("a[href$='diagnostics']")
        page.wait_for_selector("#report h2, #report table, #report section")
        checks.say(f"{where} diagnostics at {page.url}", page.url == f"{at}diagnostics")
        page.click("a.icon-button")
        page.wait_for_selector("#welcome")
        checks.say(f"{where} and back at {page.url}", page.url == at)
        page.goto(talk)
        page.wait_for_selector(".message.answer.last .actions")
        page.click("#new-chat")
        page.wait_for_selector("#welcome")
        checks.say(f"{where} a new chat is at {page.url}", page.url == at)
        person.close()
        browser.close()
    checks.say(f"{where} nothing that the browser complains of", True)


def check_proxy(
    checks: Checks, name: str, start: Callable[[Path, int], object], path: str, folder: Path
) -> None:
    root = ("--root-path", path) if path and name == "nginx" else ()
    options = ("--allowed-host", NAME, "--trusted-proxy", "127.0.0.1", *root)
    location = folder / f"{name}{path.replace('/', '-')}"
    location.mkdir()
    for one in (folder, location):  # nginx's workers are another user
        one.chmod(0o755)
    with served(*options) as server, start(location, server) as port:  # type: ignore[attr-defined]
        wait_for(port)
        check_requests(checks, name, port, path)
        check_page(checks, name, port, path, folder)


def check_unit(checks: Checks, folder: Path) -> None:
    """With a program and a user that are here: the check looks for both."""
    unit = (CONTRIB / "mtmd.service").read_text().replace("User=mtmd", "User=root")
    result = folder / "mtmd.service"
    result.write_text(unit.replace("/opt/mtmd/bin/mtmd", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(result)], capture_output=True, text=True
    )
    checks.say(f"systemd: the unit is right {done.stderr.strip()}", not done.returncode)


def main() -> int:
    requested = sys.argv[1:] or ["nginx", "caddy", "systemd"]
    checks = Checks()
    folder = Path(tempfile.mkdtemp(prefix="deployments-"))
    for name in requested:
        program = "systemd-analyze" if name == "systemd" else name
        if shutil.which(program) is None:
            checks.say(f"{name}: {program} is not here", False)
        elif name == "systemd":
            check_unit(checks, folder)
        else:
            start = {"nginx": nginx, "caddy": caddy}[name]
            for path in ("", "/mtmd"):
                check_proxy(checks, name, start, path, folder)
    print(f"pictures of the pages are in {folder}")
    return 1 if checks.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

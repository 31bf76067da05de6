"""A headless Chromium for tests, driven through its driver; Debian's packages are `chromium` and `chromium-driver`."""

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

from tests.support.server import eventually

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = [name for name, found in (("chromium", CHROMIUM), ("chromium-driver", DRIVER)) if found is None]
WAIT_SECONDS = 60.0  # a browser on a busy machine

Browser = webdriver.Chrome


@contextlib.contextmanager
def browser(directory: Path) -> Iterator[Browser]:
    """Start a browser that can reach 127.0.0.1 and nothing else; its files go to `directory`."""
    assert CHROMIUM is not None
    assert DRIVER is not None
    options = Options()
    options.binary_location = CHROMIUM
    for argument in (
        "--headless=new",
        f"--user-data-dir={directory / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "--no-proxy-server",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--no-first-run",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    environment = {**os.environ, "HOME": str(directory), "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1"}
    driver = webdriver.Chrome(options=options, service=Service(DRIVER, env=environment))
    try:
        driver.set_script_timeout(WAIT_SECONDS)
        driver.set_page_load_timeout(WAIT_SECONDS)
        yield driver
    finally:
        driver.quit()


def requested(driver: Browser) -> list[str]:
    """Return the URLs of all requests of pages since this was last asked."""
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    return [
        message["params"]["request"]["url"] for message in messages if message["method"] == "Network.requestWillBeSent"
    ]


def complaints(driver: Browser) -> list[str]:
    """Return what the console shows as errors, such as breaches of a content security policy."""
    return [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]


def until(driver: Browser, expression: str) -> Any:
    """Wait for a JavaScript expression to be true and return its value."""
    return eventually(lambda: driver.execute_script(f"return {expression}"), WAIT_SECONDS)


@contextlib.contextmanager
def page_of_another_origin(html: str = "<!doctype html><title>page</title>") -> Iterator[str]:
    """Serve one page on a port of its own and give its origin."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = html.encode() if self.path == "/" else b""
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join(WAIT_SECONDS)

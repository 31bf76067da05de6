"""Subscribers that cost little: raw sockets in a process of their own, so that what is measured is the service.

`python -m bench.subscriber_load` reads one JSON object from stdin, `{port, requests (base64), seconds}`. Each request
is an event stream and has a connection. It prints `ready` once all have got their first bytes, reads them to their
ends, for `seconds` at most, and prints `{streams, complete, inOrder, events, cpuSeconds}`.
"""

import base64
import json
import re
import selectors
import socket
import sys
import time
from typing import Any

_ID = re.compile(rb"^id: (\d+)$", re.MULTILINE)


class Subscriber:
    """One stream: how many events came, whether each id followed the one before, whether the last one came."""

    def __init__(self, port: int, request: bytes) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.connection.sendall(request)
        self.connection.setblocking(False)
        self.events = 0
        self.in_order = True
        self.complete = False
        self.begun = False
        self._rest = b""

    def read(self) -> bool:
        """Take what has come; False at the end of the stream."""
        data = self.connection.recv(262_144)
        if not data:
            return False
        self.begun = True
        # A frame ends with an empty line; chunks hold whole frames, so their sizes stand between frames.
        whole, cut, self._rest = (self._rest + data).rpartition(b"\n\n")
        for found in _ID.findall(whole + cut):
            self.events += 1
            self.in_order = self.in_order and int(found) == self.events
        if b"event: batch_end\n" in whole:
            self.complete = True
        return b"\r\n0\r\n\r\n" not in self._rest


def _run(spec: dict[str, Any]) -> dict[str, Any]:
    selector = selectors.DefaultSelector()
    subscribers = [Subscriber(spec["port"], base64.b64decode(request)) for request in spec["requests"]]
    for subscriber in subscribers:
        selector.register(subscriber.connection, selectors.EVENT_READ, subscriber)
    deadline = time.monotonic() + spec["seconds"]
    waiting = len(subscribers)
    told = False
    while waiting and time.monotonic() < deadline:
        for key, _ in selector.select(1.0):
            if not key.data.read():
                selector.unregister(key.fileobj)
                waiting -= 1
        if not told and all(subscriber.begun for subscriber in subscribers):
            told = True
            print("ready", flush=True)
        # Gather for a moment: a client that wakes for every frame takes the core the service is measured on.
        time.sleep(0.005)
    return {
        "streams": len(subscribers),
        "complete": sum(subscriber.complete for subscriber in subscribers),
        "inOrder": sum(subscriber.in_order for subscriber in subscribers),
        "events": sum(subscriber.events for subscriber in subscribers),
        "cpuSeconds": time.process_time(),
    }


if __name__ == "__main__":
    print(json.dumps(_run(json.load(sys.stdin))))

"""How many threads are in a place at once."""

from __future__ import annotations

import threading


class Watch:
    """Counts the threads inside ``with``; one for all replicas, as any object of no known kind."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = self.most = 0
        self.threads: list[str] = []

    def __enter__(self) -> None:
        with self.lock:
            self.threads.append(threading.current_thread().name)
            self.inside += 1
            self.most = max(self.most, self.inside)

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1

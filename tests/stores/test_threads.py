"""Attempts in threads of their own."""

from __future__ import annotations

import os
import threading
import time

from streampack.stores import threads


def test_a_process_is_forked_when_the_threads_of_past_attempts_are_gone(monkeypatch):
    numbers: list[int] = []
    threads.within_time(lambda: numbers.append(threading.get_native_id()), 5)
    assert threads._ending[-1] == numbers[0]

    ending = threading.Thread(target=time.sleep, args=(0.3,))
    ending.start()
    monkeypatch.setattr(threads, "_ending", threads.deque([ending.native_id]))
    child = os.fork()
    if not child:
        os._exit(0)
    assert not ending.is_alive()
    os.waitpid(child, 0)

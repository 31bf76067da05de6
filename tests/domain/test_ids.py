"""Ids sort by the time they were made and have the TypeID form."""

import threading
import time

from app.domain.ids import is_id, new_id


def test_ids_of_one_process_sort_in_the_order_they_were_made():
    made = [new_id("call") for _ in range(5000)]
    assert made == sorted(made)
    assert len(set(made)) == len(made)


def test_ids_made_in_threads_never_collide():
    made: list[list[str]] = [[] for _ in range(4)]

    def make(into: list[str]) -> None:
        into.extend(new_id("ws") for _ in range(2000))

    threads = [threading.Thread(target=make, args=(into,)) for into in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    together = [item for into in made for item in into]
    assert len(set(together)) == 8000


def test_an_id_carries_its_time_version_and_variant():
    before = time.time_ns() // 1_000_000
    body = new_id("batch").removeprefix("batch_")
    number = 0
    for digit in body:
        number = number * 32 + "0123456789abcdefghjkmnpqrstvwxyz".index(digit)
    assert before <= number >> 80 <= time.time_ns() // 1_000_000
    assert (number >> 76) & 0xF == 7
    assert (number >> 62) & 0x3 == 2


def test_only_the_form_of_a_typeid_with_its_prefix_is_an_id():
    assert is_id(new_id("ws"), "ws")
    for wrong in ("", "ws_", "ws_abc", new_id("call"), new_id("ws").upper(), new_id("ws") + "0", "ws_8" + "0" * 25):
        assert not is_id(wrong, "ws"), wrong

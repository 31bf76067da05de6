"""Slots of streams: counted by key and by batch, given back once."""

import pytest

from app.errors import TooManyStreams
from app.services.streams import StreamSlots


def test_a_key_and_a_batch_have_as_many_as_they_may() -> None:
    slots = StreamSlots(per_key=3, per_batch=2)
    first, second = slots.open("a", "batch_1"), slots.open("b", "batch_1")
    with pytest.raises(TooManyStreams, match="batch batch_1"):
        slots.open("a", "batch_1")
    assert (slots.of_key("a"), slots.of_key("b"), slots.of_batch("batch_1"), slots.total) == (1, 1, 2, 2)
    others = [slots.open("a", "batch_2"), slots.open("a")]
    with pytest.raises(TooManyStreams, match="this key"):
        slots.open("a", "batch_3")
    assert slots.of_batch("batch_3") == 0
    for slot in (first, second, *others):
        slot.close()
    assert slots.total == 0
    assert not slots._keys
    assert not slots._batches


def test_closing_twice_gives_back_one() -> None:
    slots = StreamSlots(per_key=2, per_batch=2)
    first, second = slots.open("a", "b"), slots.open("a", "b")
    first.close()
    first.close()
    assert (slots.of_key("a"), slots.of_batch("b")) == (1, 1)
    second.close()


def test_a_slot_taken_before_there_is_a_batch_is_given_back_when_there_never_is_one() -> None:
    slots = StreamSlots(per_key=1, per_batch=1)
    with pytest.raises(LookupError), slots.open("a"):
        raise LookupError
    with slots.open("a") as slot:
        slot.follow("b")
        assert slots.of_batch("b") == 1
        with pytest.raises(TooManyStreams):
            slots.follow("b")
    assert slots.total == slots.of_batch("b") == 0


def test_the_streams_of_a_key_are_cut_once_each_as_soon_as_they_have_begun() -> None:
    slots = StreamSlots()
    cut: list[str] = []
    first, second, other = slots.open("a", "batch_1"), slots.open("a"), slots.open("b")
    first.begin(lambda: cut.append("first"))
    other.begin(lambda: cut.append("other"))
    assert list(slots.keys) == ["a", "b"]
    assert slots.cut("a") == 1
    assert slots.cut("a") == 0
    second.begin(lambda: cut.append("second"))
    assert slots.cut("a") == 1
    assert cut == ["first", "second"]
    assert slots.of_key("a") == 2, "a stream that was cut is open until it says that it has ended"
    first.close()
    second.close()
    assert slots.cut("a") == 0
    other.close()
    assert not other.cut(), "what has ended is not ended again"
    assert not slots.keys

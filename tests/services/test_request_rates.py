"""Rates of requests: what is let through, what is told, and that buckets of nobody are kept by nobody."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import RateLimited
from app.services.request_rates import BUCKETS_MAX, Bucket, Rate, RequestRates, TokenBuckets


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_burst_passes_at_once_and_then_as_many_as_come_in(clock: Clock) -> None:
    buckets = TokenBuckets(Rate(2, 3), clock=clock)
    assert [buckets.take("k")[0] for _ in range(4)] == [True, True, True, False]
    assert buckets.look("k") == Bucket(remaining=0, full_in=1.5, next_in=0.5)
    clock.now += 0.5
    assert [buckets.take("k")[0] for _ in range(2)] == [True, False]
    clock.now += 60
    assert buckets.look("k") == Bucket(remaining=3, full_in=0, next_in=0)


def test_a_refused_request_costs_nothing(clock: Clock) -> None:
    buckets = TokenBuckets(Rate(1, 1), clock=clock)
    assert [buckets.take("k")[0] for _ in range(50)] == [True] + [False] * 49
    clock.now += 1
    assert buckets.take("k")[0]


def test_keys_have_a_bucket_each(clock: Clock) -> None:
    buckets = TokenBuckets(Rate(1, 1), clock=clock)
    assert [buckets.take(name)[0] for name in ("a", "b", "a", "b")] == [True, True, False, False]


def test_a_bucket_that_is_full_again_is_forgotten(clock: Clock) -> None:
    buckets = TokenBuckets(Rate(1, 2), clock=clock)
    for number in range(100):
        buckets.take(f"k{number}")
    assert len(buckets) == 100
    clock.now += 1
    buckets.take("another")
    assert len(buckets) == 1


def test_there_are_never_more_buckets_than_may_be(clock: Clock) -> None:
    buckets = TokenBuckets(Rate(0.001, 2), clock=clock)
    for number in range(BUCKETS_MAX + 500):
        buckets.take(f"k{number}")
    assert len(buckets) == BUCKETS_MAX
    assert buckets.look(f"k{BUCKETS_MAX}").remaining == 1
    assert buckets.look("k0").remaining == 2


@given(
    st.floats(0.1, 1000),
    st.integers(1, 50),
    st.lists(st.floats(0, 5), min_size=1, max_size=200),
)
def test_no_more_pass_than_the_burst_and_what_came_in_meanwhile(rate: float, burst: int, pauses: list[float]) -> None:
    clock = Clock()
    buckets = TokenBuckets(Rate(rate, burst), clock=clock)
    passed, began = 0, clock.now
    for pause in pauses:
        clock.now += pause
        allowed, bucket = buckets.take("k")
        passed += allowed
        assert 0 <= bucket.remaining < burst or burst == 1
        assert passed <= burst + (clock.now - began) * rate + 1e-3
        if not allowed:
            clock.now += bucket.next_in
            assert buckets.take("k")[0], "what it says to wait is enough"
            passed += 1


def test_the_fields_say_what_there_is_and_the_refusal_how_long_to_wait(clock: Clock) -> None:
    rates = RequestRates(Rate(0.5, 2), None, clock=clock)
    policy = '"requests";q=2;w=4'
    assert rates.count("k") == {"RateLimit-Policy": policy, "RateLimit": '"requests";r=1;t=2'}
    assert rates.count("k") == {"RateLimit-Policy": policy, "RateLimit": '"requests";r=0;t=4'}
    with pytest.raises(RateLimited) as refused:
        rates.count("k")
    assert refused.value.extra["headers"] == {
        "RateLimit-Policy": policy,
        "RateLimit": '"requests";r=0;t=4',
        "Retry-After": "2",
    }
    clock.now += 1.999
    with pytest.raises(RateLimited) as refused:
        rates.count("k")
    assert refused.value.extra["headers"]["Retry-After"] == "1"
    assert rates.count("other") != {}


def test_without_a_limit_nothing_is_counted_and_nothing_told() -> None:
    rates = RequestRates(None, None)
    assert [rates.count("k") for _ in range(1000)] == [{}] * 1000
    for _ in range(1000):
        rates.count_failure("192.0.2.1")


def test_failures_are_counted_by_address(clock: Clock) -> None:
    rates = RequestRates(None, Rate(1, 2), clock=clock)
    rates.count_failure("192.0.2.1")
    rates.count_failure("192.0.2.1")
    with pytest.raises(RateLimited) as refused:
        rates.count_failure("192.0.2.1")
    assert refused.value.extra["headers"] == {"Retry-After": "1"}
    rates.count_failure("192.0.2.2")

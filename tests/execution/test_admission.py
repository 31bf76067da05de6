"""Who may join the queues: counts by workspace, in all and in bytes, and one place for one request sent many times."""

from dataclasses import replace

import pytest

from app.domain.batch import Batch
from app.domain.ids import new_id
from app.errors import TooManyBatches
from app.execution.backends.admission import Admission, Held
from tests.support.calls import batch

A, B = new_id("ws"), new_id("ws")


def of(workspace: str, size: int = 2, owner: str = "env") -> Batch:
    made = batch([("read", {})], workspace, owner=owner)
    return replace(made, calls=(replace(made.calls[0], arguments=b"x" * size),))


def refused(admission: Admission, made: Batch, request: object = None) -> str:
    with pytest.raises(TooManyBatches) as error:
        admission.reserve(made, request)
    return error.value.detail


def empty(admission: Admission) -> bool:
    return admission.held == Held() and not (
        admission._places or admission._workspaces or admission._owners or admission._asked
    )


def test_a_workspace_and_all_together_have_as_many_as_they_may() -> None:
    admission = Admission(batches=3, per_workspace=2)
    first, second, third = of(A), of(A), of(B, owner="key_1")
    for made in (first, second):
        admission.reserve(made)
    assert refused(admission, of(A)).startswith(f"workspace {A} has 2 batches that wait or run")
    admission.reserve(third)
    assert refused(admission, of(B)).startswith("3 batches wait or run")
    assert (admission.of_workspace(A), admission.of_workspace(B)) == (2, 1)
    assert (admission.of_owner("env"), admission.of_owner("key_1")) == (2, 1)
    for made in (first, second, third):
        admission.enter(made)
        admission.release(made, accepted=True)
    assert admission.held == Held(3, 6)
    admission.leave(second.id)
    admission.reserve(of(A))


def test_a_place_that_was_kept_for_nothing_is_free_again() -> None:
    admission = Admission(batches=1)
    made = of(A)
    admission.reserve(made)
    admission.release(made, accepted=False)
    assert empty(admission)


def test_their_arguments_have_a_limit_together_and_one_batch_alone_always_fits() -> None:
    admission = Admission(max_bytes=100)
    large = of(A, 1000)
    admission.reserve(large)
    assert "1000 bytes of arguments" in refused(admission, of(B, 1))
    admission.release(large, accepted=False)
    admission.reserve(of(A, 60))
    admission.reserve(of(A, 40))
    refused(admission, of(A, 1))
    assert admission.held == Held(2, 100)


def test_one_request_sent_many_times_at_once_takes_one_place_and_none_of_them_is_refused() -> None:
    admission = Admission(batches=1, per_workspace=1)
    request = ("env", A, "key")
    sent = [of(A) for _ in range(10)]
    for made in sent:
        admission.reserve(made, request)
    assert admission.held.batches == 1
    refused(admission, of(A), ("env", A, "another"))
    # Which one makes the batch is the database's choice: here it is not the first.
    for made in sent:
        if made is sent[3]:
            admission.enter(made)
        admission.release(made, request, accepted=made is sent[3])
    assert admission.held.batches == 1
    refused(admission, of(A), request)
    admission.leave(sent[3].id)
    assert empty(admission)


def test_what_was_accepted_before_counts_whatever_the_limits() -> None:
    admission = Admission(batches=1)
    for made in (left := [of(A), of(B)]):
        admission.enter(made)
        admission.enter(made)
    assert admission.held.batches == 2
    refused(admission, of(A))
    for made in left:
        admission.leave(made.id)
        admission.leave(made.id)
    assert empty(admission)

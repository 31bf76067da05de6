import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from opentelemetry import trace

from app.telemetry.logs import LogFormat, configure_logging
from app.telemetry.tracing import make_provider
from tests.support.server import ServerThread


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    before = structlog.get_config()
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    structlog.configure(**before)
    root.handlers[:] = handlers
    root.setLevel(level)


def lines(capture: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capture.readouterr().err.splitlines()]


def test_every_line_of_a_task_carries_its_ids(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    with structlog.contextvars.bound_contextvars(request_id="req_1", batch_id="batch_1"):
        structlog.get_logger("app.x").info("done", count=2)
        logging.getLogger("somebody.else").warning("careful %s", "now")
    first, second = lines(capsys)
    assert first.pop("at")
    assert second.pop("at")
    assert first == {"message": "done", "level": "info", "count": 2, "request_id": "req_1", "batch_id": "batch_1"}
    assert second == {"message": "careful now", "level": "warning", "request_id": "req_1", "batch_id": "batch_1"}


def test_a_line_within_a_span_has_the_id_of_its_trace(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    provider = make_provider()
    with provider.get_tracer("tests").start_as_current_span("outer") as span:
        structlog.get_logger("app.x").info("within")
        logging.getLogger("somebody.else").warning("within, too")
    structlog.get_logger("app.x").info("after")
    provider.shutdown()
    trace_id = trace.format_trace_id(span.get_span_context().trace_id)
    assert len(trace_id) == 32
    assert [line.get("trace_id") for line in lines(capsys)] == [trace_id, trace_id, None]


def test_the_lines_of_a_request_and_of_its_batch_have_the_trace_the_client_began(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure_logging("debug", "json")
    provider = make_provider()
    sent = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    with ServerThread(tmp_path / "data", tracer_provider=provider) as server, server.client() as client:
        path = f"/v1/workspaces/{client.post('/v1/workspaces').json()['id']}/batches"
        assert client.post(f"{path}?wait=20", json={"calls": [{"name": "ls"}]}, headers=sent).status_code == 200
        assert client.get("/healthz").status_code == 200
    provider.shutdown()
    found = [(line["message"], line.get("path"), line.get("trace_id")) for line in lines(capsys)]
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    traced = {(message, path) for message, path, its in found if its == trace_id}
    assert traced == {("request", path), ("tool_call", None), ("batch", None)}
    assert ("request", "/healthz", None) in found


def test_a_level_holds_for_our_lines_and_for_those_of_libraries(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning", "json")
    structlog.get_logger("app.x").info("quiet")
    logging.getLogger("somebody.else").info("quiet")
    structlog.get_logger("app.x").warning("loud")
    assert [line["message"] for line in lines(capsys)] == ["loud"]


@pytest.mark.parametrize("form", ["console", "json"])
def test_a_traceback_shows_no_values_of_variables(capsys: pytest.CaptureFixture[str], form: LogFormat) -> None:
    configure_logging("info", form)
    secret = "hunter2-" * 2  # noqa: F841 - a value a careless traceback would print
    try:
        raise ValueError("broken")  # noqa: TRY301 - a traceback to log
    except ValueError:
        structlog.get_logger("app.x").exception("failed")
    written = capsys.readouterr().err
    assert "ValueError: broken" in written
    assert "hunter2-hunter2-" not in written


def test_control_characters_do_not_reach_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "console")
    structlog.get_logger("app.x").info("tool_call", tool="\x1b[2Jread\r\x07", path="héllo")
    written = capsys.readouterr().err
    assert "\\x1b[2Jread\\x0d\\x07" in written
    assert "héllo" in written
    assert not {"\x1b", "\r", "\x07"} & set(written)


@pytest.mark.parametrize("form", ["console", "json"])
def test_no_line_shows_a_key_or_what_a_url_has_as_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: LogFormat
) -> None:
    configure_logging("info", form)
    # A server that some other test started without access lines has cut this logger off.
    access = logging.getLogger("uvicorn.access")
    monkeypatch.setattr(access, "propagate", True)
    monkeypatch.setattr(access, "level", logging.INFO)
    key = "toolcrib_" + "aB3_-" * 8 + "xyz"
    signed = "toolcrib_url_key_01m8q0td4pfgbabtqvvz3q6jdx.1796069000000." + "aB3_-" * 8 + "xyz"
    line = '%s - "%s %s HTTP/%s" %d'
    access.info(line, "::1", "GET", "/v1/x?token=hunter2&after=1", "1.1", 200)
    access.info(line, "::1", "GET", f"/v1/x?after=1&token={signed}", "1.1", 200)
    structlog.get_logger("app.x").info("odd", key=key, url=f"/v1/x?token={signed}", text=f"token {signed}, key {key}.")
    try:
        raise ValueError(f"no such key: {key}")  # noqa: TRY301 - a traceback to log
    except ValueError:
        structlog.get_logger("app.x").exception("failed")
    written = capsys.readouterr().err
    for secret in ("hunter2", "aB3_-aB3_-", key, signed):
        assert secret not in written
    for kept in ("/v1/x?token=***&after=1", "/v1/x?after=1&token=***", "no such key: ***"):
        assert kept in written

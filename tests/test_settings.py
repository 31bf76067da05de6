import os
from pathlib import Path

import pytest

from app.errors import ConfigurationError
from app.settings import PREFIX, Settings, unknown_variables, variable

DOCUMENTATION = Path(__file__).parents[1] / "docs" / "configuration.md"


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)


def test_nothing_set_serves_this_machine_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings.load()
    assert settings == Settings(host="127.0.0.1", port=8080, data_dir=tmp_path / "data", sandbox="auto")
    assert settings.loopback
    assert settings.api_key is None


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("PORT", "http", "TOOLCRIB_PORT is wrong: it has to be a valid integer"),
        ("PORT", "65536", "TOOLCRIB_PORT is wrong: it has to be less than or equal to 65535 (it is '65536')."),
        ("METRICS_PORT", "-1", "TOOLCRIB_METRICS_PORT is wrong: it has to be greater than or equal to 0"),
        (
            "SANDBOX",
            "jail",
            "TOOLCRIB_SANDBOX is wrong: it has to be 'auto', 'namespace', 'landlock' or 'process' (it is 'jail').",
        ),
        ("SANDBOX_READABLE", "/usr:lib", "TOOLCRIB_SANDBOX_READABLE is wrong: lib is no absolute path below /"),
        ("SANDBOX_READABLE", "/no/such", "TOOLCRIB_SANDBOX_READABLE is wrong: there is nothing at /no/such"),
        ("RUN_AS", "0", "TOOLCRIB_RUN_AS is wrong: nothing is done as user or group 0"),
        ("RUN_AS", "1000:0", "TOOLCRIB_RUN_AS is wrong: nothing is done as user or group 0"),
        ("RUN_AS", "4294967295", "TOOLCRIB_RUN_AS is wrong: nothing is done as user or group 0"),
        ("RUN_AS", "root", "TOOLCRIB_RUN_AS is wrong: nothing is done as root"),
        ("RUN_AS", "nobody:nogroup", "TOOLCRIB_RUN_AS is wrong: it has to be a user's name, a number, or two numbers"),
        ("RUN_AS", "1:2:3", "TOOLCRIB_RUN_AS is wrong: it has to be a user's name, a number, or two numbers"),
        ("BWRAP", "bwrap", "TOOLCRIB_BWRAP is wrong: it has to be an absolute path"),
        ("BWRAP", "/etc/passwd", "TOOLCRIB_BWRAP is wrong: there is no program"),
        ("DATABASE_URL", "mysql://u:secret@h/d", "TOOLCRIB_DATABASE_URL is wrong: it has to start with postgresql://"),
        ("API_KEY", "two words", "TOOLCRIB_API_KEY is wrong: it may hold only visible ASCII characters"),
        ("WORKSPACE_ROOTS", "/:/no/such", "TOOLCRIB_WORKSPACE_ROOTS is wrong: there is no directory /no/such."),
        ("WORKSPACE_ROOTS", "srv", "TOOLCRIB_WORKSPACE_ROOTS is wrong: srv is no absolute path."),
        ("CORS_ORIGINS", "example.org", "TOOLCRIB_CORS_ORIGINS is wrong: example.org is no origin"),
        ("ALLOW_UNRESTRICTED", "perhaps", "TOOLCRIB_ALLOW_UNRESTRICTED is wrong: it has to be a valid boolean"),
        ("RATE_LIMIT", "-1", "TOOLCRIB_RATE_LIMIT is wrong: it has to be greater than or equal to 0 (it is '-1')."),
        ("RATE_LIMIT", "nan", "TOOLCRIB_RATE_LIMIT is wrong: it has to be"),
        ("MAX_BATCHES", "0", "TOOLCRIB_MAX_BATCHES is wrong: it has to be greater than or equal to 1 (it is '0')."),
        (
            "RETAIN_OUTPUT",
            "soon",
            "TOOLCRIB_RETAIN_OUTPUT is wrong: it has to be a number of seconds, or one with s, m, h",
        ),
        ("RETAIN_EVENTS", "0", "TOOLCRIB_RETAIN_EVENTS is wrong: it has to be greater than or equal to 1"),
        ("RETAIN_RECORDS", "99999d", "TOOLCRIB_RETAIN_RECORDS is wrong: it has to be less than or equal to"),
        ("LOG_LEVEL", "loud", "TOOLCRIB_LOG_LEVEL is wrong: it has to be 'debug', 'info', 'warning' or 'error'"),
        ("LOG_FORMAT", "xml", "TOOLCRIB_LOG_FORMAT is wrong: it has to be 'auto', 'console' or 'json'"),
    ],
)
def test_a_wrong_value_is_one_sentence_that_names_the_setting(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str
) -> None:
    monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(ConfigurationError) as caught:
        Settings.load()
    message = str(caught.value)
    assert message.startswith(sentence)
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize(("name", "value"), [("API_KEY", "a secret"), ("DATABASE_URL", "mysql://u:secret@h/d")])
def test_a_wrong_secret_is_not_shown(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(ConfigurationError) as caught:
        Settings.load()
    assert "secret" not in str(caught.value)
    monkeypatch.delenv(PREFIX + name)
    assert "secret" not in repr(Settings(api_key="secret"))


def test_an_empty_variable_is_one_that_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for field in Settings.model_fields:
        monkeypatch.setenv(variable(field), "")
    assert Settings.load() == Settings()


def test_lists_are_separated_by_colon_or_comma(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    for separator in ":,":
        monkeypatch.setenv("TOOLCRIB_WORKSPACE_ROOTS", f"{first}{separator}{second}")
        assert Settings.load().workspace_roots == (first, second)
    monkeypatch.setenv("TOOLCRIB_CORS_ORIGINS", "https://a.example, http://localhost:3000/")
    assert Settings.load().cors_origins == ("https://a.example", "http://localhost:3000")


def test_a_root_that_is_a_link_is_the_directory_it_points_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.setenv("TOOLCRIB_WORKSPACE_ROOTS", str(tmp_path / "link"))
    assert Settings.load().workspace_roots == (tmp_path / "real",)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.1", False),
        ("example.org", False),
    ],
)
def test_loopback_is_what_only_this_machine_reaches(host: str, loopback: bool) -> None:
    assert Settings(host=host).loopback is loopback


def test_unknown_variables_are_told_with_the_nearest_setting() -> None:
    environment = {"TOOLCRIB_PROT": "1", "TOOLCRIB_XYZZY": "", "TOOLCRIB_PORT": "1", "PATH": "", "TOOLCRIB_URL": ""}
    assert unknown_variables(environment, also_known=["TOOLCRIB_URL"]) == [
        ("TOOLCRIB_PROT", "TOOLCRIB_PORT"),
        ("TOOLCRIB_XYZZY", None),
    ]


def test_every_setting_has_a_line_in_the_documentation_and_no_other_is_there() -> None:
    lines = DOCUMENTATION.read_text().splitlines()
    documented = [line.split("`")[1] for line in lines if line.startswith(f"| `{PREFIX}")]
    assert sorted(documented) == sorted(map(variable, Settings.model_fields))


def test_a_duration_is_seconds_or_has_a_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings.load().retain_output is None
    for text, seconds in (("3600", 3600), ("90s", 90), ("15m", 900), ("12h", 43_200), (" 30 d ", 2_592_000)):
        monkeypatch.setenv(PREFIX + "RETAIN_OUTPUT", text)
        assert Settings.load().retain_output == seconds

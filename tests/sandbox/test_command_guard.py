"""What the command guard refuses, and what it must not."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.errors import ErrorCode, ToolError
from app.sandbox.command_guard import check_command, find_word_outside

ROOTS = ["/ws/root", "/real/root/"]

PASSES = [
    "ls -la",
    ".venv/bin/tool",
    "echo https://example.org/a/b",
    "curl -s http://localhost:8080/a/../b --url=https://example.org/a/../b",
    "cat /ws/root/a.txt > /ws/root/b; cd /ws/root",
    'cat "/real/root/a b.txt" --file=/real/root/x',
    # devices and programs
    "ls nothere 2>/dev/null; echo rc",
    "exec 3>&1 2>&1; echo x >/dev/stderr; cat /dev/fd/3 </dev/stdin &>/dev/null",
    "dd if=/dev/zero of=img bs=1M count=1; head -c 16 /dev/urandom | xxd",
    "/usr/bin/env python3 a.py; env FOO=1 /bin/sh x.sh",
    'PATH=/usr/bin:$PATH ls; PATH="/usr/local/bin:$PATH" make',
    # text where others take paths
    "sed 's/x/z/' a.txt",
    "sed '/^#/d' f; sed -n '/a/,/b/p' f; sed -i.bak -e '/x/d' f; sed --expression '/x/d' f; sed -i '/foo/s/a/b/' f",
    "awk '/re/ {print}' f; awk -F/ '{print $1}' f; awk -F / '/x/ {print $1}' f; awk '$0 ~ /x/ && y==/z/' f",
    "grep -rn '/api/v1' src; grep -A 3 -e '/x' f; grep -- '/x' f; grep --regexp=/x f; git log | grep '/x'",
    "rg -g '/src/**' '/re' .",
    "cut -d / -f 2 f; tr / _ < f; sort -t / -k2 f; paste -d / a b",
    "perl -ne '/x/ && print' f; perl -pi -e 's/a/b/' f; node -e \"/a/.test('x')\"; python3 -c \"open('/x')\"",
    "time ! grep '/x' f; if grep -q '/x' f; then echo y; fi; timeout 5 sed '/x/d' f; xargs -n 1 grep '/x' < f",
    "x=$(cat a | sed '/x/d'); echo \"it's `date +%d/%m`\"",
    # no words at all
    "echo $((10 / 2)); (( x = 4 / 2 )); for ((i=0;i<4/2;i++)); do echo $i; done; let 'x = 4 / 2'; expr 6 / 2",
    'case "$1" in /*) echo abs;; ../*|~/*) echo rel;; (/x) ls;; esac; ls',
    '[[ $x == /* ]] && [[ $y =~ ^/foo ]] && [ "$z" = "/" ] && [[ $a =~ ~ ]]',
    'IFS=/ read -r a b <<< "/x/y"; while IFS=/ read -r a; do :; done',
    "echo a # /etc/passwd ../x\nls",
    "cat <<'EOF' > h.txt\n/etc/passwd ../x ~/y $(cat /etc/x)\nEOF\nls",
    "cat <<EOF\n/etc/$x `date`\nEOF\nls",
    "cat <<-EOF\n\t/etc/x\n\tEOF\nls",
    # neither
    "git diff HEAD~1 main..dev; git show HEAD:../x; echo a/b/c ${x#/} ${x:-/etc}; cd sub/..; echo a..b ...",
    "arr=(a b/c); echo ${arr[0]}; f() { echo hi; }; true && ( cd a && ls ) || exit 1; { ls; }; diff <(sort a) <(sort b)",
    "cat \\\n  a.txt; printf 'a\\rb'; tar czf - . | wc -c > out; find . -name '*.py' -exec sed -i s/a/b/ {} +",
]

REFUSED = [
    # the word, however it is quoted
    ("cat /etc/passwd", "/etc/passwd"),
    ("cat '/etc/passwd'", "/etc/passwd"),
    ('cat "/etc/passwd"', "/etc/passwd"),
    ("cat /et'c/pass'wd", "/etc/passwd"),
    ('cat ""/etc/passwd', "/etc/passwd"),
    ("cat \\/etc/passwd", "/etc/passwd"),
    ("cat $'\\x2fetc'", "/etc"),
    ("cat $'\\57etc'", "/etc"),
    ("cat /e\\\ntc", "/etc"),
    ("ls /", "/"),
    ("ls ~", "~"),
    ("cd ~/x", "~/x"),
    ("ls ~root/x", "~root/x"),
    ("cd ..", ".."),
    ("cat ../x", "../x"),
    ("ls ./..", "./.."),
    ("cat a/../../x", "a/../../x"),
    ("echo '1/2 and a/../b'", "1/2 and a/../b"),
    ("/opt/x/bin/y", "/opt/x/bin/y"),
    ("ls /ws", "/ws"),
    ("cat /ws/root-evil/x", "/ws/root-evil/x"),
    ("cat /ws/root/../x", "/ws/root/../x"),
    ("cd /ws/root/..", "/ws/root/.."),
    ("cat file:///etc/passwd", "file:///etc/passwd"),
    ("exec 3<>/dev/tcp/127.0.0.1/80", "/dev/tcp/127.0.0.1/80"),
    ("cp a /dev/shm/x", "/dev/shm/x"),
    # after = and redirections
    ("tool --file=/etc/passwd", "--file=/etc/passwd"),
    ("tool --file=../x", "--file=../x"),
    ("x=/etc; ls $x", "x=/etc"),
    ("a=b=~/y", "a=b=~/y"),
    ("export A=/etc", "A=/etc"),
    ("curl --url=file:///etc/x", "--url=file:///etc/x"),
    ("echo x >/etc/x", "/etc/x"),
    ("echo x 2>> ../x", "../x"),
    ("echo x &>/tmp/y", "/tmp/y"),
    ("cat a.txt; cat<../x", "../x"),
    ("echo > /usr/bin/x", "/usr/bin/x"),
    ("arr=(/etc a)", "/etc"),
    # wherever a command may stand
    ("a=1 cat /etc/x", "/etc/x"),
    ("true&&cat ../x", "../x"),
    ("cat a|tee ../x", "../x"),
    ("(cat /etc/x)", "/etc/x"),
    ("{ cat /etc/x; }", "/etc/x"),
    ("f() { cat /etc/x; }", "/etc/x"),
    ("if true; then cat /etc/x; fi", "/etc/x"),
    ("for f in /etc/*; do :; done", "/etc/*"),
    ("case x in a) cat /etc/x;; esac", "/etc/x"),
    ("case /etc in a) :;; esac", "/etc"),
    ("echo $(cat /etc/x)", "/etc/x"),
    ('echo "a $(cat /etc/x) b"', "/etc/x"),
    ('echo "a `cat /etc/x` b"', "/etc/x"),
    ("diff <(cat /etc/x) b", "/etc/x"),
    ("echo $((1 + $(cat /etc/x)))", "/etc/x"),
    ("echo ${x:-$(cat /etc/x)}", "/etc/x"),
    ("cat <<EOF\n$(cat /etc/x)\nEOF", "/etc/x"),
    ("cat <<'A' <<B\n/a\nA\n/b\nB\ncat ../x", "../x"),
    ("bash -c 'cat /etc/x'", "/etc/x"),
    ("sh -c \"bash -lc 'ls /'\"", "/"),
    ("eval cat '/etc/x'", "/etc/x"),
    # beside what is text
    ("grep root /etc/passwd", "/etc/passwd"),
    ("grep root '/etc/passwd'", "/etc/passwd"),
    ("grep -e x /etc/x", "/etc/x"),
    ("grep -f /etc/x y", "/etc/x"),
    ("sed -n 1p '/etc/x'", "/etc/x"),
    ("sed -f /etc/x y", "/etc/x"),
    ("awk '{print}' /etc/x", "/etc/x"),
    ("[ -e /etc/x ]", "/etc/x"),
    # malformed
    ('cat "/etc/x', "/etc/x"),
    ("cat '/etc/x", "/etc/x"),
    ("echo $(cat /etc/x", "/etc/x"),
    ("echo `cat /etc/x", "/etc/x"),
    ("cat <<EOF\n$(cat /etc/x)", "/etc/x"),
    (") cat /etc/x", "/etc/x"),
]


@pytest.mark.parametrize("command", PASSES)
def test_commands_that_stay_inside_pass(command: str) -> None:
    assert find_word_outside(command, ROOTS) is None


@pytest.mark.parametrize(("command", "word"), REFUSED)
def test_a_word_that_leads_out_is_found(command: str, word: str) -> None:
    assert find_word_outside(command, ROOTS) == word


def test_the_refusal_names_the_word_and_says_how_to_go_on() -> None:
    with pytest.raises(ToolError) as error:
        check_command("cat /etc/passwd", ROOTS)
    assert error.value.code is ErrorCode.PATH_OUTSIDE_WORKSPACE
    assert error.value.details == {"word": "/etc/passwd"}
    for part in ("'/etc/passwd'", "not run", "relative", "not a boundary", "bash.guard"):
        assert part in error.value.message


def test_a_long_word_is_named_by_its_beginning() -> None:
    with pytest.raises(ToolError) as error:
        check_command("cat /" + "x" * 100_000, ROOTS)
    assert len(error.value.message) < 1000


SHELL_SYNTAX = [
    "/", "~", "..", "$(", "$((", "))", ")", "(", "`", "'", '"', "${", "}", "$'", "<<", "<<-", "<<<", "<", ">", ">>", "&>",
    ";", ";;", "|", "&", "\\", "\n", " ", "#", "=", "a", "case", "in", "esac", "eval", "-c", "bash", "EOF",
]  # fmt: skip


@given(
    st.lists(
        st.one_of(
            st.sampled_from(SHELL_SYNTAX),
            st.text(max_size=3),
        ),
        max_size=60,
    ).map("".join)
)
@settings(max_examples=300, deadline=None)
def test_malformed_shell_never_raises(command: str) -> None:
    find_word_outside(command, ROOTS)


@pytest.mark.parametrize(
    "piece",
    ["a /ws/root/b ", "x=/dev/null", '"$(', "`", "${", "$((", "<<a ", "'", "/..", ";", "\\", "case x in ", " ", "(",
     'bash -c "', "[[ a = /x ]] ", "cat <<E\n", "$(cat <<E\n`", "eval ", "=/ws/root"],
)  # fmt: skip
def test_the_time_is_linear(piece: str) -> None:
    def seconds(size: int) -> float:
        text = "/ws/root " + piece * (size // len(piece)) + " /ws/root"
        before = time.process_time()
        find_word_outside(text, ROOTS)
        return time.process_time() - before

    small, large = max(seconds(10_000), 0.001), seconds(80_000)
    assert large / small < 30, f"eight times the length took {large / small:.0f} times as long"

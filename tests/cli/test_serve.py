"""`agentkv serve` as a process: how it starts, how it ends by signals, and how it refuses to start."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from agentkv.cli.commands import main
from support.chat_models import save_chat_model
from support.ctrl_c import heed_ctrl_c
from support.modules import forget

HI = [{"role": "user", "content": "Hi"}]
# Eight choices of 450 tokens take seconds on any machine: long enough to be cut, and to be seen coming to their end.
LONG = {"messages": HI, "stream": True, "n": 8, "max_tokens": 450, "ignore_eos": True, "temperature": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("served") / "tiny-chat")


@contextmanager
def served(
    folder: Path, *options: str, name: str = "tiny-chat", prepare: Any = heed_ctrl_c
) -> Iterator[tuple[Any, httpx.Client]]:
    """The process, listening, and a client of it; killed at the end where a test left it running."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "AGENTKV_CACHE": str(folder.parent / "own")}
    command = [sys.executable, "-m", "agentkv", "serve", str(folder), "--port", "0", "--memory", "64MiB", *options]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=prepare
    ) as process:
        try:
            assert process.stdout is not None
            told = re.fullmatch(
                rf"{name} listens on (http://127\.0\.0\.1:\d+)/v1, documented at \1/docs\n", process.stdout.readline()
            )
            assert told is not None, process.stderr.read() if process.stderr is not None else ""
            with httpx.Client(base_url=told[1], timeout=60, limits=httpx.Limits(max_connections=None)) as client:
                yield process, client
        finally:
            process.kill()


@contextmanager
def streaming(client: httpx.Client) -> Iterator[Iterator[str]]:
    """A long stream that has begun: its lines."""
    with client.stream("POST", "/v1/chat/completions", json={"model": "tiny-chat", **LONG}) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        yield lines


def until_it_drains(client: httpx.Client) -> httpx.Response:
    """The first answer of 503; what is asked before is answered."""
    while True:
        asked = {"model": "tiny-chat", "messages": HI, "max_tokens": 1}
        answer = client.post("/v1/chat/completions", json=asked)
        if answer.status_code != 200:
            return answer


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_what_runs_ends_whole_and_what_comes_gets_503(folder: Path, sent: signal.Signals) -> None:
    with served(folder) as (process, client), streaming(client) as lines:
        process.send_signal(sent)
        refused = until_it_drains(client)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert client.get("/health").status_code == 503
        assert [line for line in lines if line][-1] == "data: [DONE]"
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "prompt tokens" in out
    assert out.startswith("tiny-chat · ")


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_at_once(folder: Path, sent: signal.Signals, code: int) -> None:
    with served(folder) as (process, client), streaming(client) as lines:
        process.send_signal(sent)
        until_it_drains(client)
        process.send_signal(sent)
        cut: list[str] = []
        with pytest.raises(httpx.HTTPError):
            cut.extend(lines)
        out, err = process.communicate(timeout=60)
    assert "data: [DONE]" not in cut
    assert (process.returncode, out, err) == (code, "", "")


def test_what_takes_longer_than_the_time_to_drain_is_ended_and_told(folder: Path) -> None:
    with served(folder, "--drain-timeout", "0.1") as (process, client), streaming(client) as lines:
        process.send_signal(signal.SIGTERM)
        last = [line for line in lines if line][-1]
        out, err = process.communicate(timeout=60)
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
    assert (process.returncode, err) == (1, "agentkv: 1 request was still running after 0.1 s, and ended\n")
    assert "prompt tokens" in out


def test_more_connections_than_a_shell_allows_files_are_taken(folder: Path) -> None:
    def few_files() -> None:
        heed_ctrl_c()
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))

    with served(folder, prepare=few_files) as (process, client), ExitStack() as open_sockets:
        address = (client.base_url.host, client.base_url.port)
        for _ in range(200):
            open_sockets.enter_context(socket.create_connection(address))
        assert client.get("/health").json() == {"status": "ok"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_a_name_and_keys_are_as_they_were_given(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# those of the team\n\nfirst-key\n  second-key  \n")
    with served(folder, "--served-model", "ours", "--api-key-file", str(keys), name="ours") as (_, client):
        assert client.get("/v1/models").status_code == 401
        for key in ("first-key", "second-key"):
            listed = client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).json()
            assert [model["id"] for model in listed["data"]] == ["ours"]


REFUSED = "serve", "no-model-is-loaded-for-this"


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line on stderr of a command line that is wrong."""
    assert main([*REFUSED, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("agentkv: ")
    assert err.count("\n") == 1
    return err


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1:{port}" in refused(capsys, "--port", str(port))


@pytest.mark.parametrize("host", ["nohost.invalid", "a..b", "192.0.2.1"])
def test_a_host_that_is_none_of_this_machine_is_told_as_such(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, host: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key")
    told = refused(capsys, "--host", host, "--api-key-file", str(keys))
    assert f"cannot listen on {host}:8000" in told
    assert told.endswith("; choose another --host\n")


def test_an_empty_host_is_told_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    assert "host is empty" in refused(capsys, "--host", "")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org"])
def test_other_machines_need_a_key(capsys: pytest.CaptureFixture[str], host: str) -> None:
    assert "--api-key-file" in refused(capsys, "--host", host)


def test_a_key_file_must_be_there_and_hold_a_key(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing, empty, binary = tmp_path / "missing", tmp_path / "empty", tmp_path / "binary"
    empty.write_text("\n# none yet\n")
    binary.write_bytes(b"\xff\xfe")
    foreign = tmp_path / "foreign"
    foreign.write_text("# ours\nkey\nschlüssel\n", encoding="utf-8")
    told = refused(capsys, "--api-key-file", str(foreign))
    assert f"line 3 of {foreign} must be printable ASCII" in told
    assert "schl" not in told
    assert "No such file" in refused(capsys, "--api-key-file", str(missing))
    assert "holds no key" in refused(capsys, "--api-key-file", str(empty))
    assert "no UTF-8 text" in refused(capsys, "--api-key-file", str(binary))


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn"])
def test_without_the_extra_it_is_told_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    forget(monkeypatch, "agentkv.server")
    monkeypatch.setitem(sys.modules, missing, None)
    told = refused(capsys)
    assert missing in told
    assert "extra 'server'" in told

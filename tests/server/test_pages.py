"""Pages in a browser of the machine that serves: they are refused where no key keeps them out, and programs are not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.servers import in_process, over_http, refusal_of, scripted_runtime

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "Hi"}]})

STRANGERS = [
    {"origin": "https://example.org"},
    {"origin": "null"},
    {"origin": "http://localhost.example.org"},
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "same-site"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},  # A form that is sent.
]


@pytest.mark.parametrize("headers", STRANGERS, ids=str)
async def test_another_sites_page_is_refused_without_a_key(door: Any, headers: dict[str, str]) -> None:
    async with scripted_runtime(["Yes."]) as runtime, door(runtime) as client:
        # Of text, as a browser sends it without asking first.
        answer = await client.post(CHAT, content=BODY, headers={"content-type": "text/plain", **headers})
        assert refusal_of(answer, 403)["code"] == "cross_site"
        assert "access-control-allow-origin" not in answer.headers
        assert (await client.post(CHAT, content=BODY)).status_code == 200


async def test_the_servers_own_page_and_a_link_to_it_are_served(door: Any) -> None:
    async with scripted_runtime(["Yes."]) as runtime, door(runtime) as client:
        own = {"origin": str(client.base_url).rstrip("/"), "sec-fetch-site": "same-origin"}
        assert (await client.post(CHAT, content=BODY, headers=own)).status_code == 200
        followed = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
        assert (await client.get("/docs", headers=followed)).status_code == 200


async def test_where_a_key_is_needed_it_is_all_that_is_needed(door: Any) -> None:
    async with scripted_runtime(["Yes."]) as runtime, door(runtime, api_keys=("one",)) as client:
        from_a_page = {"authorization": "Bearer one", "origin": "https://example.org", "host": "models.example.org"}
        assert (await client.post(CHAT, content=BODY, headers=from_a_page)).status_code == 200


_ODD = (
    "[::1]evil",
    "[::1]evil:80",
    "[::1",
    "localhost:80@example.org",
    "localhost:x",
    "localhost:80:80",
    "[localhost]",
)


async def test_a_name_that_was_made_to_point_here_is_refused(door: Any) -> None:
    async with scripted_runtime([]) as runtime, door(runtime) as client:
        for host in (
            "example.org",
            "example.org:8000",
            "127.0.0.1.example.org",
            "localhost@example.org",
            "[::2]",
            *_ODD,
        ):
            error = refusal_of(await client.get("/v1/models", headers={"host": host}), 403)
            assert error["code"] == "unknown_host"
            assert "to localhost, 127.0.0.1, [::1], not to" in error["message"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9000", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8000"])
async def test_the_names_of_this_machine_are_served(door: Any, host: str) -> None:
    async with scripted_runtime([]) as runtime, door(runtime) as client:
        assert (await client.get("/v1/models", headers={"host": host})).status_code == 200


async def test_the_configured_host_is_served_by_its_name() -> None:
    async with scripted_runtime([]) as runtime, over_http(runtime, host="127.9.9.9") as client:
        assert (await client.get("/v1/models", headers={"host": "127.9.9.9:1"})).status_code == 200


async def test_in_process_any_name_of_the_url_is_the_servers() -> None:
    async with scripted_runtime([]) as runtime, in_process(runtime) as client:
        assert (await client.get("http://anything.example/v1/models")).status_code == 200

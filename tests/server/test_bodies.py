"""Bodies that Python reads and JSON has not."""

from __future__ import annotations

from typing import Any

import pytest

from support.servers import refusal_of, scripted_runtime

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("padding", [0, 2**16])
async def test_numbers_that_json_has_not_are_no_json(door: Any, constant: str, padding: int) -> None:
    body = f'{{"model": "scripted", "messages": [], "metadata": {{"a": [{constant}]}}{" " * padding}}}'
    async with scripted_runtime([]) as runtime, door(runtime) as client:
        error = refusal_of(await client.post(CHAT, content=body), 400)
        assert error["code"] == "invalid_json"
        assert f"{constant} is no JSON" in error["message"]

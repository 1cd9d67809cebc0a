"""The shop: its fault is a real one, and its tools read the real files whatever they are asked."""

from __future__ import annotations

import itertools

import pytest

from agentkv.main_job import JOB, TOOLS
from agentkv.main_job.shop.orders import total
from agentkv.main_job.shop.prices import PRICES, price_of_many
from agentkv.main_job.shop_tools import PATHS, TASKS, WORDS, outline, plan, read_file, search
from agentkv.tools import as_tools


def test_the_planted_fault_shows_at_ten_and_at_no_other_count() -> None:
    wrong = [count for count in range(100) if price_of_many("bread", count) != PRICES["bread"] * (count - count // 10)]
    assert wrong == [10]


def test_delivery_is_free_from_fifty_euros() -> None:
    assert total({"tea": 22}) == 20 * 250
    assert total({"tea": 1}) == 250 + 490


@pytest.mark.parametrize("path", PATHS)
def test_a_file_is_read_line_by_line(path: str) -> None:
    head, *lines = read_file(path).splitlines()  # type: ignore[arg-type]
    assert head == f"{path}, {len(lines)} lines:"
    assert [line.partition(":")[0] for line in lines] == [str(number + 1) for number in range(len(lines))]
    parts = outline(path).splitlines()[1:]  # type: ignore[arg-type]
    assert len(parts) >= 3
    for part in parts:
        number = int(part.removeprefix("line ").partition(":")[0])
        assert 1 <= number <= len(lines)


@pytest.mark.parametrize(("word", "path"), [*itertools.product(WORDS, PATHS)])
def test_a_search_shows_lines_of_the_file_or_says_that_there_are_none(word: str, path: str) -> None:
    lines = read_file(path).splitlines()[1:]  # type: ignore[arg-type]
    head, *shown, last = search(word, path).splitlines()  # type: ignore[arg-type]
    assert head.startswith(f"{path} has '{word}' in ")
    assert last.startswith(f"Lines with '{word}' in other files: ")
    found = [line for line in lines if word in line.partition(":")[2].lower()]
    assert f" in {len(found)} of its " in head
    if found:
        assert found[0] in shown
    else:
        assert shown == ["nothing to show; another file may have it"]


def test_the_plan_gives_each_worker_a_task_of_its_own() -> None:
    (schema,) = (tool.parameters for tool in as_tools(TOOLS) if tool.name == "plan")
    tasks = schema["properties"]["tasks"]
    assert (tasks["minItems"], tasks["maxItems"], tasks["uniqueItems"]) == (4, 4, True)
    assert tasks["items"]["enum"] == list(TASKS) == list(JOB.steps)
    assert plan(["rules", "prices", "orders", "delivery"]).startswith("worker 1: rules; worker 2: prices;")


def test_each_worker_calls_two_tools_that_exist() -> None:
    names = {tool.name for tool in as_tools(TOOLS)} - {"plan"}
    assert all(len(steps) == 2 and set(steps) <= names for steps in JOB.steps.values())

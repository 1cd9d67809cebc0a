"""Tables in the documents name everything that exists: an option that is added is an option that is described."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import agentkv
import agentkv.testing
from agentkv.cli.chat_commands import _COMMANDS as CHAT_COMMANDS
from agentkv.cli.commands import app
from agentkv.policies import known_policies
from agentkv.server.openai.chat_request import ChatRequest
from agentkv.server.openai.completion_request import CompletionRequest
from agentkv.usage import MISS_CAUSES, Usage

ROOT = Path(__file__).resolve().parents[2]


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def options_of_runtime() -> list[str]:
    # weights raises in this version; it is named among what is not in it.
    return [name for name in inspect.signature(agentkv.Runtime).parameters if name != "weights"]


@pytest.mark.parametrize("option", options_of_runtime())
def test_each_option_of_runtime_is_described(option: str) -> None:
    assert re.search(rf"^\| [^|]*`{option}`[^|]* \|", text_of("docs/runtime.md"), re.M)


@pytest.mark.parametrize("parameter", [field.name for field in fields(agentkv.SamplingParams)])
def test_each_sampling_parameter_is_described(parameter: str) -> None:
    assert f"| `{parameter}` |" in text_of("docs/sampling.md")


@pytest.mark.parametrize(
    "error",
    sorted(
        name
        for name in agentkv.__all__
        if isinstance(getattr(agentkv, name), type)
        and name != "AgentKVError"
        and issubclass(getattr(agentkv, name), agentkv.AgentKVError)
    ),
)
def test_each_error_says_what_to_do_about_it(error: str) -> None:
    assert re.search(rf"^\| [^|]*`{error}`[^|]* \|", text_of("docs/errors.md"), re.M)
    assert re.search(rf"─ {error}\b", text_of("docs/errors.md"))


@pytest.mark.parametrize("policy", known_policies())
def test_each_policy_is_described(policy: str) -> None:
    assert f'`"{policy}"`' in text_of("docs/cache.md")


@pytest.mark.parametrize("cause", MISS_CAUSES)
def test_each_cause_of_a_miss_is_explained(cause: str) -> None:
    assert f"| `{cause}` |" in text_of("docs/misses.md")


@pytest.mark.parametrize("figure", [field.name for field in fields(Usage) if field.name != "cached_by_tier"])
def test_each_figure_of_usage_is_described(figure: str) -> None:
    assert re.search(rf"`{figure}`", text_of("docs/misses.md"))


@pytest.mark.parametrize("field", sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields}))
def test_each_field_of_a_request_is_described(field: str) -> None:
    assert re.search(rf"^\| [^|]*`[^`|]*\b{field}\b[^`|]*`[^|]* \|", text_of("docs/server.md"), re.M)


def options_of_serve() -> list[str]:
    program: Any = get_command(app)
    serve = program.commands["serve"]
    return [option for parameter in serve.params for option in parameter.opts if option != "model"]


@pytest.mark.parametrize("option", options_of_serve())
def test_each_option_of_the_server_is_in_its_synopsis(option: str) -> None:
    section = text_of("docs/commands.md").split("## agentkv serve")[1].split("\n## ")[0]
    assert f"[{option} " in section


def public_names(kind: type) -> list[str]:
    return sorted(name for name in vars(kind) if not name.startswith("_"))


@pytest.mark.parametrize("name", public_names(agentkv.Session))
def test_each_part_of_a_session_is_described(name: str) -> None:
    assert re.search(rf"`[^`]*\b{name}\b[^`]*`", text_of("docs/sessions.md"))


@pytest.mark.parametrize("name", sorted(agentkv.testing.__all__))
def test_each_part_of_the_testing_package_is_described(name: str) -> None:
    assert re.search(rf"\b{name}\b", text_of("docs/testing.md"))


@pytest.mark.parametrize("command", [*(command.callback.__name__ for command in app.registered_commands), "models"])
def test_each_command_has_a_section_of_its_own(command: str) -> None:
    assert re.search(rf"^## agentkv {command}$", text_of("docs/commands.md"), re.M)


@pytest.mark.parametrize("command", sorted(CHAT_COMMANDS))
def test_each_command_of_a_chat_is_listed(command: str) -> None:
    assert f"`/{command}" in text_of("docs/commands.md")

"""Arguments that nobody means: each is refused by its name, and by the class that says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentkv import ConfigError, ModelNotFound, Rate, Runtime
from agentkv.cache import Event
from agentkv.sampling_params import SamplingParams
from agentkv.testing import scripted
from support.engines import cold
from support.runtimes import serving
from support.tiny_chat import tiny_chat_tokenizer
from support.tiny_models import tiny_model

HUGE = 10**400
"""An int that no float can hold."""


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
@pytest.mark.parametrize("value", [HUGE, -HUGE, float("nan"), float("inf")], ids=["huge", "-huge", "nan", "inf"])
def test_a_number_out_of_every_range_is_a_value_error(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a number from"):
        SamplingParams(**{name: value})


def test_a_timeout_that_no_float_holds_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="timeout must be a number of seconds that a float can hold"):
        Runtime("smollm2-135m").stream("hi", timeout=HUGE)


@pytest.mark.parametrize("seconds", [HUGE, float("inf"), float("nan"), 0, -1])
def test_a_rate_is_over_some_time(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"Rate\.seconds must be a number above 0"):
        Rate(1, seconds)


class RaisingKinds:
    def on_event(self, event: Event) -> None: ...

    @property
    def kinds(self) -> frozenset[str]:
        raise ArithmeticError("kinds")


class NoKinds:
    kinds: Any = 5

    def on_event(self, event: Event) -> None: ...


class OneKind(NoKinds):
    kinds = "stored"


class UnhashableKinds(NoKinds):
    kinds = ([],)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": "9" * 400 + "TiB"}, "no more than a machine can have"),
        ({"memory": "0.0001KB"}, "memory must be at least 1 byte"),
        ({"threads": 100_000}, "threads must be at most 1024, got 100000"),
        ({"listener": RaisingKinds()}, r"and that of RaisingKinds is not: ArithmeticError\('kinds'\)"),
        ({"listener": NoKinds()}, r"listener\.kinds must be a collection of kinds of event, got 5"),
        ({"listener": OneKind()}, r"listener\.kinds must be a collection of kinds of event, got 'stored'"),
        ({"listener": UnhashableKinds()}, r"listener\.kinds must be a collection .*unhashable"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_an_option_that_cannot_be_is_named_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Runtime("smollm2-135m", **options)


@pytest.mark.parametrize(
    "model",
    ["x" * 5000, Path("x" * 5000), "org/" + "x" * 300, "/" + "x/" * 2500, "~nosuchuser/x", Path("~nosuchuser/x")],
    ids=lambda model: f"{type(model).__name__} of {len(str(model))}",
)
async def test_a_name_that_no_file_can_have_is_no_model(model: Any) -> None:
    with pytest.raises(ModelNotFound, match="no model ") as caught:
        await Runtime(model).start()
    assert len(str(caught.value)) < 500


def test_a_template_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "latin.jinja"
    path.write_bytes("{{ 'é' }}".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"latin\.jinja is no text in UTF-8"):
        Runtime("smollm2-135m", chat_template=path)


@pytest.mark.parametrize(
    "model", [None, 5, "", b"smollm2-135m", ["smollm2-135m"], object()], ids=lambda model: type(model).__name__
)
def test_what_can_be_no_model_is_refused_at_once(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"model is a built-in name, a folder, .* got "):
        Runtime(model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "float8"},
            r"dtype='float8' is not known; known are auto, bfloat16, .* \(bf16, fp16, fp32 for short\)",
        ),
        ({"dtype": torch.int8}, r"dtype=torch\.int8 is not known"),
        ({"dtype": 16}, "dtype=16 is not known"),
        ({"device": "cuda:"}, 'device must be "cpu", "cuda" or one of several as "cuda:1", got \'cuda:\''),
        ({"device": "CPU"}, "got 'CPU'"),
        ({"device": 0}, "got 0"),
    ],
)
def test_a_dtype_or_a_device_of_no_known_form_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Runtime("smollm2-135m", **options)


@pytest.mark.parametrize("dtype", ["fp32", "float32", torch.float32], ids=str)
async def test_a_dtype_may_be_told_as_reports_print_it(dtype: Any) -> None:
    async with Runtime(scripted([]), dtype=dtype, num_pages=64) as runtime:
        assert runtime.report().served_by.dtype == "fp32"


async def test_a_device_that_torch_does_not_know_is_told_with_those_that_are_meant() -> None:
    with pytest.raises(ConfigError) as caught:
        await Runtime(scripted([]), device="gpu").start()
    assert str(caught.value) == 'device=\'gpu\' is no device: use "cpu", "cuda" or "cuda:1"'


def test_the_name_of_a_template_is_not_taken_for_its_text() -> None:
    with pytest.raises(ConfigError, match=r"chat_template='chatml\.jinja' holds neither .* give its Path"):
        Runtime("smollm2-135m", chat_template="chatml.jinja")


async def test_a_template_with_a_syntax_error_is_told_at_the_start_with_its_line() -> None:
    runtime = Runtime(tiny_model("llama"), tokenizer=tiny_chat_tokenizer(), chat_template="hello\n{% if %}")
    with pytest.raises(ConfigError, match="chat_template: line 2: "):
        await runtime.start()


async def test_a_template_that_refuses_a_first_message_may_render_others() -> None:
    template = (
        "{% if messages|length < 2 %}{{ raise_exception('two, please') }}{% endif %}"
        "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}"
    )
    async with serving(tiny_model("llama"), tokenizer=tiny_chat_tokenizer(), chat_template=template) as runtime:
        assert runtime.count_tokens([{"role": "user", "content": "ab"}] * 2) == 4


@pytest.mark.parametrize("make", [torch.tensor, lambda ids: torch.tensor(ids[0]), list], ids=["1-d", "0-d", "list"])
async def test_end_tokens_may_stand_in_a_tensor(make: Callable[[list[int]], Any]) -> None:
    model = tiny_model("llama")
    first = cold("llama").answer((1, 2, 3), 1)[0]
    model.generation_config.eos_token_id = make([first])
    async with serving(model) as runtime:
        reply: Any = await runtime.generate([1, 2, 3], max_tokens=5)
    assert (reply.token_ids, reply.finish_reason) == ((first,), "stop")

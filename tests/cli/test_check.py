"""`agentkv models --check` and what is behind it: a verdict that can be relied on, either way."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import agentkv.checking
from agentkv.checking import ModelCheck, check_model
from agentkv.cli.commands import main
from agentkv.model_runner import ModelRunner
from support.tiny_models import REFUSED, tiny_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTKV_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("models")
    for kind in ("gemma2", "qwen2_moe_window"):
        tiny_model(kind).save_pretrained(parent / kind)
    return {path.name: path for path in parent.iterdir()}


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def check_with(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, **replaced: Any) -> ModelCheck:
    for name, value in replaced.items():
        monkeypatch.setattr(agentkv.checking, name, value)
    return check_model(model)


# -- the check ------------------------------------------------------------------------------------------------------


def test_an_exact_model_is_found_exact_and_every_way_of_serving_it_used_the_cache_as_far_as_it_could() -> None:
    check = check_model(tiny_model("qwen2_window"))
    assert (check.verdict, check.reason) == ("exact", "")
    assert (check.full_layers, check.sliding_layers, check.kv_shapes) == (2, 2, ((2, 12, 12),))
    cold, warm, shared = check.runs
    assert [run.way for run in check.runs] == ["cold", "warm", "shared"]
    assert all(run.equal_tokens and run.max_difference <= check.allowed_difference for run in check.runs)
    assert cold.cached_tokens == 0
    assert warm.cached_tokens == warm.prompt_tokens - 4  # of each of four prompts the last token is computed again
    assert 0 < shared.cached_tokens < warm.cached_tokens
    assert check.distinct_tokens >= 6


def test_a_model_object_is_given_back_as_it_was() -> None:
    model = tiny_model("llama").train()
    implementation = model.config._attn_implementation
    check_model(model)
    assert model.training
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_a_model_that_is_refused_says_why(kind: str) -> None:
    check = check_model(tiny_model(kind))
    assert check.verdict == "refused"
    assert check.reason
    assert check.runs == ()


class _Bent(ModelRunner):
    """A runner that is right for short contexts; behind longer ones it takes the second page for the first, too.

    To exchange the two would change nothing: keys carry their own positions.
    """

    def run(self, sequences: Any, shared: Any = ()) -> torch.Tensor:
        bent = [
            dataclasses.replace(each, page_ids=[each.page_ids[1], *each.page_ids[1:]])
            if each.context_len > 64 and len(each.token_ids) == 1
            else each
            for each in sequences
        ]
        return super().run(bent)


def test_a_fault_that_shows_only_behind_a_long_context_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = agentkv.checking.open_runner

    def open_bent(*arguments: Any, **keywords: Any) -> ModelRunner:
        runner = opened(*arguments, **keywords)
        runner.__class__ = _Bent
        return runner

    check = check_with(tiny_model("llama"), monkeypatch, open_runner=open_bent)
    assert check.verdict == "not exact"
    assert "logits differ" in check.reason


def test_a_cache_that_never_hits_is_not_what_was_to_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(agentkv.checking.PrefixCache):
        def lookup(self, *arguments: Any, **keywords: Any) -> Any:
            return super().lookup(*arguments, **(keywords | {"reuse": False}))

    check = check_with(tiny_model("llama"), monkeypatch, PrefixCache=Forgetful)
    assert check.verdict == "not exact"
    assert check.reason.startswith("served warm only 0 of ")


def test_a_model_with_a_short_context_is_checked_within_it() -> None:
    check = check_model(tiny_model("gpt2", n_positions=64))
    assert check.verdict == "exact"
    assert max(run.prompt_tokens for run in check.runs) <= 4 * (64 - check.output_tokens)


def test_what_is_being_done_is_told() -> None:
    told: list[str] = []
    check_model(tiny_model("llama"), progress=told.append)
    assert [step for step in told if "cold" in step or "warm" in step or "shared" in step]


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_row_for_each_model_and_ends_with_0_where_all_are_exact(
    capsys: pytest.CaptureFixture[str], folders: dict[str, Path]
) -> None:
    code, out, err = run(capsys, "models", "--check", folders["gemma2"])
    assert (code, err) == (0, "")
    (row,) = [line for line in out.splitlines() if line.startswith("gemma2")]
    assert "2 full + 2 sliding" in row
    assert "exact" in row.split()


def test_the_command_ends_with_1_and_the_reason_where_one_is_refused(
    capsys: pytest.CaptureFixture[str], folders: dict[str, Path]
) -> None:
    code, out, _ = run(capsys, "models", "--check", folders["gemma2"], "--check", folders["qwen2_moe_window"])
    assert code == 1
    assert "qwen2_moe_window: refused: gives other logits over pages" in out


def test_the_command_prints_json_that_holds_all_that_the_check_returns(
    capsys: pytest.CaptureFixture[str], folders: dict[str, Path]
) -> None:
    code, out, _ = run(capsys, "models", "--check", folders["gemma2"], "--json")
    assert code == 0
    (check,) = json.loads(out)
    assert set(check) == {field.name for field in dataclasses.fields(ModelCheck)}
    assert check["verdict"] == "exact"


def test_a_name_that_is_wrong_does_not_cost_the_others_their_check(
    capsys: pytest.CaptureFixture[str], folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # A long path would be folded in the table.
    cut = Path("cut.gguf")
    cut.write_bytes(b"GGUF")
    code, out, err = run(capsys, "models", "--check", "/no/such", "--check", cut, "--check", folders["gemma2"])
    assert (code, err) == (2, "")
    rows = out.splitlines()
    assert rows[1].split()[:3] == ["/no/such", "not", "found"]
    assert rows[2].split()[:3] == [str(cut), "not", "loaded"]
    assert rows[3].split()[0] == "gemma2"
    assert "exact" in rows[3].split()
    assert "/no/such: not found: no model '/no/such'." in out
    assert f"{cut}: not loaded: {cut} is not a whole .gguf file" in out


def test_names_that_are_all_wrong_are_told_without_importing_anything_large(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "agentkv.checking", None)
    code, out, err = run(capsys, "models", "--check", "/no/such", "--check", "/nor/this")
    assert (code, out) == (2, "")
    first, second = err.splitlines()
    assert first.startswith("agentkv: no model '/no/such'.")
    assert second.startswith("no model '/nor/this'.")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--check", "smolm2-135m"), "(did you mean it?)"),
        (("--check", "/no/such.gguf"), "/no/such.gguf"),
        (("--json",), "--check"),
        (("--check", "--json"), "a path is wanted, and --json is an option"),
        (("--check", __file__), "is a file, but no .gguf. Name a .gguf file or the folder that holds config.json"),
        (("--check", "smollm2-135m", "list"), "list"),
    ],
)
def test_a_mistake_ends_with_2_and_one_line(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    code, out, err = run(capsys, "models", *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert told in err


@pytest.mark.real_model
def test_the_built_in_model_is_exact(real_model_folder: Path) -> None:
    check = check_model(real_model_folder, output_tokens=6)
    assert (check.verdict, check.reason) == ("exact", "")
    assert check.full_layers == 30

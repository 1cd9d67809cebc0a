"""Decode steps that are written into one place and run again, in Triton's interpreter and with a capture of the tests.

`tests/kernels/test_triton.py` runs this file in a process of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from agentkv.model_runner import ModelRunner, PackedSequence, open_runner
from agentkv.model_runner.decode_graphs import DecodeGraphs
from agentkv_kernels import SharedRun
from support.tiny_models import tiny_model

PROMPTS = [[5, 17, 200, 31, 8, 90, 41, 2, 77], [60, 61, 3], [5, 17, 200, 31, 12, 150, 9, 10, 11, 12]]
PAGES = [[1, 2, 3, 4], [5, 6], [1, 7, 8, 9]]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    """Prompts of three sequences in pages of 4, the first and the last over one page; all else is NaN.

    Layers of gemma2 are sliding and full in turns, with softcaps.
    """
    kinds = ["sliding_attention", "full_attention"]
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    made = open_runner(
        tiny_model("gemma2", layer_types=kinds, **sizes), name="gemma2", fingerprint=b"",
        verdicts=tmp_path_factory.mktemp("verdicts"), context_limit=32, page_size=4, num_pages=12, backend="triton",
    )  # fmt: skip
    made.store.fill_slots(range(12 * 4), float("nan"))
    made.run([PackedSequence(prompt, 0, pages) for prompt, pages in zip(PROMPTS[:2], PAGES[:2], strict=True)])
    made.run([PackedSequence(PROMPTS[2][4:], 4, PAGES[2])])
    yield made
    made.close()


def run_again(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """As a graph: the tensor that was returned is written anew from whatever stands in the inputs."""
    out = run()

    def replay() -> Tensor:
        return out.copy_(run())

    return replay


def _decodes(*which: int, further: int = 0) -> list[PackedSequence]:
    return [PackedSequence([40 + i + further], len(PROMPTS[i]) + further, PAGES[i]) for i in which]


def test_steps_that_are_replayed_give_what_they_give_as_they_come(runner: ModelRunner) -> None:
    graphs = DecodeGraphs(runner.forward_decodes, runner.store, context_limit=32, capture=run_again, sizes=(3, 8))
    steps: list[tuple[list[PackedSequence], list[SharedRun]]] = [
        (_decodes(0, 1), []),
        ([*_decodes(1, 0, further=1), *_decodes(2)], []),
        ([*_decodes(0, further=2), *_decodes(2, further=1)], [SharedRun((0, 1), 0, 1)]),
    ]
    for step, runs in steps:
        replayed = graphs.run(step, runs)
        assert replayed is not None
        assert replayed.metadata.num_seqs == 3
        torch.testing.assert_close(replayed.logits, runner.run(step), rtol=0, atol=1e-4)


def test_what_is_no_step_of_decodes_or_too_large_runs_as_it_comes(runner: ModelRunner) -> None:
    graphs = DecodeGraphs(runner.forward_decodes, runner.store, context_limit=32, capture=run_again, sizes=(1, 2))
    assert graphs.run(_decodes(0, 1, 2)) is None
    assert graphs.run([PackedSequence([1, 2], 3, PAGES[1])]) is None
    assert graphs.run([PackedSequence([1], 3, PAGES[1], logits="none")]) is None
    assert graphs.run([PackedSequence([1], 35, [1, 2, 3, 4, 5, 6, 7, 8, 9])]) is None


def test_a_replay_that_remembers_the_step_it_was_made_from_is_found_out(
    runner: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    def stale(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        out = run()
        return lambda: out

    graphs = DecodeGraphs(runner.forward_decodes, runner.store, context_limit=32, capture=stale, sizes=(2,))
    with caplog.at_level(logging.WARNING, logger="agentkv"):
        assert graphs.run(_decodes(0, 1)) is None
        assert graphs.run(_decodes(0, 1)) is None
    assert [record.message for record in caplog.records] == [
        "decode steps are not replayed from CUDA graphs: what was replayed differs from what was run as it came"
    ]


def test_a_model_that_cannot_be_captured_runs_as_it_comes_and_the_log_says_why(
    runner: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = DecodeGraphs(runner.forward_decodes, runner.store, context_limit=32, capture=failing, sizes=(2,))
    with caplog.at_level(logging.WARNING, logger="agentkv"):
        assert graphs.run(_decodes(0)) is None
        assert graphs.run(_decodes(0)) is None
    assert len(caplog.records) == 1
    assert "cannot be captured (operation not permitted" in caplog.text

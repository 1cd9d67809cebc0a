"""`agentkv demo`: a planner and four workers do a job: with the cache, without it, and by plain transformers."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from agentkv.cli.chat_template import require_chat_template
from agentkv.cli.console import console, examples, progress_line
from agentkv.cli.demo_display import as_dict, show_call, show_outcome
from agentkv.cli.demo_outcome import Outcome, Way

if TYPE_CHECKING:
    from agentkv.main_job import AnswerRules, CallMade, Played
    from agentkv.models import LoadedModel

__all__ = ["DEMO_EXAMPLES", "demo"]

DEMO_EXAMPLES = examples(
    "agentkv demo",
    "agentkv demo --full",
    "agentkv demo --model ~/models/qwen3-0.6b",
    "agentkv demo --json > demo.json",
)

_DEFAULT_MODEL = "smollm2-135m"
_POOR_PROSE = (
    'A model of 135M parameters writes poor prose: an answer may begin with "<tool_response>". What counts are the '
    "tokens; --model takes any other."
)
_TOKENS_A_STEP = 256
"""A step of so many tokens takes a fraction of a second on a small machine, which is how long Ctrl-C may wait."""


def demo(
    model: Annotated[
        str, typer.Option(metavar="NAME", help="A built-in name, a folder, a .gguf file or a hub id.")
    ] = _DEFAULT_MODEL,
    full: Annotated[
        bool, typer.Option("--full", help="Have transformers repeat every call, not those of two agents alone.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON, and nothing else.")] = False,
) -> None:
    """A planner and four workers look for a fault: what the cache saves, and that no answer changes.

    The planner makes a plan, four forks of it call tools over real files side by side, and the planner answers from
    their reports. All of it is done three times in fp32: by agentkv, by agentkv with its cache off, and, for the
    planner and one worker, by transformers' own generate. Takes a minute and a half on two cores with the
    default model, which is fetched first if it is not here (93 MB), and two and a half without compiled kernels.

    Exit code 1: the answers differ, or more was computed than what differs.
    """
    out = Console(stderr=True, quiet=True) if as_json else console()
    with progress_line(None if as_json else out) as progress:
        outcome = _Demo(out, progress).play(model, full=full)
    if as_json:
        typer.echo(json.dumps(as_dict(model, outcome), indent=2))
    else:
        show_outcome(outcome, out)
    if not outcome.holds:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Demo:
    """The job in three ways, told to a console as it goes on."""

    out: Console
    progress: Callable[[str], None]

    def play(self, model: str, *, full: bool) -> Outcome:
        self.progress(f"loading {model}")
        from agentkv.main_job import count_positions
        from agentkv.models import LoadOptions, resolve

        source = resolve(model)
        from agentkv.models.index import import_transformers_models
        from agentkv.models.quiet import paused_garbage_collection, quiet_transformers

        with paused_garbage_collection():
            import transformers  # noqa: F401  # the seconds that this takes are not the model's

            import_transformers_models()

        began = time.perf_counter()
        loaded = source.load(LoadOptions(dtype="float32"))
        try:
            seconds = time.perf_counter() - began
            self.out.print(f"{source.name} in fp32, loaded in {seconds:.1f} s", highlight=False)
            if model == _DEFAULT_MODEL:
                self.out.print(_POOR_PROSE, style="dim", highlight=False, soft_wrap=True)
            warm, off, rules, page_size = asyncio.run(self._serve(loaded, model))
            with quiet_transformers():
                plain = self._generate(loaded, rules, warm, full=full)
        finally:
            loaded.restore()
        ways = (Way("agentkv", warm, warm), Way("agentkv, cache off", off, warm), plain)
        return Outcome(ways, count_positions(warm.calls, page_size))

    async def _serve(self, loaded: LoadedModel, model: str) -> tuple[Played, Played, AnswerRules, int]:
        """The job with the cache and, in the same runtime, without it."""
        from agentkv import main_job
        from agentkv.runtime import Runtime

        self.progress("starting agentkv")
        async with Runtime(loaded.model, tokenizer=loaded.tokenizer, max_num_batched_tokens=_TOKENS_A_STEP) as runtime:
            require_chat_template(runtime, model, "do the job")
            warm = await main_job.play(runtime, main_job.JOB, on_call=self._heading("agentkv"))
            off = await main_job.play(runtime, main_job.JOB, cache=False, on_call=self._heading("agentkv, cache off"))
            return warm, off, main_job.answer_rules(runtime), runtime.served_now().page_size

    def _generate(self, loaded: LoadedModel, rules: AnswerRules, warm: Played, *, full: bool) -> Way:
        """Recorded prompts, one after another: of every agent, or of the planner and its first worker."""
        from agentkv import main_job

        calls = warm.calls if full else warm.of([warm.calls[0].agent, warm.workers[0]])
        name = "transformers generate" if full else f"transformers generate, {len(calls)} of {len(warm.calls)} calls"
        plain = main_job.play_plainly(loaded.model, rules, calls, on_call=self._heading(name))
        seconds = warm.seconds if full else sum(call.seconds for call in calls)
        return Way(name, plain, replace(warm, calls=calls, seconds=seconds))

    def _heading(self, name: str) -> Callable[[CallMade], None]:
        """A heading now, and from now on a line for each call."""
        self.progress(f"{name}: a planner, four workers, the planner again")
        self.out.print(f"\n{name}", style="bold")
        return lambda call: show_call(call, self.out)

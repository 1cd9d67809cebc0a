"""Hear what the cache stores and evicts, run by run.

python examples/listener.py
"""

import asyncio
from collections import Counter

import agentkv
from agentkv.cache import Event


class PageLog:
    """Counts pages. It is called on the engine's thread, in the middle of an operation: it only takes note."""

    kinds = frozenset({"stored", "evicted"})  # hits are not asked for, so they are not even built

    def __init__(self) -> None:
        self.pages: Counter[str] = Counter()
        self.causes: Counter[str] = Counter()

    def on_event(self, event: Event) -> None:
        self.pages[event.kind] += len(event.page_ids)
        self.causes[f"{event.kind} by {event.cause}"] += 1


async def main() -> None:
    log = PageLog()
    # 24 pages of 16 tokens: three prompts of 160 tokens do not fit together.
    async with agentkv.Runtime("smollm2-135m", listener=log, num_pages=1 + 24) as runtime:
        for first in (1_000, 2_000, 3_000):
            await runtime.generate(list(range(first, first + 160)), max_tokens=4)
        pages = runtime.report().to_dict()["pages"]
    print("pages:", dict(log.pages))
    print("events:", dict(log.causes))
    print("stored less evicted is what is cached:", log.pages["stored"] - log.pages["evicted"] == pages["cached"])


asyncio.run(main())

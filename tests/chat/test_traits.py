"""What a template can say is learnt once for each set of options, of which any caller may send what it likes."""

from __future__ import annotations

import threading
from typing import Any

from agentkv.chat import ChatTemplate
from agentkv.testing.tokenizer import chat_tokenizer

PLAIN = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


class Counting:
    """A tokenizer that counts what it renders."""

    chat_template = PLAIN
    added_tokens_decoder: dict[int, Any] = {}  # noqa: RUF012  # a tokenizer's own, which is a dict

    def __init__(self) -> None:
        self._tokenizer = chat_tokenizer()
        self.rendered = 0

    def apply_chat_template(self, *arguments: Any, **options: Any) -> str:
        self.rendered += 1
        text: str = self._tokenizer.apply_chat_template(*arguments, **{**options, "chat_template": PLAIN})
        return text


def learnt_anew(template: ChatTemplate, tokenizer: Counting, kwargs: dict[str, Any]) -> bool:
    before = tokenizer.rendered
    template.traits(kwargs)
    return tokenizer.rendered > before


def test_the_latest_sets_of_options_are_known_and_no_more_than_those() -> None:
    tokenizer = Counting()
    template = ChatTemplate(tokenizer)
    assert learnt_anew(template, tokenizer, {})
    for number in range(100):
        assert learnt_anew(template, tokenizer, {"number": number})
        assert not learnt_anew(template, tokenizer, {}), "what is asked for all along stays known"
    assert not learnt_anew(template, tokenizer, {"number": 99})
    assert learnt_anew(template, tokenizer, {"number": 0})


def test_options_in_another_order_are_the_same_and_of_another_type_are_not() -> None:
    tokenizer = Counting()
    template = ChatTemplate(tokenizer)
    assert learnt_anew(template, tokenizer, {"one": 1, "two": [2]})
    assert not learnt_anew(template, tokenizer, {"two": [2], "one": 1})
    for other in ({"one": "1", "two": [2]}, {"one": True, "two": [2]}, {"one": 1, "two": "[2]"}):
        assert learnt_anew(template, tokenizer, other)


def test_who_asks_for_what_is_known_does_not_wait_for_what_is_being_learnt() -> None:
    entered, may_go = threading.Event(), threading.Event()

    class Slow(Counting):
        def apply_chat_template(self, *arguments: Any, **options: Any) -> str:
            if "slow" in options:
                entered.set()
                assert may_go.wait(60)
            return super().apply_chat_template(*arguments, **options)

    template = ChatTemplate(Slow())
    known = template.traits()
    learning = threading.Thread(target=template.traits, args=({"slow": True},))
    learning.start()
    try:
        assert entered.wait(60)
        asked: list[Any] = []
        asking = threading.Thread(target=lambda: asked.append(template.traits()), daemon=True)
        asking.start()
        asking.join(30)
        assert asked == [known]
    finally:
        may_go.set()
        learning.join()


def test_many_first_calls_at_once_learn_once() -> None:
    tokenizer = Counting()
    alone = Counting()
    ChatTemplate(alone).traits({"a": 1})
    template = ChatTemplate(tokenizer)
    threads = [threading.Thread(target=template.traits, args=({"a": 1},)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokenizer.rendered == alone.rendered

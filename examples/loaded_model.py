"""Serve a transformers model that is loaded already: it is borrowed, not copied, and answers as before meanwhile.

python examples/loaded_model.py
"""

import asyncio

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import agentkv
from agentkv.models import BUILTIN_MODELS, ModelStore, ensure_builtin

# A folder as any other: put your own, or a hub id. This one is the built-in model's.
FOLDER = ensure_builtin(BUILTIN_MODELS["smollm2-135m"], ModelStore())


async def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    prompt = tokenizer("The seven days of the week are Monday,", return_tensors="pt")
    prompt_ids = prompt["input_ids"][0].tolist()

    async with agentkv.Runtime(model, tokenizer=tokenizer) as runtime:
        await runtime.generate(prompt_ids, max_tokens=1)
        reply = await runtime.generate(prompt_ids, max_tokens=8, ignore_eos=True)
        plain = model.generate(**prompt, min_new_tokens=8, max_new_tokens=8, do_sample=False)
        print(repr(reply.text))
        print(f"{reply.usage.cached_tokens} of {reply.usage.prompt_tokens} prompt tokens cached")
        print(f"transformers gives the same tokens: {plain[0, len(prompt_ids) :].tolist() == list(reply.token_ids)}")


asyncio.run(main())

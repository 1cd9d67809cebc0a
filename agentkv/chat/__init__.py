"""Chat templates, messages, and what a model wrote: text, reasoning and calls of tools."""

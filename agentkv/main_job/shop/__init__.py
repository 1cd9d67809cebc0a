"""A small shop with one fault in it: the files that the agents of the main job read. Nothing else imports it."""

__all__: list[str] = []

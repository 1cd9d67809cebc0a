"""What things cost, in cents."""

PRICES = {"tea": 250, "bread": 410, "cake": 320}
"""The price of one item, by its name."""

BULK = 10
"""Of so many equal items one is free."""


def price_of(item: str) -> int:
    """The price of one item. KeyError where the shop does not sell it."""
    return PRICES[item]


def price_of_many(item: str, count: int) -> int:
    """The price of `count` equal items, those that are free left out."""
    free = count // BULK if count > BULK else 0
    return price_of(item) * (count - free)

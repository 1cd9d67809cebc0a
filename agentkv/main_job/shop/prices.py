"""What things cost, in cents."""

PRICES = {"tea": 250, "bread": 410, "cake": 320}

BULK = 10
"""Of so many equal items one is free."""


def price_of_many(item: str, count: int) -> int:
    """The price of equal items, those that are free left out."""
    free = count // BULK if count > BULK else 0
    return PRICES[item] * (count - free)

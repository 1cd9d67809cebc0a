"""What a customer is given: one line for each item, and the total."""

from .orders import total
from .prices import price_of_many


def amount(cents: int) -> str:
    """Cents as a price in euros, with two places."""
    return f"{cents // 100}.{cents % 100:02d} EUR"


def line(item: str, count: int) -> str:
    """One line of the receipt: how many of an item, and their price."""
    return f"{count} x {item}: {amount(price_of_many(item, count))}"


def receipt(basket: dict[str, int]) -> str:
    """The whole receipt of a basket, with the total below the lines."""
    lines = [line(item, count) for item, count in basket.items()]
    return "\n".join([*lines, f"total: {amount(total(basket))}"])

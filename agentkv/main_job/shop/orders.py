"""Baskets: counts by item, and what they cost."""

from .prices import price_of_many

DELIVERY_FEE = 490
FREE_DELIVERY = 5000


def subtotal(basket: dict[str, int]) -> int:
    """The price of all items."""
    return sum(price_of_many(item, count) for item, count in basket.items())


def total(basket: dict[str, int]) -> int:
    """The subtotal, and the fee where there is one."""
    price = subtotal(basket)
    return price if price >= FREE_DELIVERY else price + DELIVERY_FEE

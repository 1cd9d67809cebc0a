"""Baskets: what a customer takes, and what it costs."""

from .prices import price_of_many

DELIVERY_FEE = 490
"""Cents for a basket that is brought."""

FREE_DELIVERY = 5000
"""A basket of so many cents is brought without a fee."""


def subtotal(basket: dict[str, int]) -> int:
    """The price of all items of a basket, given as counts by item."""
    return sum(price_of_many(item, count) for item, count in basket.items())


def total(basket: dict[str, int], *, delivered: bool = False) -> int:
    """The subtotal, and the delivery fee where there is one."""
    price = subtotal(basket)
    return price + DELIVERY_FEE if delivered and price < FREE_DELIVERY else price

"""Exact products of decimal numbers: in binary, 0.29 x 100 is 28.999999999999996."""

from fractions import Fraction


def exact_product(factor: float, count: int) -> Fraction:
    """Returns `factor` x `count`, where `factor` is the decimal number that it is printed as."""
    return Fraction(repr(float(factor))) * count

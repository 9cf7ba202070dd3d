"""How colours stand out from each other, as WCAG 2 defines it."""

Colour = tuple[float, ...]  # red, green and blue, each from 0 to 1


def channels(code: str) -> Colour:
    """A colour of CSS, #rrggbb."""
    return tuple(int(code[at : at + 2], 16) / 255 for at in (1, 3, 5))


def contrast(first: Colour | str, other: Colour | str) -> float:
    """The ratio of two colours' luminances: from 1 to 21."""

    def luminance(colour: Colour | str) -> float:
        parts = channels(colour) if isinstance(colour, str) else colour
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(other)))
    return (high + 0.05) / (low + 0.05)

"""What errors suggest where an argument looks like a known mistake."""

from __future__ import annotations

import itertools


def missing_axes(name: str, shape, full) -> str:
    """The ways in which further axes of 1 make a mask or a bias fit, as the end of a message.

    Args:
        name: of the argument.
        shape: of the array that does not fit; a layer has put axes of 1 in front.
        full: [*batch, heads, q_length, kv_length].
    """
    few = tuple(shape)
    if len(few) == len(full):
        few = few[next((i for i, n in enumerate(few) if n > 1), len(few)) :]
    labels = (*["batch"] * (len(full) - 3), "heads", "q_length", "kv_length")
    ways = []
    for before in itertools.combinations(range(len(full) - 1), max(len(few) - 1, 0)):
        places = (*before, len(full) - 1)  # what hides nothing by keys is no mask
        fits = len(few) == len(places) < len(full) and all(
            n in (1, full[i]) for n, i in zip(few, places, strict=True)
        )
        if fits:
            index = ", ".join(":" if i in places else "None" for i in range(len(full)))
            ways.append(f"{name}[{index}] if it is [{', '.join(labels[i] for i in places)}]")
    return f"; add axes, as in {' or '.join(ways[:3])}" if ways else ""

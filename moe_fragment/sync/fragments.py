"""Which parameters are synced together: fragments of the trunk, strided over the layers and balanced by bytes.

Streaming DiLoCo (arXiv 2501.18512, section 2.3) syncs one fragment at a time. Strided fragments take every P-th layer,
so that each holds shallow and deep ones; what belongs to no layer (embeddings, the last norm, the head) goes where the
least is, largest first.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

_LAYER = re.compile(r"\.(\d+)\.")


def split(sizes: Mapping[str, int], count: int) -> list[dict[str, int]]:
    """Deal parameters into `count` fragments; each parameter is in exactly one, whole.

    Args:
        sizes: elements by parameter name.
        count: number of fragments.

    Returns:
        elements by name, per fragment; the same for the same sizes, whatever their order.

    Raises:
        ValueError: there are fewer units (layers and parameters outside of layers) than fragments.
    """
    layers: dict[int, list[str]] = defaultdict(list)
    outside = []
    for name in sorted(sizes):
        number = _LAYER.search(name)
        if number:
            layers[int(number.group(1))].append(name)
        else:
            outside.append(name)
    if units(sizes) < count:
        raise ValueError(
            f"expected at most {units(sizes)} fragments (layers, and parameters outside of them), got {count}"
        )
    fragments: list[dict[str, int]] = [{} for _ in range(count)]
    for position, layer in enumerate(sorted(layers)):
        fragments[position % count].update({name: sizes[name] for name in layers[layer]})
    for name in sorted(outside, key=lambda name: (-sizes[name], name)):
        smallest = min(range(count), key=lambda index: (sum(fragments[index].values()), index))
        fragments[smallest][name] = sizes[name]
    return fragments


def units(sizes: Mapping[str, int]) -> int:
    """What `split` can deal: layers, and parameters outside of layers."""
    numbers = [_LAYER.search(name) for name in sizes]
    return len({number.group(1) for number in numbers if number}) + numbers.count(None)

"""Which items of two lists are the same thing: a page that is a document here, an anchor or a test document there."""

from __future__ import annotations

from ramen.data.dataset import Texts


def shared_uids(items: Texts, others: Texts) -> set[str]:
    """The uids that name the same item in both lists.

    A word or a code that stands in both does. Numbers are often each table's own (rows of an export, from 0): those in
    common count only if most of them agree in name as well, one beginning with the other, whatever the case.
    """
    names = dict(zip(others.uids, others.names, strict=True))
    common = {uid: name for uid, name in zip(items.uids, items.names, strict=True) if uid in names}
    numbers = {uid: name for uid, name in common.items() if uid.isdecimal()}
    agreeing = sum(_alike(name, names[uid]) for uid, name in numbers.items())
    return set(common) if 2 * agreeing >= len(numbers) else common.keys() - numbers.keys()


def _alike(name: str, other: str) -> bool:
    short, long = sorted((name.strip().casefold(), other.strip().casefold()), key=len)
    return bool(short) and long.startswith(short)

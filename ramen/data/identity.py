"""Items that occur in two lists, such as a page that is both a document and an anchor."""

from __future__ import annotations

from ramen.data.dataset import Texts


def shared_uids(items: Texts, others: Texts) -> set[str]:
    """Return the uids that denote the same item in both lists.

    A shared uid that is not a number denotes the same item. Numbers may be row numbers that each table counts from 0:
    shared numbers only count if the names of at least half of them agree, that is, one name is a prefix of the other,
    ignoring case.
    """
    other_names = dict(zip(others.uids, others.names, strict=True))
    shared = {uid: name for uid, name in zip(items.uids, items.names, strict=True) if uid in other_names}
    numbers = {uid: name for uid, name in shared.items() if uid.isdecimal()}
    agreeing = sum(_names_agree(name, other_names[uid]) for uid, name in numbers.items())
    return set(shared) if 2 * agreeing >= len(numbers) else shared.keys() - numbers.keys()


def _names_agree(name: str, other: str) -> bool:
    short, long = sorted((name.strip().casefold(), other.strip().casefold()), key=len)
    return bool(short) and long.startswith(short)

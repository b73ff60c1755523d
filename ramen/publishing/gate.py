"""Which registered version an alias points to: the gate, and moving the alias forward and back.

The registry has no compare-and-set, so a publisher that moved the alias looks again: it lists the versions that
passed the gate against the same former holder and, if one of them is better, hands the alias over. Each publisher
tags its version before it moves the alias and looks after, so the last one to move sees all the others, and the
alias ends with the best. An alias is only ever given to a version that was loaded and asked.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ramen.config import IndexConfig
from ramen.console import warn
from ramen.errors import GateRefused, RamenError, reason
from ramen.publishing.holdout_comparison import Ask, HoldoutComparison
from ramen.publishing.registry import connect, load_version, plain_errors, resolve_version, version_in_answer

SMOKE_TAG, GATE_TAG, ALIAS_TAG, REASON_TAG, AGAINST_TAG, COMPARED_TAG = (
    "smoke", "gate", "gate.alias", "gate.reason", "gate.against", "gate.compared",
)  # fmt: skip
UPDATED_TAG = "updated_from"
"""Number of the version whose index was updated."""
ORIGIN = "origin."
"""Begins the tags of an updated version that say what was measured of the evaluated version at its beginning."""
PASSED, REFUSED, FAILED, WITHDRAWN = "passed", "refused", "failed", "withdrawn"
NOT_COMPARED = "not compared with version {}, which was evaluated on another dataset"
NOBODY = "none"
"""In `gate.against`: the alias pointed nowhere."""
ROUNDS = 20
"""Times a publisher looks again before it leaves the alias to the others."""

ROUNDING = 1e-6
"""Points by which a metric may be lower without being worse: sums in another order differ by less."""


@dataclass(frozen=True)
class Decision:
    """What the gate said, and the numbers it said it on.

    Attributes:
        against: number of the version that held the alias, None when there was none.
        reasons: why the alias must not move; none = it may.
        compared: metric -> (candidate, holder, tolerated loss).
        note: how it was compared with a version that was evaluated on another dataset, or why it was not.
    """

    against: int | None
    reasons: list[str] = field(default_factory=list)
    compared: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    note: str = ""

    @property
    def refused(self) -> str:
        """The reasons in one line; empty when the gate is open."""
        return "; ".join(self.reasons)

    def tags(self, alias: str) -> dict[str, str]:
        """The decision as tags of the version; of several aliases it tried for, the last."""
        return {
            GATE_TAG: REFUSED if self.reasons else PASSED,
            ALIAS_TAG: alias,
            REASON_TAG: self.refused or self.note,
            AGAINST_TAG: str(self.against) if self.against is not None else NOBODY,
            COMPARED_TAG: json.dumps(self.compared),
        }


def gate(
    candidate: Mapping[str, str],
    holder: Mapping[str, str] | None,
    settings: IndexConfig,
    against: int | None = None,
    note: str = "",
) -> Decision:
    """Decide whether the alias may move to the candidate.

    Its own figures are held to `min_recall` and `max_query_ms`. Metrics are compared with the holder's when both are of
    the same dataset; one that the holder does not report is not compared.

    Args:
        candidate, holder: version tags; holder None = the alias points nowhere.
        settings: `min_recall`, `max_query_ms`, `gate`.
        against: the holder's number.
        note: of the decision, where both are compared.
    """
    elsewhere = holder is not None and holder.get("dataset") != candidate.get("dataset")
    decision = Decision(against, note=note or (NOT_COMPARED.format(against) if elsewhere else ""))
    reasons = decision.reasons
    recall = _number(candidate, "ann_recall")
    if not recall >= settings.min_recall:
        reasons.append(f"ANN recall {recall:.4f} is below index.min_recall = {settings.min_recall:g}; "
                       "raise index.ef_search, or index.nprobe, or use index.kind=flat")  # fmt: skip
    if settings.max_query_ms and not _number(candidate, "query_ms") <= settings.max_query_ms:
        reasons.append(
            f"a query takes {_number(candidate, 'query_ms'):.1f} ms, more than index.max_query_ms = "
            f"{settings.max_query_ms:g}"
        )
    if holder is None or elsewhere:
        return decision
    for metric, tolerance in settings.gate.items():
        if metric not in candidate:
            reasons.append(f"the evaluation has no {metric}, which index.gate compares")
            continue
        if metric not in holder:
            continue
        new, old = _number(candidate, metric), _number(holder, metric)
        decision.compared[metric] = (new, old, tolerance)
        if not new >= old - tolerance - ROUNDING:
            reasons.append(
                f"{metric} {new:.2f} is worse than the {old:.2f} of version {against}"
                + (f" by more than {tolerance:g}" if tolerance else "")
            )
    return decision


def try_promote(name: str, version: int, settings: IndexConfig, ask: Ask | None = None) -> Decision:
    """Let a version that answered try for `settings.alias`: gate, tag the decision, move, look again.

    Args:
        name, version: the candidate.
        settings: alias and gate.
        ask: asks a holder that was evaluated on another dataset; None = such a holder is not compared, unless it took
            the alias from the one that the candidate updates.

    Returns:
        The last decision; refused when another publisher's version, published meanwhile, is better.
    """
    client = connect()
    asked = functools.cache(lambda holder: _asked(name, holder, ask))
    for _ in range(ROUNDS):
        decision = _judge(client, name, version, settings, asked)
        if decision.reasons or decision.against == version:  # refused, or another publisher handed it the alias
            return decision
        if _holder(client, name, settings.alias) != decision.against:
            continue  # moved while the gate was thinking
        _move(client, name, settings.alias, version, decision.against)
        rival = _best(client, name, version, settings)
        if rival != version:
            yielded = Decision(rival, [f"version {rival}, published at the same time, is better"])
            _tag(client, name, version, yielded.tags(settings.alias))
            _move(client, name, settings.alias, rival, decision.against)
            return yielded
        if _holder(client, name, settings.alias) == version:
            break
    return decision


def _judge(
    client: Any,
    name: str,
    version: int,
    settings: IndexConfig,
    asked: Callable[[int], tuple[HoldoutComparison | None, str, str]],
) -> Decision:
    """The gate's decision against whoever else holds the alias now; it is on the version's tags."""
    holder = _holder(client, name, settings.alias)
    if holder == version:
        return Decision(holder)
    own, note, lost = evaluated(_tags(client, name, version)), "", ""
    held = None if holder is None else evaluated(_tags(client, name, holder))
    if holder is not None and held is not None and held.get("dataset") != own.get("dataset"):
        contest, note, lost = asked(holder)
        if contest:
            own |= _as_tags(contest.candidate)
            held = {"dataset": own["dataset"], **_as_tags(contest.holder)}
        elif not lost and UPDATED_TAG in own:
            lost = f"version {holder}, which holds the alias, is none that it was made from; update that one"
    decision = gate(own, held, settings, holder, note)
    if lost:
        decision.reasons.append(lost)
    _tag(client, name, version, decision.tags(settings.alias))
    return decision


def _asked(name: str, holder: int, ask: Ask | None) -> tuple[HoldoutComparison | None, str, str]:
    """Candidate and holder on the candidate's test documents, what to say of it, and why the alias must not move."""
    if ask is None:
        return None, "", ""
    try:
        contest = ask(load_version(name, str(holder)))
    except RamenError as error:
        force = "`ramen promote VERSION --force` moves the alias all the same"
        return None, "", f"version {holder}, which holds the alias, cannot be asked ({reason(error)}); {force}"
    note = f"version {holder}, evaluated on another dataset, was asked {contest.documents:,} test documents"
    return contest, note, ""


def _as_tags(metrics: Mapping[str, float]) -> dict[str, str]:
    return {key: str(value) for key, value in metrics.items()}


def _best(client: Any, name: str, version: int, settings: IndexConfig) -> int:
    """The best of the versions that tried for the same alias, passed the gate against the same holder and were not
    withdrawn since."""
    own = _tags(client, name, version)
    metric = next(iter(settings.gate), "")
    rivals = {version: own}
    for one in client.search_model_versions(f"name = '{name}'"):
        tags = dict(one.tags)
        passed = tags.get(SMOKE_TAG) == PASSED and tags.get(GATE_TAG) == PASSED
        if passed and all(tags.get(key) == own.get(key) for key in (ALIAS_TAG, AGAINST_TAG, "dataset")):
            rivals[version_in_answer(one.version)] = tags
    return max(rivals, key=lambda number: (_number(rivals[number], metric) if metric in own else 0.0, number))


def promote(name: str, alias: str, version: str, settings: IndexConfig | None = None) -> tuple[int, int | None]:
    """Point an alias to a registered version, forward or back; warns if the gate had nothing to compare it with.

    Args:
        name, alias: registered model and alias.
        version: number or alias of the version to point to.
        settings: None = move without the gate, else the gate must let it.

    Returns:
        The version the alias points to, and the one it pointed to before, None if it is new.

    Raises:
        GateRefused: the gate says no; the decision is on the version.
        RamenError: no such model or version, or the version never answered.
    """
    client = connect(must_exist=True)
    number = resolve_version(name, version)
    with plain_errors(f"moving alias {alias!r} of {name!r}"):
        tags = _tags(client, name, number)
        if tags.get(SMOKE_TAG) != PASSED:
            raise RamenError(f"{name} version {number} never answered its smoke query; publish it again")
        before = _holder(client, name, alias)
        if before == number:
            return number, before
        if settings is not None:
            held = None if before is None else evaluated(_tags(client, name, before))
            decision = gate(evaluated(tags), held, settings, before)
            _tag(client, name, number, decision.tags(alias))
            if decision.reasons:
                raise GateRefused(f"{name} version {number}: {decision.refused}")
            if decision.note:
                warn(f"{name} version {number}: {decision.note}")
        _withdraw(client, name, alias, before)
        _take_up(client, name, alias, number)
        _move(client, name, alias, number, before)
    return number, before


def rollback(name: str, alias: str) -> tuple[int, int]:
    """Point an alias to the version that held it before the present one took it.

    Returns:
        (version left, version taken up again).

    Raises:
        RamenError: the alias points nowhere, or nothing held it before.
    """
    client = connect(must_exist=True)
    holder = resolve_version(name, alias)
    with plain_errors(f"rolling back alias {alias!r} of {name!r}"):
        before = _tags(client, name, holder).get(_before_tag(alias), NOBODY)
        if before == NOBODY:
            raise RamenError(
                f"nothing held alias {alias!r} of {name!r} before version {holder}; "
                "`ramen registry` lists the versions, `ramen promote N` takes any of them"
            )
        taken = resolve_version(name, before)
        _withdraw(client, name, alias, holder)
        _take_up(client, name, alias, taken)
        client.set_registered_model_alias(name, alias, str(taken))
    return holder, taken


def was_withdrawn(tags: Mapping[str, str], alias: str) -> bool:
    """Whether a person took this alias from the version of these tags."""
    return tags.get(GATE_TAG) == WITHDRAWN and tags.get(ALIAS_TAG, alias) == alias


def _withdraw(client: Any, name: str, alias: str, version: int | None) -> None:
    """Note that a person took the alias from a version, so that no publisher hands it back."""
    if version is not None and _tags(client, name, version).get(ALIAS_TAG, alias) == alias:
        client.set_model_version_tag(name, str(version), GATE_TAG, WITHDRAWN)


def _take_up(client: Any, name: str, alias: str, version: int) -> None:
    """A version that a person gives the alias again is no longer withdrawn."""
    if was_withdrawn(_tags(client, name, version), alias):
        client.set_model_version_tag(name, str(version), GATE_TAG, PASSED)


def _move(client: Any, name: str, alias: str, version: int, before: int | None) -> None:
    """Give the alias to a version, which keeps in a tag who held it before."""
    client.set_model_version_tag(name, str(version), _before_tag(alias), str(before) if before else NOBODY)
    client.set_registered_model_alias(name, alias, str(version))


def _before_tag(alias: str) -> str:
    return f"alias.{alias}.before"


def _holder(client: Any, name: str, alias: str) -> int | None:
    number = client.get_registered_model(name).aliases.get(alias)
    return None if number is None else version_in_answer(number)


def evaluated(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags of a version as the gate compares them: of an updated one its own, and what its origin was evaluated as.

    An update has other labels than were evaluated, and the encoder that was.
    """
    if UPDATED_TAG not in tags:
        return dict(tags)
    return dict(tags) | {key.removeprefix(ORIGIN): value for key, value in tags.items() if key.startswith(ORIGIN)}


def _tags(client: Any, name: str, version: int | None) -> dict[str, str]:
    return dict(client.get_model_version(name, str(version)).tags)


def _tag(client: Any, name: str, version: int, tags: Mapping[str, str]) -> None:
    for key, value in tags.items():
        client.set_model_version_tag(name, str(version), key, value)


def _number(tags: Mapping[str, str], key: str) -> float:
    try:
        return float(tags[key])
    except (KeyError, ValueError):
        return math.nan

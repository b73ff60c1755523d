"""The promotion gate, and moving an alias between registered versions.

The champion is the version that the alias points to. A candidate is promoted if it answers its smoke queries and is
not worse than the champion.

The MLflow registry has no compare-and-set, so publishers that run concurrently settle the alias among themselves.
Each one tags its decision before it moves the alias. Afterwards it lists the versions that passed the gate against
the same champion, and if one of them is better, it moves the alias there. The last publisher to move the alias sees
the tags of all others, so the alias ends with the best version.
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
from ramen.errors import GateRefused, RamenError, first_line
from ramen.publishing.holdout_comparison import CompareWithChampion, HoldoutComparison
from ramen.publishing.registry import connect, load_version, parse_version, resolve_version, translate_store_errors

SMOKE_TAG, GATE_TAG, ALIAS_TAG, REASON_TAG, AGAINST_TAG, COMPARED_TAG = (
    "smoke", "gate", "gate.alias", "gate.reason", "gate.against", "gate.compared",
)  # fmt: skip
UPDATED_TAG = "updated_from"
"""Number of the version whose labels were updated."""
ORIGIN_PREFIX = "origin."
"""Prefix of an updated version's tags with the evaluation of the version that the first update started from."""
PASSED, REFUSED, FAILED, WITHDRAWN = "passed", "refused", "failed", "withdrawn"
NO_VERSION = "none"
"""Tag value: the alias did not exist."""
NOT_COMPARED = "not compared with version {}, which was evaluated on another dataset"
MAX_ATTEMPTS = 20
"""Attempts of a publisher to settle the alias while other publishers move it."""
ROUNDING = 1e-6
"""Difference of a metric, in points, that is ignored: summation order changes the last digits."""


@dataclass(frozen=True)
class GateDecision:
    """The gate's decision on a candidate.

    Attributes:
        champion: number of the version that it was compared with, None if the alias did not exist.
        reasons: why the candidate is refused; empty = it passed.
        compared: metric -> (candidate, champion, tolerated loss).
        note: how a champion that was evaluated on another dataset was compared, or that it was not.
    """

    champion: int | None
    reasons: list[str] = field(default_factory=list)
    compared: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    note: str = ""

    @property
    def refused(self) -> str:
        """The reasons in one line; empty if the candidate passed."""
        return "; ".join(self.reasons)

    def tags(self, alias: str) -> dict[str, str]:
        """Return the decision as version tags; a later decision, for any alias, replaces them."""
        return {
            GATE_TAG: REFUSED if self.reasons else PASSED,
            ALIAS_TAG: alias,
            REASON_TAG: self.refused or self.note,
            AGAINST_TAG: str(self.champion) if self.champion is not None else NO_VERSION,
            COMPARED_TAG: json.dumps(self.compared),
        }


def gate(
    candidate: Mapping[str, str],
    champion: Mapping[str, str] | None,
    settings: IndexConfig,
    number: int | None = None,
    note: str = "",
) -> GateDecision:
    """Decide whether the alias may move to the candidate.

    The candidate must reach `min_recall` and `max_query_ms`. Evaluation metrics are compared if both versions were
    evaluated on the same dataset; a metric that the champion lacks is not compared.

    Args:
        candidate, champion: version tags; champion None = the alias does not exist.
        settings: `min_recall`, `max_query_ms`, `gate`.
        number: the champion's version number.
        note: for the decision, unless the datasets differ.
    """
    other_dataset = champion is not None and champion.get("dataset") != candidate.get("dataset")
    decision = GateDecision(number, note=note or (NOT_COMPARED.format(number) if other_dataset else ""))
    reasons = decision.reasons
    recall, query_ms = _number(candidate, "ann_recall"), _number(candidate, "query_ms")
    if not recall >= settings.min_recall:
        reasons.append(f"ANN recall {recall:.4f} is below index.min_recall = {settings.min_recall:g}; "
                       "raise index.ef_search, or index.nprobe, or use index.kind=flat")  # fmt: skip
    if settings.max_query_ms and not query_ms <= settings.max_query_ms:
        reasons.append(f"a query takes {query_ms:.1f} ms, more than index.max_query_ms = {settings.max_query_ms:g}")
    if champion is None or other_dataset:
        return decision
    for metric, tolerance in settings.gate.items():
        if metric not in candidate:
            reasons.append(f"the evaluation has no {metric}, which index.gate compares")
            continue
        if metric not in champion:
            continue
        new, old = _number(candidate, metric), _number(champion, metric)
        decision.compared[metric] = (new, old, tolerance)
        if not new >= old - tolerance - ROUNDING:
            reasons.append(
                f"{metric} {new:.2f} is worse than the {old:.2f} of version {number}"
                + (f" by more than {tolerance:g}" if tolerance else "")
            )
    return decision


def try_promote(
    name: str, version: int, settings: IndexConfig, compare_with_champion: CompareWithChampion | None = None
) -> GateDecision:
    """Promote a version that passed its smoke test, if it passes the gate; tag it with the decision.

    Args:
        name, version: the candidate.
        settings: alias and gate.
        compare_with_champion: compares the candidate with a champion that was evaluated on another dataset. None =
            their metrics are not compared, and a candidate that is an index update is refused.

    Returns:
        The last decision; a refusal if a better version was published concurrently.
    """
    client = connect()
    compare = functools.cache(lambda champion: _compare_on_holdout(name, champion, compare_with_champion))
    for _ in range(MAX_ATTEMPTS):
        decision = _decide(client, name, version, settings, compare)
        if decision.reasons or decision.champion == version:  # refused, or another publisher promoted it
            return decision
        if _aliased_version(client, name, settings.alias) != decision.champion:
            continue  # the alias moved since the decision
        _set_alias(client, name, settings.alias, version, decision.champion)
        best = _best_passed(client, name, version, settings)
        if best != version:
            refusal = GateDecision(best, [f"version {best}, published at the same time, is better"])
            _set_tags(client, name, version, refusal.tags(settings.alias))
            _set_alias(client, name, settings.alias, best, decision.champion)
            return refusal
        if _aliased_version(client, name, settings.alias) == version:
            break
    return decision


def _decide(
    client: Any,
    name: str,
    version: int,
    settings: IndexConfig,
    compare: Callable[[int], tuple[HoldoutComparison | None, str, str]],
) -> GateDecision:
    """Return the decision against the current champion, after tagging the candidate with it."""
    number = _aliased_version(client, name, settings.alias)
    if number == version:
        return GateDecision(number)
    candidate, note, refusal = evaluation_tags(_version_tags(client, name, version)), "", ""
    champion = None if number is None else evaluation_tags(_version_tags(client, name, number))
    if number is not None and champion is not None and champion.get("dataset") != candidate.get("dataset"):
        comparison, note, refusal = compare(number)
        if comparison:
            candidate |= _as_tags(comparison.candidate)
            champion = {"dataset": candidate["dataset"], **_as_tags(comparison.champion)}
        elif not refusal and UPDATED_TAG in candidate:
            refusal = (
                f"version {number}, the current champion, is not the version that this update started from; "
                f"run `ramen index-update` on version {number}"
            )
    decision = gate(candidate, champion, settings, number, note)
    if refusal:
        decision.reasons.append(refusal)
    _set_tags(client, name, version, decision.tags(settings.alias))
    return decision


def _compare_on_holdout(
    name: str, champion: int, compare_with_champion: CompareWithChampion | None
) -> tuple[HoldoutComparison | None, str, str]:
    """Compare the candidate with the champion on the candidate's test documents.

    Returns:
        The comparison, a note for the decision, and the reason for refusing the candidate. The comparison is None
        without `compare_with_champion`, and if it fails; only a failure is a reason.
    """
    if compare_with_champion is None:
        return None, "", ""
    try:
        comparison = compare_with_champion(load_version(name, str(champion)))
    except RamenError as error:
        force = "`ramen promote VERSION --force` moves the alias without a comparison"
        return None, "", f"version {champion}, the current champion, cannot be compared ({first_line(error)}); {force}"
    note = f"compared with version {champion}, evaluated on another dataset, on {comparison.documents:,} test documents"
    return comparison, note, ""


def _as_tags(metrics: Mapping[str, float]) -> dict[str, str]:
    return {key: str(value) for key, value in metrics.items()}


def _best_passed(client: Any, name: str, version: int, settings: IndexConfig) -> int:
    """Return the best version, this one included, that passed the gate for the same alias, champion and dataset.

    The first metric of `settings.gate` decides, and of equal versions the newest wins. Versions that were withdrawn
    since do not count.
    """
    tags = _version_tags(client, name, version)
    metric = next(iter(settings.gate), "")
    passed = {version: tags}
    for other in client.search_model_versions(f"name = '{name}'"):
        if other.tags.get(SMOKE_TAG) != PASSED or other.tags.get(GATE_TAG) != PASSED:
            continue
        if all(other.tags.get(key) == tags.get(key) for key in (ALIAS_TAG, AGAINST_TAG, "dataset")):
            passed[parse_version(other.version)] = dict(other.tags)
    return max(passed, key=lambda number: (_number(passed[number], metric) if metric in tags else 0.0, number))


def promote(name: str, alias: str, version: str, settings: IndexConfig | None = None) -> tuple[int, int | None]:
    """Point an alias to a registered version; warn if the gate could not compare the two versions.

    Args:
        name, alias: registered model and alias.
        version: number or alias of the version to promote.
        settings: of the gate; None = promote without the gate.

    Returns:
        The version that the alias points to now, and the one before, None if the alias is new.

    Raises:
        GateRefused: the gate refuses the version; the decision is in the version's tags.
        RamenError: there is no such model or version, or the version failed its smoke test.
    """
    client = connect(must_exist=True)
    number = resolve_version(name, version)
    with translate_store_errors(f"moving alias {alias!r} of {name!r}"):
        tags = _version_tags(client, name, number)
        if tags.get(SMOKE_TAG) != PASSED:
            raise RamenError(f"{name} version {number}: did not pass its smoke test; publish it again")
        before = _aliased_version(client, name, alias)
        if before == number:
            return number, before
        if settings is not None:
            champion = None if before is None else evaluation_tags(_version_tags(client, name, before))
            decision = gate(evaluation_tags(tags), champion, settings, before)
            _set_tags(client, name, number, decision.tags(alias))
            if decision.reasons:
                raise GateRefused(f"{name} version {number}: {decision.refused}")
            if decision.note:
                warn(f"{name} version {number}: {decision.note}")
        _withdraw(client, name, alias, before)
        _reinstate(client, name, alias, number)
        _set_alias(client, name, alias, number, before)
    return number, before


def rollback(name: str, alias: str) -> tuple[int, int]:
    """Point an alias back to the champion before the current one.

    Returns:
        The version that lost the alias, and the version that has it again.

    Raises:
        RamenError: the alias does not exist, or has no earlier version.
    """
    client = connect(must_exist=True)
    champion = resolve_version(name, alias)
    with translate_store_errors(f"rolling back alias {alias!r} of {name!r}"):
        before = _version_tags(client, name, champion).get(_previous_tag(alias), NO_VERSION)
        if before == NO_VERSION:
            raise RamenError(
                f"alias {alias!r} of {name!r} has no version before version {champion}; "
                "list the versions with `ramen registry` and promote one with `ramen promote N`"
            )
        previous = resolve_version(name, before)
        _withdraw(client, name, alias, champion)
        _reinstate(client, name, alias, previous)
        client.set_registered_model_alias(name, alias, str(previous))
    return champion, previous


def is_withdrawn(tags: Mapping[str, str], alias: str) -> bool:
    """Return whether a user moved this alias away from the version with these tags."""
    return tags.get(GATE_TAG) == WITHDRAWN and tags.get(ALIAS_TAG, alias) == alias


def _withdraw(client: Any, name: str, alias: str, version: int | None) -> None:
    """Tag a version that a user takes the alias from, so that no publisher gives it back."""
    if version is not None and _version_tags(client, name, version).get(ALIAS_TAG, alias) == alias:
        client.set_model_version_tag(name, str(version), GATE_TAG, WITHDRAWN)


def _reinstate(client: Any, name: str, alias: str, version: int) -> None:
    """Undo `_withdraw` for a version that a user promotes again."""
    if is_withdrawn(_version_tags(client, name, version), alias):
        client.set_model_version_tag(name, str(version), GATE_TAG, PASSED)


def _set_alias(client: Any, name: str, alias: str, version: int, previous: int | None) -> None:
    """Point the alias to a version; tag it with the previous champion for `rollback`."""
    client.set_model_version_tag(name, str(version), _previous_tag(alias), str(previous) if previous else NO_VERSION)
    client.set_registered_model_alias(name, alias, str(version))


def _previous_tag(alias: str) -> str:
    return f"alias.{alias}.before"


def _aliased_version(client: Any, name: str, alias: str) -> int | None:
    number = client.get_registered_model(name).aliases.get(alias)
    return None if number is None else parse_version(number)


def evaluation_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Return a version's tags with the evaluation that the gate compares.

    An updated version has labels that were never evaluated, so the evaluation of its origin counts: the encoder is
    the same.
    """
    if UPDATED_TAG not in tags:
        return dict(tags)
    return dict(tags) | {
        key.removeprefix(ORIGIN_PREFIX): value for key, value in tags.items() if key.startswith(ORIGIN_PREFIX)
    }


def _version_tags(client: Any, name: str, version: int) -> dict[str, str]:
    return dict(client.get_model_version(name, str(version)).tags)


def _set_tags(client: Any, name: str, version: int, tags: Mapping[str, str]) -> None:
    for key, value in tags.items():
        client.set_model_version_tag(name, str(version), key, value)


def _number(tags: Mapping[str, str], key: str) -> float:
    try:
        return float(tags[key])
    except (KeyError, ValueError):
        return math.nan

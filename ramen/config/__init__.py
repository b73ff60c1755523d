"""Configuration: every knob, presets and parameter files.

Every knob is defined once: default, range, one line of help, source. A stage receives the sections that it declares and
no others. Values are resolved once, before the first stage starts:

    class defaults  <  preset (`--preset P`)  <  parameter file (params.yaml, or `--params F`)  <  `--set a.b=c`

A preset on the command line replaces the params.yaml of the working directory, unless `--params params.yaml` is given
too.

`ramen config` writes the knobs that are changed most often (marked • below) and those that differ from their default;
`ramen config --all` writes all of them.

Values are read as YAML 1.2: `yes` and 2024-02-30 are text, 010 is ten. Tags, repeated keys, files of more than 256 KiB
and values nested deeper than 20 are refused.

Source tags are explained in docs/method.md, Sources; rec is our own.
"""

from __future__ import annotations

from ramen.config.knobs import (
    INDEX_KINDS,
    SECTIONS,
    BanditConfig,
    BaseConfig,
    ClassifierConfig,
    Config,
    DataConfig,
    Distance,
    EncoderConfig,
    GuidanceConfig,
    IndexConfig,
    ObjectiveConfig,
    PruningConfig,
    Sampling,
    ScoringConfig,
    Section,
    TrainingConfig,
    WalkConfig,
    check_known,
    describe_range,
    extra,
    is_section,
    knobs,
)
from ramen.config.loading import PARAMS_FILE, PRESETS, RETIRED, parse, parse_section, presets, resolve, to_yaml

__all__ = [
    "INDEX_KINDS",
    "PARAMS_FILE",
    "PRESETS",
    "RETIRED",
    "SECTIONS",
    "BanditConfig",
    "BaseConfig",
    "ClassifierConfig",
    "Config",
    "DataConfig",
    "Distance",
    "EncoderConfig",
    "GuidanceConfig",
    "IndexConfig",
    "ObjectiveConfig",
    "PruningConfig",
    "Sampling",
    "ScoringConfig",
    "Section",
    "TrainingConfig",
    "WalkConfig",
    "check_known",
    "describe_range",
    "extra",
    "is_section",
    "knobs",
    "parse",
    "parse_section",
    "presets",
    "resolve",
    "to_yaml",
]

"""`ramen ablate`: rows over seeds as one table; what is known is not computed again."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner

from ramen.ablation.run import CHAIN, Outcome, run_peer, run_row, summarise
from ramen.ablation.study import read_study, studies
from ramen.artifacts import drafts
from ramen.cli import cli
from ramen.cli.ablate import _chosen, _runnable
from ramen.config import EncoderConfig, resolve
from ramen.data.dataset import Dataset
from ramen.encoder.loading import load_encoder
from ramen.errors import ConfigError, Interrupted
from ramen.evaluation.report import SLICES
from ramen.evaluation.uncertainty import PerDocument
from ramen.stages import STAGES, run_stage

KNOBS = {
    "data.source": "xc",
    "walk.hops": 0,
    "encoder.name": "tiny",
    "encoder.precision": "fp32",
    "training.batch_size": 16,
    "training.epochs": 2,
    "training.warmup_epochs": 1,
    "training.lr_warmup_steps": 2,
    "training.lr": 0.003,
    "pruning.patience": 0,
    "classifier.epochs": 2,
}


def ablate(source: Path, *words: str) -> str:
    sets = [f"--set={key}={value}" for key, value in {**KNOBS, "data.path": source}.items()]
    done = CliRunner().invoke(cli, ["ablate", "--params", "params.yaml", *sets, *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    (tmp_path / "params.yaml").write_text("training: {threads: 1}\n")
    return tmp_path


def test_every_shipped_study_reads_and_its_rows_resolve() -> None:
    assert f"Studies: {', '.join(studies())}." in CliRunner().invoke(cli, ["ablate", "--help"]).output
    for name in studies():
        study = read_study(name, ["links"])
        assert study.rows and study.title
        for row in study.rows:
            resolve(preset="demo", sets=row.sets)


def test_a_study_gives_a_table_with_gains_and_a_second_run_computes_nothing(tiny_source: Path, here: Path) -> None:
    (here / "mine.yaml").write_text(
        "title: Mine\nrows:\n"
        "  - {name: plain, set: [objective.graphs=false]}\n"
        "rows_per_anchor_set:\n"
        '  - {name: "only {set}", set: ["objective.anchor_sets=[{set}]", scoring.links=true], against: plain}\n'
    )
    printed = ablate(tiny_source, "--study", "mine.yaml", "--seeds", "0,1")
    found = json.loads((here / "ablations/mine.json").read_text())
    assert set(found) == {"plain", "only category", "only links"}
    gains = [
        found["only links"]["seeds"][seed]["metrics"]["p_at_1"] - found["plain"]["seeds"][seed]["metrics"]["p_at_1"]
        for seed in ("0", "1")
    ]
    written = (here / "ablations/mine.md").read_text()
    assert f"| {sum(gains) / 2:+.2f} ±" in written and "FN@k of only links less that of plain" in written
    assert "standard error" not in written[written.index("Raw links of the") : written.index("Labels missed")]
    links = written[written.index("Raw links of the anchor sets found") :].split("\n\n")[1].splitlines()
    assert "links_r_at_100" in links[0] and "| 100.00 ±0.00 |" in links[-1]
    assert "only category" in printed and (here / "ablations/mine.png").read_bytes()[:4] == b"\x89PNG"
    assert found["only links"]["seeds"]["0"]["metrics"]["links/links_r_at_100"] == pytest.approx(100)  # 31 anchors
    before = {path: path.stat().st_mtime_ns for path in (here / "ablations/cache").glob("*/metrics.json")}
    assert len(before) == 1 + 1 + 3 * 2 * 3, "dataset and graph are shared by all rows and seeds"
    ablate(tiny_source, "--study", "mine.yaml", "--seeds", "0,1")
    assert before == {path: path.stat().st_mtime_ns for path in (here / "ablations/cache").glob("*/metrics.json")}


@pytest.mark.usefixtures("store")
def test_cached_row_records_metrics_and_report_on_its_run(
    tiny_source: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    from ramen.tracking import list_pipeline_runs

    monkeypatch.delenv("RAMEN_TRACKING")
    (here / "mine.yaml").write_text("title: Mine\nrows:\n  - {name: plain, set: [objective.graphs=false]}\n")
    for _ in range(2):
        ablate(tiny_source, "--study", "mine.yaml", "--seeds", "0")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ramen-ablate")
    cached, computed = list_pipeline_runs()
    assert "p_at_1" in cached.metrics and cached.metrics.items() <= computed.metrics.items()
    client = MlflowClient()
    experiment = client.get_experiment_by_name("ramen-ablate").experiment_id
    (evaluation,) = client.search_runs(
        [experiment], f"tags.`mlflow.parentRunId` = '{cached.run_id}' and tags.`ramen.stage` = 'evaluate'"
    )
    assert evaluation.data.tags["ramen.cached"] == "true" and evaluation.data.metrics == cached.metrics
    assert "report.html" in {file.path for file in client.list_artifacts(evaluation.info.run_id)}


def test_a_row_that_the_preset_already_is_is_left_out_and_said_so() -> None:
    study = read_study("design")
    kept, repeats = study.without_repeats(lambda row: resolve(preset="paper", sets=row.sets))
    assert repeats["no label context"] == "full" and repeats["base without label context"] == "base"
    assert {row.name for row in kept.rows} == {row.name for row in study.rows} - set(repeats)
    assert {"full", "no pruning", "uniform weights of 1", "no document graph"} <= {row.name for row in kept.rows}
    assert study.without_repeats(lambda row: resolve(preset="debian", sets=row.sets)) == (study, {})


def test_what_is_compared_with_a_row_that_is_left_out_is_compared_with_what_that_repeats(
    tiny_source: Path, here: Path
) -> None:
    (here / "mine.yaml").write_text(
        "title: Mine\nrows:\n"
        "  - {name: plain, set: [objective.graphs=false]}\n"
        "  - {name: again, set: [objective.graphs=false, training.epochs=2], against: plain}\n"
        "  - {name: other, set: [objective.graphs=false, training.lr=0.001], against: again}\n"
    )
    printed = ablate(tiny_source, "--study", "mine.yaml", "--seeds", "0")
    assert "row 'again' is 'plain' under this configuration, and left out" in printed
    found = json.loads((here / "ablations/mine.json").read_text())
    assert {name: row["against"] for name, row in found.items()} == {"plain": "", "other": "plain"}


def test_the_papers_figures_stand_below_a_study_of_their_data(tiny_source: Path, here: Path) -> None:
    source = shutil.copytree(tiny_source, here / "LF-WikiSeeAlsoTitles-320K")
    printed = ablate(source, "--study", "design", "--rows", "AugGT", "--seeds", "0")
    assert "AugGT" in printed
    written = (here / "ablations/design.md").read_text()
    assert "| AugGT | base | " in written and "## Published\n" in written
    below = written[written.index("## Published, T5 design") :].splitlines()
    assert below[2] == "| source | method | P@1 | P@3 | P@5 | N@3 | N@5 |"
    assert any(line.startswith("| RAMEN ICLR | AugGT | ") for line in below)


def test_changed_raw_data_are_read_again(tiny_source: Path, here: Path) -> None:
    source = shutil.copytree(tiny_source, here / "source")
    words = ("--study", "bases", "--rows", "inbatch", "--seeds", "0")
    ablate(source, *words)
    before = len([*(here / "ablations/cache").glob("ingest-*")])
    ablate(source, *words)
    assert before == 1 == len([*(here / "ablations/cache").glob("ingest-*")])
    texts = source / "raw_data/train.raw.txt"
    texts.write_text(texts.read_text().replace("notes about", "remarks on"))
    ablate(source, *words)
    made = [Dataset.read(folder / "dataset").train.texts[1] for folder in (here / "ablations/cache").glob("ingest-*")]
    assert sorted(text.split()[0] for text in made) == ["notes", "remarks"]


@pytest.mark.usefixtures("store")
def test_rows_are_runs_of_an_experiment_of_their_own(tiny_source: Path, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    (tmp_path / "params.yaml").write_text("training: {threads: 1}\n")
    ablate(tiny_source, "--study", "bases", "--rows", "inbatch", "--seeds", "0")
    client = MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("ramen-ablate").experiment_id])
    (row,) = (run for run in runs if run.info.run_name == "inbatch seed 0")
    assert row.data.tags["ramen.row"] == "inbatch"
    children = {run.info.run_name for run in runs if run.data.tags.get("mlflow.parentRunId") == row.info.run_id}
    assert set(CHAIN) <= children and client.get_experiment_by_name("ramen") is None
    assert "MLFLOW_EXPERIMENT_NAME" not in os.environ, "what this process tracks next goes where it went before"


def test_gains_carry_their_error_clustered_by_group(tiny_source: Path, here: Path) -> None:
    words = ("--study", "bases", "--rows", "RAMEN(ngame)", "--seeds", "0,1", "--set=scoring.quantiles=2")
    source = shutil.copytree(tiny_source, here / "source")
    groups = np.arange(20) // 3
    (source / "tst_groups.txt").write_text("".join(f"{group}\n" for group in groups))
    assert "[paired standard error over the test documents, clustered by group]" in ablate(source, *words)
    found = json.loads((here / "ablations/bases.json").read_text())
    truth = tiny_test_labels(source)
    written = (here / "ablations/bases.md").read_text()
    for file, key in (("predictions", "p_at_1"), ("encoder_predictions", "encoder/p_at_1")):
        first = {}
        for name in found:
            hits = []
            for seed in ("0", "1"):
                each = found[name]["seeds"][seed]
                table = pq.read_table(here / each["evaluation"] / f"{file}.parquet").to_pylist()
                best = {line["document"]: line["label_index"] for line in table if line["rank"] == 1}
                hits.append([100.0 * (best[document] in labels) for document, labels in truth.items()])
                assert each["metrics"][key] == pytest.approx(np.mean(hits[-1]))
            first[name] = np.mean(hits, axis=0)
        differences = first["RAMEN(ngame)"] - first["ngame"]
        sums = np.bincount(groups, differences - differences.mean())
        error = np.sqrt(7 / 6 * np.square(sums).sum()) / 20
        assert found["RAMEN(ngame)"]["gain_error"][key] == pytest.approx(error) and error > 0
        assert f"[{error:.2f}]" in written
    missed = found["RAMEN(ngame)"]["missed"]
    bins = [name for name in missed if name != "complete"]
    assert set(missed["complete"]) == {"5", "10", "20", "50", "100"} and len(bins) >= 2
    assert missed["complete"]["5"] == pytest.approx(sum(missed[name].get("5", 0) for name in bins))


def test_a_row_of_the_encoder_alone_is_compared_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "quantiles.csv").write_text("bin,labels\n")
    one = Outcome({"p_at_1": 40.0}, 1.0, tmp_path, Path("one"))
    two = Outcome({"p_at_1": 45.0, "r_at_100": 70.0, "encoder/p_at_1": 41.5}, 1.0, tmp_path, Path("two"))
    done = summarise([two], [one], ["p_at_1", "encoder/p_at_1", "encoder/r_at_100", "links/x"])
    assert np.isnan(done.mean["encoder/r_at_100"]), "what its classifiers rank is not the encoder's"
    assert done.gain["p_at_1"] == 5.0 and done.gain["encoder/p_at_1"] == 1.5 and np.isnan(done.gain["links/x"])
    assert not done.gain_error, "other data sets, other documents"


def test_one_test_document_gives_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = PerDocument(["a"], {"p_at_1": np.array([100.0])})
    monkeypatch.setattr("ramen.ablation.run._per_document", lambda *_: {"": one})
    (tmp_path / "quantiles.csv").write_text("bin,labels\n")
    rows = [[Outcome({"p_at_1": value}, 1.0, tmp_path, tmp_path)] for value in (100.0, 0.0)]
    assert summarise(*rows, ["p_at_1"]).gain_error == {}, "nan is no JSON"


def test_peers_study_has_a_row_for_each_peer_that_can_run(
    tiny_source: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ramen.peers import libpecos

    libpecos.obstacle.cache_clear()
    monkeypatch.setenv(libpecos.VARIABLE, str(here / "python"))
    rows = "TF-IDF,untrained encoder,XR-Linear,XR-Transformer"
    printed = ablate(tiny_source, "--study", "peers", "--rows", rows, "--seeds", "0,1")
    for name in ("XR-Linear", "XR-Transformer"):
        assert f"warning: peers: row '{name}' is skipped: libpecos is not installed" in printed
    found = json.loads((here / "ablations/peers.json").read_text())
    assert list(found) == ["TF-IDF", "base", "untrained encoder"]
    assert {row["peer"] for row in found.values()} == {"", "tfidf", "untrained"}
    tfidf = [each["metrics"]["p_at_1"] for each in found["TF-IDF"]["seeds"].values()]
    assert tfidf[0] == tfidf[1] and found["TF-IDF"]["gain_error"]["p_at_1"] > 0
    written = (here / "ablations/peers.md").read_text()
    assert "| TF-IDF | base | " in written and f"| TF-IDF | {tfidf[0]:.2f} ±0.00 |" in written
    assert not any("peers/" in key for key in found["base"]["seeds"]["0"]["metrics"]), "rows of their own"
    kept = {path: path.stat().st_mtime_ns for path in (here / "ablations/cache").glob("peer-*/metrics.json")}
    assert len(kept) == 2, "the seed of training is no part of these peers"
    ablate(tiny_source, "--study", "peers", "--rows", rows, "--seeds", "0,1")
    assert kept == {path: path.stat().st_mtime_ns for path in (here / "ablations/cache").glob("peer-*/metrics.json")}


def test_peer_gets_the_training_time_of_the_row_it_names(
    tiny_source: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ramen.peers import PEERS, Task

    given: list[float] = []

    class Timed:
        module, sections, timed = "", ("scoring",), True

        def obstacle(self) -> str:
            return ""

        def fit(self, task: Task) -> Any:
            given.append(task.seconds)
            return PEERS["tfidf"].fit(task)

    monkeypatch.setitem(PEERS, "timed", Timed())
    (here / "mine.yaml").write_text(
        "title: Mine\nrows:\n"
        "  - {name: plain, set: [objective.graphs=false]}\n"
        "  - {name: same time, peer: timed, time_of: plain}\n"
    )
    ablate(tiny_source, "--study", "mine.yaml", "--seeds", "0", "--rows", "same time")
    found = json.loads((here / "ablations/mine.json").read_text())
    assert given == [pytest.approx(found["plain"]["seeds"]["0"]["seconds"], abs=0.06)]
    with pytest.raises(ConfigError, match="trains for a given time; name a row of the study as `time_of`"):
        run_peer("timed", resolve(sets=[f"{key}={value}" for key, value in KNOBS.items()]), here / "cache")


def tiny_test_labels(source: Path) -> dict[str, set[int]]:
    uids = [line.split("->")[0] for line in (source / "raw_data/test.raw.txt").read_text().splitlines()]
    rows = (source / "tst_X_Y.txt").read_text().splitlines()[1:]
    return {uid: {int(pair.split(":")[0]) for pair in row.split()} for uid, row in zip(uids, rows, strict=True)}


def test_the_time_before_a_stop_counts_too(tiny_source: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [f"{key}={value}" for key, value in {**KNOBS, "data.path": tiny_source, "training.threads": 1}.items()]
    clock = [0.0]
    monkeypatch.setattr("ramen.ablation.run.time.monotonic", lambda: clock[0])

    def stage(name: str, **asked: Any) -> dict[str, float]:
        clock[0] += 100.0
        if name == "prune-retrain" and clock[0] < 500:
            raise Interrupted("stopped on request")
        return run_stage(name, **asked)

    monkeypatch.setattr("ramen.ablation.run.run_stage", stage)
    with pytest.raises(Interrupted):
        run_row(resolve(sets=sets), here / "cache")
    assert run_row(resolve(sets=sets), here / "cache").seconds == 300, "warm-up, what was stopped, and the rest"
    assert not list(here.rglob("seconds.json"))


def test_an_encoder_trained_anew_in_its_folder_is_another_one(tiny_source: Path, here: Path) -> None:
    words = ("--study", "bases", "--rows", "inbatch", "--seeds", "0", f"--set=encoder.name={here / 'start'}")
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        encoder = load_encoder("tiny", EncoderConfig(name="tiny"))
        with torch.no_grad():
            next(encoder.parameters()).add_(seed)
        shutil.rmtree(here / "start", ignore_errors=True)
        encoder.save(here / "start")
        ablate(tiny_source, *words)
        found.append({folder.name for folder in (here / "ablations/cache").glob("warmup-*")})
    assert found[0] == found[1] and len(found[2]) == 2


def test_another_evaluation_set_beside_is_another_one(tmp_path: Path) -> None:
    stage, versions = STAGES["evaluate"], []
    for value in ("one", "one", "two"):
        with drafts({"evaluation": tmp_path / "base"}, sections={}, inputs={}, work=tmp_path / "work") as drafted:
            (drafted["evaluation"].path / "metrics.json").write_text(json.dumps(value))
        versions.append(stage.cache_version(resolve(sets=[f"scoring.base={tmp_path / 'base'}"])))
    assert versions[0] == versions[1] != versions[2]


def test_classified_rows_report_the_encoder_apart(tiny_source: Path, here: Path) -> None:
    ablate(tiny_source, "--study", "bases", "--rows", "ngame", "--seeds", "0")
    metrics = json.loads((here / "ablations/bases.json").read_text())["ngame"]["seeds"]["0"]["metrics"]
    assert {"p_at_1", "encoder/p_at_1", "encoder/psp_at_5"} <= set(metrics)
    written = (here / "ablations/bases.md").read_text()
    assert "±" not in written.split("\n\n", 2)[2], "one seed has no deviation"
    header, _, line = written[written.index("By the texts' vectors alone") :].split("\n\n")[1].splitlines()
    shown = dict(zip(header.split(" | "), line.split(" | "), strict=True))
    assert shown["PSP@5"] == f"{metrics['encoder/psp_at_5']:.2f}"
    assert sum(metrics[f"encoder/{third}/p_at_1"] for third in SLICES) == pytest.approx(metrics["encoder/p_at_1"])
    assert shown["tail P@1"] == f"{metrics['encoder/tail/p_at_1']:.2f}"


def test_chosen_rows_bring_all_rows_that_they_need(here: Path) -> None:
    rows = "[{name: t}, {name: u}, {name: p, peer: tfidf, time_of: t}, {name: a, against: p}]"
    (here / "mine.yaml").write_text(f"title: x\nrows: {rows}\n")
    assert [row.name for row in _chosen(read_study("mine.yaml"), "a").rows] == ["t", "p", "a"]


def test_row_is_skipped_with_the_row_that_gives_its_time(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ramen.peers import libpecos

    libpecos.obstacle.cache_clear()
    monkeypatch.setenv(libpecos.VARIABLE, str(here / "python"))
    rows = "[{name: x, peer: xr-linear}, {name: p, peer: tfidf, time_of: x}, {name: a}]"
    (here / "mine.yaml").write_text(f"title: x\nrows: {rows}\n")
    assert [row.name for row in _runnable(read_study("mine.yaml")).rows] == ["a"]
    assert "row 'p' is skipped: row 'x', which gives its time, is skipped" in capsys.readouterr().err


def test_study_that_is_no_file_is_named_and_never_opened(here: Path) -> None:
    os.mkfifo(here / "pipe.yaml")
    with pytest.raises(ConfigError, match=r"study 'pipe.yaml': expected a YAML file, found a named pipe; write"):
        read_study("pipe.yaml")


def test_unknown_studies_rows_and_seeds_say_what_there_is(tiny_source: Path, here: Path) -> None:
    with pytest.raises(ConfigError, match="study 'desing': unknown; there are bases, design"):
        read_study("desing", [])
    (here / "bad.yaml").write_text("title: x\nrows: [{name: a, against: b}]\n")
    with pytest.raises(ConfigError, match="`against: b` names no row; there are a"):
        read_study("bad.yaml", [])
    for rows, says in (
        ("[{name: a, sets: [training.lr=1]}]", r"bad.yaml: row 'a': sets: unknown; did you mean set\?"),
        ("[{name: a}, {name: a}]", "two rows are called 'a'; names of rows must differ"),
        ("[{name: a, against: a}]", "row 'a': against: names the row itself; name another row, or remove it"),
        ("[{name: ' a'}]", "row ' a': name: expected a line without commas and outer spaces"),
        ("[{name: 'a,b'}]", "row 'a,b': name: expected a line without commas and outer spaces"),
        (r'[{name: "a\nb"}]', r"row 'a\\nb': name: expected a line without commas and outer spaces"),
        ("[{name: a, time_of: b, peer: tfidf}, {name: b}]", "row 'a': `time_of: b` names no row above it"),
    ):
        (here / "bad.yaml").write_text(f"title: x\nrows: {rows}\n")
        with pytest.raises(ConfigError, match=says):
            read_study("bad.yaml", [])
    for words in (["--study", "desing"], ["--study", "bases", "--rows", "nine"]):  # before the data are looked for
        done = CliRunner().invoke(cli, ["ablate", *words, "--set=data.path=nowhere", "--set=data.source=xc"])
        assert done.exit_code == 2 and "there are" in done.output and "nowhere" not in done.output
    (here / "bad.yaml").write_text("title: x\nrows: [{name: a, set: [objective.graps=false]}]\n")
    sets = [f"--set={key}={value}" for key, value in {**KNOBS, "data.path": tiny_source}.items()]
    done = CliRunner().invoke(cli, ["ablate", *sets, "--study", "bad.yaml"])
    assert done.exit_code == 2 and "study bad.yaml: row 'a': --set: objective.graps: unknown" in done.output
    assert not list((here / "ablations/cache").glob("warmup-*"))
    for words in (["--rows", "nine"], ["--seeds", "x"]):
        done = CliRunner().invoke(
            cli, ["ablate", "--study", "design", f"--set=data.path={tiny_source}", "--set=data.source=xc", *words]
        )
        assert done.exit_code != 0

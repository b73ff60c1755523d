"""`ramen ablate`: rows over seeds as one table, and cached results."""

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

from ramen.ablation.run import CHAIN, Outcome, run_peer, run_row
from ramen.ablation.study import list_studies, read_study
from ramen.ablation.summary import summarise
from ramen.artifacts import create_drafts
from ramen.cli import cli
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


def run_ablate(source: Path, *options: str) -> str:
    """Run the command on a source in the current directory; return its output."""
    sets = [f"--set={key}={value}" for key, value in {**KNOBS, "data.path": source}.items()]
    result = CliRunner().invoke(cli, ["ablate", "--params", "params.yaml", *sets, *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAMEN_TRACKING", "off")
    (tmp_path / "params.yaml").write_text("training: {threads: 1}\n")
    return tmp_path


def test_every_study_of_the_package_is_valid() -> None:
    assert f"Studies: {', '.join(list_studies())}." in CliRunner().invoke(cli, ["ablate", "--help"]).output
    for name in list_studies():
        study = read_study(name, ["links"])
        assert study.rows and study.title
        for row in study.rows:
            resolve(preset="demo", sets=row.sets)


@pytest.mark.slow
def test_study_writes_gains_and_second_run_computes_nothing(tiny_xc_folder: Path, workdir: Path) -> None:
    (workdir / "mine.yaml").write_text(
        "title: Mine\nrows:\n"
        "  - {name: plain, set: [objective.graphs=false]}\n"
        "rows_per_anchor_set:\n"
        '  - {name: "only {set}", set: ["objective.anchor_sets=[{set}]", scoring.links=true], against: plain}\n'
    )
    printed = run_ablate(tiny_xc_folder, "--study", "mine.yaml", "--seeds", "0,1")
    results = json.loads((workdir / "ablations/mine.json").read_text())
    assert set(results) == {"plain", "only category", "only links"}
    gains = [
        results["only links"]["seeds"][seed]["metrics"]["p_at_1"] - results["plain"]["seeds"][seed]["metrics"]["p_at_1"]
        for seed in ("0", "1")
    ]
    report = (workdir / "ablations/mine.md").read_text()
    assert f"| {sum(gains) / 2:+.2f} ±" in report and "FN@k of only links minus that of plain" in report
    assert "standard error" not in report[report.index("## Link prediction") : report.index("Labels missed")]
    links = report[report.index("## Link prediction") :].split("\n\n")[1].splitlines()
    assert "links_r_at_100" in links[0] and "| 100.00 ±0.00 |" in links[-1]
    assert "only category" in printed and (workdir / "ablations/mine.png").read_bytes()[:4] == b"\x89PNG"
    assert results["only links"]["seeds"]["0"]["metrics"]["links/links_r_at_100"] == pytest.approx(100)  # 31 anchors
    before = {path: path.stat().st_mtime_ns for path in (workdir / "ablations/cache").glob("*/metrics.json")}
    assert len(before) == 1 + 1 + 3 * 2 * 3, "all rows and seeds share dataset and graph"
    run_ablate(tiny_xc_folder, "--study", "mine.yaml", "--seeds", "0,1")
    assert before == {path: path.stat().st_mtime_ns for path in (workdir / "ablations/cache").glob("*/metrics.json")}


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_cached_row_records_metrics_and_report_on_its_run(
    tiny_xc_folder: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    from ramen.tracking import list_pipeline_runs

    monkeypatch.delenv("RAMEN_TRACKING")
    (workdir / "mine.yaml").write_text("title: Mine\nrows:\n  - {name: plain, set: [objective.graphs=false]}\n")
    for _ in range(2):
        run_ablate(tiny_xc_folder, "--study", "mine.yaml", "--seeds", "0")
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


def test_row_equal_to_the_row_it_is_compared_with_is_left_out() -> None:
    study = read_study("design")
    kept, repeats = study.without_repeats(lambda row: resolve(preset="paper", sets=row.sets))
    assert repeats["no label context"] == "full" and repeats["base without label context"] == "base"
    assert {row.name for row in kept.rows} == {row.name for row in study.rows} - set(repeats)
    assert {"full", "no pruning", "uniform weights of 1", "no document graph"} <= {row.name for row in kept.rows}
    assert study.without_repeats(lambda row: resolve(preset="debian", sets=row.sets)) == (study, {})


@pytest.mark.slow
def test_rows_refer_to_the_repeated_row_if_theirs_is_left_out(tiny_xc_folder: Path, workdir: Path) -> None:
    (workdir / "mine.yaml").write_text(
        "title: Mine\nrows:\n"
        "  - {name: plain, set: [objective.graphs=false]}\n"
        "  - {name: again, set: [objective.graphs=false, training.epochs=2], against: plain}\n"
        "  - {name: other, set: [objective.graphs=false, training.lr=0.001], against: again}\n"
    )
    printed = run_ablate(tiny_xc_folder, "--study", "mine.yaml", "--seeds", "0")
    assert "row 'again' is left out: its configuration equals that of row 'plain'" in printed
    results = json.loads((workdir / "ablations/mine.json").read_text())
    assert {name: row["against"] for name, row in results.items()} == {"plain": "", "other": "plain"}


@pytest.mark.slow
def test_published_results_follow_a_study_of_their_data_set(tiny_xc_folder: Path, workdir: Path) -> None:
    source = shutil.copytree(tiny_xc_folder, workdir / "LF-WikiSeeAlsoTitles-320K")
    printed = run_ablate(source, "--study", "design", "--rows", "AugGT", "--seeds", "0")
    assert "AugGT" in printed
    report = (workdir / "ablations/design.md").read_text()
    assert "| AugGT | base | " in report and "## Published\n" in report
    below = report[report.index("## Published, T5 design") :].splitlines()
    assert below[2] == "| source | method | P@1 | P@3 | P@5 | N@3 | N@5 |"
    assert any(line.startswith("| RAMEN ICLR | AugGT | ") for line in below)


@pytest.mark.slow
def test_changed_raw_data_are_ingested_again(tiny_xc_folder: Path, workdir: Path) -> None:
    source = shutil.copytree(tiny_xc_folder, workdir / "source")
    options = ("--study", "bases", "--rows", "inbatch", "--seeds", "0")
    run_ablate(source, *options)
    before = len([*(workdir / "ablations/cache").glob("ingest-*")])
    run_ablate(source, *options)
    assert before == 1 == len([*(workdir / "ablations/cache").glob("ingest-*")])
    texts = source / "raw_data/train.raw.txt"
    texts.write_text(texts.read_text().replace("notes about", "remarks on"))
    run_ablate(source, *options)
    ingested = [
        Dataset.read(folder / "dataset").train.texts[1] for folder in (workdir / "ablations/cache").glob("ingest-*")
    ]
    assert sorted(text.split()[0] for text in ingested) == ["notes", "remarks"]


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_rows_are_runs_of_a_separate_experiment(tiny_xc_folder: Path, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    (tmp_path / "params.yaml").write_text("training: {threads: 1}\n")
    run_ablate(tiny_xc_folder, "--study", "bases", "--rows", "inbatch", "--seeds", "0")
    client = MlflowClient()
    runs = client.search_runs([client.get_experiment_by_name("ramen-ablate").experiment_id])
    (row,) = (run for run in runs if run.info.run_name == "inbatch seed 0")
    assert row.data.tags["ramen.row"] == "inbatch"
    children = {run.info.run_name for run in runs if run.data.tags.get("mlflow.parentRunId") == row.info.run_id}
    assert set(CHAIN) <= children and client.get_experiment_by_name("ramen") is None
    assert "MLFLOW_EXPERIMENT_NAME" not in os.environ, "the environment is restored"


@pytest.mark.slow
def test_gains_have_standard_errors_clustered_by_group(tiny_xc_folder: Path, workdir: Path) -> None:
    options = ("--study", "bases", "--rows", "RAMEN(ngame)", "--seeds", "0,1", "--set=scoring.links=true")
    source = shutil.copytree(tiny_xc_folder, workdir / "source")
    groups = np.arange(20) // 3
    (source / "tst_groups.txt").write_text("".join(f"{group}\n" for group in groups))
    assert "[paired standard error over the test documents, clustered by group]" in run_ablate(source, *options)
    results = json.loads((workdir / "ablations/bases.json").read_text())
    truth = read_test_labels(source)
    report = (workdir / "ablations/bases.md").read_text()
    for file, key in (("predictions", "p_at_1"), ("encoder_predictions", "encoder/p_at_1")):
        first = {}
        for name in results:
            hits = []
            for seed in ("0", "1"):
                result = results[name]["seeds"][seed]
                table = pq.read_table(workdir / result["evaluation"] / f"{file}.parquet").to_pylist()
                best = {line["document"]: line["label_index"] for line in table if line["rank"] == 1}
                hits.append([100.0 * (best[document] in labels) for document, labels in truth.items()])
                assert result["metrics"][key] == pytest.approx(np.mean(hits[-1]))
            first[name] = np.mean(hits, axis=0)
        differences = first["RAMEN(ngame)"] - first["ngame"]
        sums = np.bincount(groups, differences - differences.mean())
        error = np.sqrt(7 / 6 * np.square(sums).sum()) / 20
        assert results["RAMEN(ngame)"]["gain_error"][key] == pytest.approx(error) and error > 0
        assert f"[{error:.2f}]" in report
    missed = results["RAMEN(ngame)"]["missed"]
    bins = [name for name in missed if name != "complete"]
    assert set(missed["complete"]) == {"5", "10", "20", "50", "100"} and len(bins) >= 2
    assert missed["complete"]["5"] == pytest.approx(sum(missed[name].get("5", 0) for name in bins))


def test_overall_metrics_of_an_encoder_only_row_are_its_encoder_metrics(tmp_path: Path) -> None:
    (tmp_path / "quantiles.csv").write_text("bin,labels\n")
    one = Outcome({"p_at_1": 40.0}, 1.0, tmp_path, Path("one"))
    two = Outcome({"p_at_1": 45.0, "r_at_100": 70.0, "encoder/p_at_1": 41.5}, 1.0, tmp_path, Path("two"))
    summary = summarise([two], [one], ["p_at_1", "encoder/p_at_1", "encoder/r_at_100", "links/x"])
    assert np.isnan(summary.mean["encoder/r_at_100"]), "unknown: its overall metrics include classifiers"
    assert summary.gain["p_at_1"] == 5.0 and summary.gain["encoder/p_at_1"] == 1.5 and np.isnan(summary.gain["links/x"])
    assert not summary.gain_error, "different datasets"


def test_single_test_document_gives_no_standard_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = PerDocument(["a"], {"p_at_1": np.array([100.0])})
    monkeypatch.setattr("ramen.ablation.summary._read_contributions", lambda *_: {"": one})
    (tmp_path / "quantiles.csv").write_text("bin,labels\n")
    rows = [[Outcome({"p_at_1": value}, 1.0, tmp_path, tmp_path)] for value in (100.0, 0.0)]
    assert summarise(*rows, ["p_at_1"]).gain_error == {}, "NaN is not valid JSON"


@pytest.mark.slow
def test_peers_study_has_a_row_for_each_peer_that_can_run(
    tiny_xc_folder: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ramen.peers import libpecos

    libpecos.obstacle.cache_clear()
    monkeypatch.setenv(libpecos.VARIABLE, str(workdir / "python"))
    rows = "TF-IDF,untrained encoder,XR-Linear,XR-Transformer"
    printed = run_ablate(tiny_xc_folder, "--study", "peers", "--rows", rows, "--seeds", "0,1")
    for name in ("XR-Linear", "XR-Transformer"):
        assert f"warning: peers: row '{name}' is skipped: libpecos is not installed" in printed
    results = json.loads((workdir / "ablations/peers.json").read_text())
    assert list(results) == ["TF-IDF", "base", "untrained encoder"]
    assert {row["peer"] for row in results.values()} == {"", "tfidf", "untrained"}
    tfidf = [result["metrics"]["p_at_1"] for result in results["TF-IDF"]["seeds"].values()]
    assert tfidf[0] == tfidf[1] and results["TF-IDF"]["gain_error"]["p_at_1"] > 0
    report = (workdir / "ablations/peers.md").read_text()
    assert "| TF-IDF | base | " in report and f"| TF-IDF | {tfidf[0]:.2f} ±0.00 |" in report
    assert not any("peers/" in key for key in results["base"]["seeds"]["0"]["metrics"]), "peers are separate rows"
    kept = {path: path.stat().st_mtime_ns for path in (workdir / "ablations/cache").glob("peer-*/metrics.json")}
    assert len(kept) == 2, "these peers do not depend on the seed"
    run_ablate(tiny_xc_folder, "--study", "peers", "--rows", rows, "--seeds", "0,1")
    assert kept == {path: path.stat().st_mtime_ns for path in (workdir / "ablations/cache").glob("peer-*/metrics.json")}


@pytest.mark.slow
def test_peer_gets_the_training_time_of_the_row_in_time_of(
    tiny_xc_folder: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
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
    (workdir / "mine.yaml").write_text(
        "title: Mine\nrows:\n"
        "  - {name: plain, set: [objective.graphs=false]}\n"
        "  - {name: same time, peer: timed, time_of: plain}\n"
    )
    run_ablate(tiny_xc_folder, "--study", "mine.yaml", "--seeds", "0", "--rows", "same time")
    results = json.loads((workdir / "ablations/mine.json").read_text())
    assert given == [pytest.approx(results["plain"]["seeds"]["0"]["seconds"], abs=0.06)]
    with pytest.raises(ConfigError, match="trains for a given time; set `time_of` to the name of another row"):
        run_peer("timed", resolve(sets=[f"{key}={value}" for key, value in KNOBS.items()]), workdir / "cache")


def read_test_labels(source: Path) -> dict[str, set[int]]:
    uids = [line.split("->")[0] for line in (source / "raw_data/test.raw.txt").read_text().splitlines()]
    rows = (source / "tst_X_Y.txt").read_text().splitlines()[1:]
    return {uid: {int(pair.split(":")[0]) for pair in row.split()} for uid, row in zip(uids, rows, strict=True)}


@pytest.mark.slow
def test_training_time_includes_interrupted_attempts(
    tiny_xc_folder: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = [f"{key}={value}" for key, value in {**KNOBS, "data.path": tiny_xc_folder, "training.threads": 1}.items()]
    clock = [0.0]
    monkeypatch.setattr("ramen.ablation.cache.time.monotonic", lambda: clock[0])

    def interrupted_stage(name: str, **arguments: Any) -> dict[str, float]:
        clock[0] += 100.0
        if name == "prune-retrain" and clock[0] < 500:
            raise Interrupted("stopped on request")
        return run_stage(name, **arguments)

    monkeypatch.setattr("ramen.ablation.cache.run_stage", interrupted_stage)
    with pytest.raises(Interrupted):
        run_row(resolve(sets=sets), workdir / "cache")
    assert run_row(resolve(sets=sets), workdir / "cache").seconds == 300, (
        "warm-up, the interrupted attempt, and the rest"
    )
    assert not list(workdir.rglob("seconds.json"))


@pytest.mark.slow
def test_changed_encoder_folder_invalidates_the_cache(tiny_xc_folder: Path, workdir: Path) -> None:
    options = ("--study", "bases", "--rows", "inbatch", "--seeds", "0", f"--set=encoder.name={workdir / 'start'}")
    warmups = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        encoder = load_encoder("tiny", EncoderConfig(name="tiny"))
        with torch.no_grad():
            next(encoder.parameters()).add_(seed)
        shutil.rmtree(workdir / "start", ignore_errors=True)
        encoder.save(workdir / "start")
        run_ablate(tiny_xc_folder, *options)
        warmups.append({folder.name for folder in (workdir / "ablations/cache").glob("warmup-*")})
    assert warmups[0] == warmups[1] and len(warmups[2]) == 2


def test_changed_base_evaluation_changes_the_cache_version(tmp_path: Path) -> None:
    stage, versions = STAGES["evaluate"], []
    for value in ("one", "one", "two"):
        with create_drafts(
            {"evaluation": tmp_path / "base"}, sections={}, inputs={}, work=tmp_path / "work"
        ) as drafted:
            (drafted["evaluation"].path / "metrics.json").write_text(json.dumps(value))
        versions.append(stage.cache_version(resolve(sets=[f"scoring.base={tmp_path / 'base'}"])))
    assert versions[0] == versions[1] != versions[2]


@pytest.mark.slow
def test_rows_with_classifiers_also_report_the_encoder(tiny_xc_folder: Path, workdir: Path) -> None:
    run_ablate(tiny_xc_folder, "--study", "bases", "--rows", "ngame", "--seeds", "0")
    metrics = json.loads((workdir / "ablations/bases.json").read_text())["ngame"]["seeds"]["0"]["metrics"]
    assert {"p_at_1", "encoder/p_at_1", "encoder/psp_at_5"} <= set(metrics)
    report = (workdir / "ablations/bases.md").read_text()
    assert "±" not in report.split("\n\n", 2)[2], "one seed has no deviation"
    header, _, line = report[report.index("## Encoder only") :].split("\n\n")[1].splitlines()
    shown = dict(zip(header.split(" | "), line.split(" | "), strict=True))
    assert shown["PSP@5"] == f"{metrics['encoder/psp_at_5']:.2f}"
    assert sum(metrics[f"encoder/{third}/p_at_1"] for third in SLICES) == pytest.approx(metrics["encoder/p_at_1"])
    assert shown["tail P@1"] == f"{metrics['encoder/tail/p_at_1']:.2f}"


def test_selected_rows_include_the_rows_they_need(workdir: Path) -> None:
    rows = "[{name: t}, {name: u}, {name: p, peer: tfidf, time_of: t}, {name: a, against: p}]"
    (workdir / "mine.yaml").write_text(f"title: x\nrows: {rows}\n")
    assert [row.name for row in read_study("mine.yaml").select("a").rows] == ["t", "p", "a"]


def test_row_is_skipped_with_the_row_that_determines_its_time(
    workdir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ramen.peers import libpecos

    libpecos.obstacle.cache_clear()
    monkeypatch.setenv(libpecos.VARIABLE, str(workdir / "python"))
    rows = "[{name: x, peer: xr-linear}, {name: p, peer: tfidf, time_of: x}, {name: a}]"
    (workdir / "mine.yaml").write_text(f"title: x\nrows: {rows}\n")
    assert [row.name for row in read_study("mine.yaml").without_unavailable_peers().rows] == ["a"]
    assert "row 'p' is skipped: row 'x', which determines its time limit, is skipped" in capsys.readouterr().err


def test_study_that_is_not_a_file_is_refused_without_opening_it(workdir: Path) -> None:
    os.mkfifo(workdir / "pipe.yaml")
    with pytest.raises(ConfigError, match=r"study 'pipe.yaml': expected a YAML file, found a named pipe; write"):
        read_study("pipe.yaml")


def test_unknown_studies_rows_and_seeds_list_the_known_ones(tiny_xc_folder: Path, workdir: Path) -> None:
    with pytest.raises(ConfigError, match="study 'desing': unknown; there are bases, design"):
        read_study("desing", [])
    (workdir / "bad.yaml").write_text("title: x\nrows: [{name: a, against: b}]\n")
    with pytest.raises(ConfigError, match="`against: b` is not a row; there are a"):
        read_study("bad.yaml", [])
    for rows, message in (
        ("[{name: a, sets: [training.lr=1]}]", r"bad.yaml: row 'a': sets: unknown; did you mean set\?"),
        ("[{name: a}, {name: a}]", "two rows are named 'a'; rename one of them"),
        ("[{name: a, against: a}]", "row 'a': against: is the row itself; name another row or remove it"),
        ("[{name: ' a'}]", "row ' a': name: expected one line without commas and surrounding spaces"),
        ("[{name: 'a,b'}]", "row 'a,b': name: expected one line without commas and surrounding spaces"),
        (r'[{name: "a\nb"}]', r"row 'a\\nb': name: expected one line without commas and surrounding spaces"),
        ("[{name: a, time_of: b, peer: tfidf}, {name: b}]", "row 'a': `time_of: b` is not a row above it"),
    ):
        (workdir / "bad.yaml").write_text(f"title: x\nrows: {rows}\n")
        with pytest.raises(ConfigError, match=message):
            read_study("bad.yaml", [])
    for options in (["--study", "desing"], ["--study", "bases", "--rows", "nine"]):  # checked before the data are read
        result = CliRunner().invoke(cli, ["ablate", *options, "--set=data.path=nowhere", "--set=data.source=xc"])
        assert result.exit_code == 2 and "there are" in result.output and "nowhere" not in result.output
    (workdir / "bad.yaml").write_text("title: x\nrows: [{name: a, set: [objective.graps=false]}]\n")
    sets = [f"--set={key}={value}" for key, value in {**KNOBS, "data.path": tiny_xc_folder}.items()]
    result = CliRunner().invoke(cli, ["ablate", *sets, "--study", "bad.yaml"])
    assert result.exit_code == 2 and "study bad.yaml: row 'a': --set: objective.graps: unknown" in result.output
    assert not list((workdir / "ablations/cache").glob("warmup-*"))
    for options in (["--rows", "nine"], ["--seeds", "x"]):
        result = CliRunner().invoke(
            cli, ["ablate", "--study", "design", f"--set=data.path={tiny_xc_folder}", "--set=data.source=xc", *options]
        )
        assert result.exit_code != 0

"""The report's page. A Python string, so that the stage's code version covers it."""

STYLE = """
:root { --ink: #1d2733; --soft: #5d6977; --line: #e3e8ee; --rule: #cfd7e0; --wash: #f5f7fa;
  --good: #1f7a4d; --bad: #b3432f; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--wash); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 36px 24px 64px; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 17px; margin: 0 0 4px; }
p { margin: 0 0 10px; }
.lead, .note { color: var(--soft); }
.note { font-size: 13px; max-width: 108ch; }
section, .card { background: #fff; border: 1px solid var(--line); border-radius: 10px; }
section { padding: 22px 24px; margin-top: 18px; }
.cards { display: grid; grid-template-columns: repeat(4, 1fr); gap: 14px; margin-top: 22px; }
.card { padding: 14px 18px; }
.card .name { color: var(--soft); font-size: 13px; }
.card .value { font-size: 29px; font-weight: 650; line-height: 1.25; }
.card .delta { font-size: 13px; }
table { border-collapse: collapse; width: 100%; margin: 10px 0 8px; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 5px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-size: 12.5px; color: var(--soft); font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
thead th { border-bottom: 2px solid var(--rule); }
tr.overall td { font-weight: 650; }
tr.peer td { color: var(--soft); }
tr:last-child td { border-bottom: 0; }
td .delta { display: block; font-size: 11px; font-weight: 500; line-height: 1.3; }
.up { color: var(--good); }
.down { color: var(--bad); }
.even { color: var(--soft); }
.split { border-left: 1px solid var(--rule); }
figure { margin: 12px 0 0; }
section { overflow-x: auto; }
figure img { display: block; width: 100%; height: auto; }
.samples { display: grid; gap: 12px; margin-top: 14px; }
.sample { border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px; min-width: 0;
  overflow-wrap: anywhere; }
.sample .text { font-weight: 600; }
.sample .uid { color: var(--soft); font-size: 12px; }
.sample h3 { font-size: 11.5px; color: var(--soft); font-weight: 600; letter-spacing: 0.04em; margin: 10px 0 2px; }
.lists { display: grid; grid-auto-flow: column; grid-auto-columns: minmax(0, 1fr); gap: 26px; }
ol { margin: 0; padding: 0; list-style: none; font-size: 13.5px; }
li { display: grid; grid-template-columns: 14px minmax(0, 1fr) auto; gap: 4px; padding: 2px 0; }
li .mark { color: var(--good); font-weight: 700; }
li.hit .label { color: var(--good); font-weight: 600; }
li .frequency { color: var(--soft); font-size: 12px; padding-left: 6px; }
dl { display: grid; grid-template-columns: max-content 1fr max-content 1fr; gap: 5px 18px; margin: 10px 0 0;
  font-size: 14px; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 760px) {
  .cards { grid-template-columns: 1fr 1fr; }
  .lists { grid-auto-flow: row; }
  dl { grid-template-columns: max-content 1fr; }
  section { overflow-x: auto; }
}
@media print {
  @page { margin: 12mm; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
  body { background: #fff; font-size: 11px; }
  main { max-width: none; padding: 0; }
  section { padding: 12px 14px; margin-top: 10px; }
  th, td { padding: 4px 3px; font-size: 10.5px; }
  th { font-size: 9.5px; }
  td .delta { font-size: 8.5px; }
  .note, ol, dl { font-size: 10.5px; }
  .card, .sample, figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
}
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>ramen evaluation</title>
<style>{{ style | safe }}</style>
</head>
<body>
{% macro delta(cell) %}
{% if cell.delta is not none %}<span class="delta {{ cell.sign }}">{{ cell.delta }}</span>{% endif %}
{% endmacro %}
{% macro rule(cell) %}{% if cell.split %} class="split"{% endif %}{% endmacro %}
{% macro ranked(items) %}
<ol>
{% for item in items %}
<li{% if item.hit %} class="hit"{% endif %}>
<span class="mark">{% if item.hit %}&#10003;{% endif %}</span><span class="label">{{ item.text }}</span>
<span class="frequency" title="training documents with this label">{{ "{:,}".format(item.frequency) }}</span></li>
{% endfor %}
</ol>
{% endmacro %}
<main>
<h1>Evaluation on the test documents</h1>
<p class="lead">{{ lead }}</p>
<div class="cards">
{% for card in cards %}
<div class="card"><div class="name">{{ card.name }}</div><div class="value">{{ card.text }}</div>{{ delta(card) }}</div>
{% endfor %}
</div>

<section>
<h2>Accuracy</h2>
<table>
<thead><tr><th></th><th>labels</th>
{% for column in columns %}
<th{{ rule(column) }}>{{ column.title }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for row in rows %}
<tr{% if loop.first %} class="overall"{% endif %}><td>{{ row.name }}</td><td>{{ row.labels }}</td>
{% for cell in row.cells %}
<td{{ rule(cell) }}>{{ cell.text }}{{ delta(cell) }}</td>
{% endfor %}
</tr>
{% endfor %}
{% for row in peers %}
<tr class="peer"><td>{{ row.name }}</td><td></td>
{% for cell in row.cells %}
<td{{ rule(cell) }}>{{ cell.text }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody></table>
<p class="note">All numbers in percent.{% if has_base %} Small numbers are gains over the base ± their standard error,
{{ error_note }}; gains below two standard errors are grey.{% endif %}

Head, torso and tail each hold about a third of the training pairs. Left of the rule their rows are contributions: hits
of the group's labels in the full ranking, normalised as overall, so that the three add up to the first row. Label R@100
is the recall of each label, averaged over the group's labels that occur in the test set: 100 is the best in every row.
Test documents without a label count as 0.{% if peers %} TF-IDF and the untrained encoder rank the same labels for the
same documents.{% endif %}</p>
</section>

<section>
<h2>By label frequency</h2>
<p class="note">{{ bins_note }}</p>
<figure><img alt="Metrics by label quantile" src="{{ images.quantiles }}"></figure>
</section>

<section>
<h2>Training</h2>
{% if images.training %}
<p class="note">{% if pruned %}Dashed lines: a pruning round begins. {% endif %}
Validation is on training documents that were held out.</p>
<figure><img alt="Loss and validation P@1 per epoch" src="{{ images.training }}"></figure>
{% else %}
<p class="note">The model carries no training history.</p>
{% endif %}
{% if images.edges %}
<figure><img alt="Edges kept per graph and round" src="{{ images.edges }}"></figure>
{% endif %}
{% if graphs %}
<table>
<thead><tr><th>graph after the last pruning</th><th>rows</th><th>anchors</th><th>edges</th><th>original</th>
<th>added by the walk</th></tr></thead>
<tbody>
{% for graph in graphs %}
<tr><td>{{ graph.name }}</td><td>{{ graph.rows }}</td><td>{{ graph.anchors }}</td><td>{{ graph.edges }}</td>
<td>{{ graph.original }}</td><td>{{ graph.walked }}</td></tr>
{% endfor %}
</tbody></table>
{% endif %}
</section>

{% if samples %}
<section>
<h2>Sample predictions</h2>
<p class="note">Test documents drawn at random with a fixed seed. The number behind a label is how many training
documents carry it. &#10003; marks a label of the truth; in the truth, a label that this run ranks among its first
five.</p>
<div class="samples">
{% for sample in samples %}
<div class="sample"><div class="text">{{ sample.text }}</div><div class="uid">{{ sample.uid }}</div>
<div class="lists">
<div><h3>TRUTH{% if sample.more %} ({{ sample.more }} more){% endif %}</h3>
{{ ranked(sample.truth) }}</div>
<div><h3>THIS RUN</h3>
{{ ranked(sample.run) }}</div>
{% if sample.base is not none %}
<div><h3>BASE</h3>
{{ ranked(sample.base) }}</div>
{% endif %}
</div></div>
{% endfor %}
</div>
</section>
{% endif %}

<section>
<h2>Conditions</h2>
<dl>
{% for name, value in facts %}
<dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}
</dl>
</section>
</main>
</body>
</html>
"""

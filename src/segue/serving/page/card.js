// A model of GET /model → a card: its data, its evaluation report and the baselines.

import { byId, element, iconButton, segments } from "./dom.js";
import { count, counted, decimal, duration, percent } from "./format.js";
import { on, shownModels, state } from "./state.js";

const DEFAULT_METRIC = "ndcg@10";

let shown = null; // a model's name
let metric = DEFAULT_METRIC;

export function startCard() {
  const button = byId("open-card");
  button.addEventListener("click", () => {
    shown = shownModels()[0].name;
    draw();
    byId("card").showModal();
  });
  byId("card").addEventListener("click", event => {
    if (event.target === byId("card")) byId("card").close(); // outside the card itself
  });
  on("models", () => {
    button.disabled = false;
    byId("model-name").textContent = state.models.map(({ name }) => name).join("  ·  ");
    button.setAttribute("aria-label", `About the model ${state.models.map(({ name }) => name).join(" and ")}`);
    if (byId("card").open) draw();
  });
}

function draw() {
  const model = state.models.find(({ name }) => name === shown) ?? state.models[0];
  const { report } = model;
  const names = state.models.map(({ name }) => ({ value: name, label: name }));
  const choice = segments("Model", "card-model", names, model.name, name => {
    shown = name;
    draw();
    byId("card").querySelector("input:checked")?.focus();
  });
  byId("card").replaceChildren(
    element(
      "div",
      { class: "card-inside" },
      element(
        "div",
        { class: "card-head" },
        element("p", { class: "kicker", text: model.name === state.active ? "Model · active" : "Model" }),
        iconButton("close", "Close", () => byId("card").close()),
        element("h1", { id: "card-title" }, element("bdi", { text: model.name })),
      ),
      ...(names.length > 1 ? [choice] : []),
      facts(model),
      ...(report
        ? [...verdict(report), metricBars(report), depths(report), protocol(report)]
        : [element("p", { class: "hint", text: "This run has no evaluation report." })]),
      training(model),
    ),
  );
}

function counts(counted) {
  return counted ? [["Users", count(counted.users)], ["Events", count(counted.events)]] : [];
}

function facts({ items, length, seen, manifest, report }) {
  const pairs = [
    ["Recipe", manifest.recipe],
    ...counts(manifest.data?.counts),
    ["Items", count(items)],
    ["Test cases", report ? count(report.cases) : "–"],
    ["Uses the newest", counted(length, "item")],
    ["Seen items", seen],
  ];
  return element(
    "dl",
    { class: "facts" },
    ...pairs.map(([name, value]) =>
      element("div", {}, element("dt", { text: name }), element("dd", { text: String(value) })),
    ),
  );
}

/** Whether the model is better than the simple methods, in the words of the report; reports of early runs have none. */
function verdict({ verdict: given }) {
  return given
    ? [
        element(
          "section",
          { class: given.warning ? "verdict warn" : "verdict" },
          ...given.sentences.map(text => element("p", { text })),
        ),
      ]
    : [];
}

/** A metric of the model and the baselines, as bars with intervals. */
function metricBars(report) {
  const metrics = Object.keys(report.metrics).filter(name => Object.values(report.baselines).every(one => name in one));
  if (!metrics.includes(metric)) metric = metrics.includes(DEFAULT_METRIC) ? DEFAULT_METRIC : metrics[0];
  const rows = [
    { name: "this model", own: true, value: report.metrics[metric], interval: report.intervals[metric] },
    ...Object.entries(report.baselines).map(([name, one]) => ({
      name,
      value: one[metric],
      interval: report.baseline_intervals?.[name]?.[metric],
      note: report.baseline_notes?.[name],
    })),
  ];
  const largest = Math.max(...rows.map(({ value, interval }) => Math.max(value, interval?.[1] ?? 0)), Number.MIN_VALUE);
  const select = element(
    "select",
    { "aria-label": "Metric" },
    ...metrics.map(name => element("option", { value: name, text: name })),
  );
  select.value = metric;
  select.addEventListener("change", () => {
    metric = select.value;
    draw();
    byId("card").querySelector("select").focus();
  });
  return element(
    "section",
    {},
    element("div", { class: "section-head" }, element("h2", { text: "Compared with baselines" }), select),
    element(
      "table",
      { class: "bars" },
      element("caption", { class: "unseen", text: `${metric} of the model and the baselines` }),
      element("tbody", {}, ...rows.map(row => bar(row, largest))),
    ),
    element("p", { class: "hint", text: `${meaning(metric)} The line is the 95 % interval (bootstrap over users).` }),
  );
}

function bar({ name, own, value, interval, note }, largest) {
  const fill = element("span", { class: "bar-fill" });
  fill.style.width = `${(100 * value) / largest}%`;
  const drawn = element("div", { class: "bar-room", "aria-hidden": "true" }, fill);
  if (interval) {
    const whisker = element("span", { class: "whisker" });
    whisker.style.left = `${(100 * interval[0]) / largest}%`;
    whisker.style.width = `${(100 * (interval[1] - interval[0])) / largest}%`;
    drawn.append(whisker);
  }
  const range = interval
    ? element("span", { class: "range", text: `${figure(metric, interval[0])}–${figure(metric, interval[1])}` })
    : null;
  return element(
    "tr",
    { class: own ? "own" : null, title: note ?? null },
    element("th", { scope: "row", text: name }),
    element("td", { class: "bar-cell" }, drawn),
    element("td", { class: "number" }, element("span", { text: figure(metric, value) }), range),
  );
}

/** Popularity is a count; every other metric is between 0 and 1. */
const figure = (name, value) => (name.startsWith("popularity") ? count(Math.round(value)) : value.toFixed(3));

function meaning(name) {
  const [kind, depth] = name.split("@");
  return (
    {
      hit: `The share of cases whose target is among the first ${depth}.`,
      ndcg: `The discounted gain of the target's rank among the first ${depth}.`,
      mrr: `The reciprocal rank of the target, if it is among the first ${depth}.`,
      coverage: `The share of the catalogue that is recommended to any user among the first ${depth}.`,
      popularity: `The mean number of training events of the recommended items.`,
    }[kind] ?? ""
  );
}

function depths({ metrics, intervals }) {
  const kinds = ["hit", "ndcg", "mrr", "coverage"].filter(kind =>
    Object.keys(metrics).some(name => name.startsWith(`${kind}@`)),
  );
  const ks = [...new Set(Object.keys(metrics).map(name => Number(name.split("@")[1])))].sort(
    (one, other) => one - other,
  );
  const cell = name =>
    element(
      "td",
      { class: "number" },
      element("span", { text: name in metrics ? figure(name, metrics[name]) : "" }),
      name in intervals
        ? element("span", { class: "range", text: intervals[name].map(bound => figure(name, bound)).join("–") })
        : null,
    );
  return element(
    "section",
    {},
    element("h2", { text: "At every k" }),
    element(
      "div",
      { class: "table-room", tabindex: "0", role: "region", "aria-label": "Metrics at every k" },
      element(
        "table",
        { class: "depths" },
        element(
          "thead",
          {},
          element(
            "tr",
            {},
            element("th", { scope: "col", text: "k" }),
            ...kinds.map(kind => element("th", { scope: "col", text: kind })),
          ),
        ),
        element(
          "tbody",
          {},
          ...ks.map(k =>
            element(
              "tr",
              {},
              element("th", { scope: "row", text: String(k) }),
              ...kinds.map(kind => cell(`${kind}@${k}`)),
            ),
          ),
        ),
      ),
    ),
  );
}

function protocol(report) {
  const lines = [
    `${count(report.cases)} cases of the ${report.part ?? "test"} part; ${splitText(report)}`,
    `Each is ranked among all ${count(report.items)} items. ${report.ties === "pessimistic" ? "Ties count against the model." : `Ties: ${report.ties}.`}`,
    `Seen items are ${report.seen}${report.repeats === undefined ? "" : `: ${percent(report.repeats)} of the validation targets are repeats`}.`,
  ];
  if (report.unreachable)
    lines.push(`${counted(report.unreachable, "target")} are seen items, which were excluded: counted as misses.`);
  if (report.unknown) lines.push(`${counted(report.unknown, "target")} are unseen in training: counted as misses.`);
  if (report.without_history)
    lines.push(`${counted(report.without_history, "case")} have no history and were ranked by popularity.`);
  if (report.target_time)
    lines.push("The model uses the time of the target; compare it only with models that use it too.");
  if (report.note) lines.push(report.note);
  return element(
    "section",
    {},
    element("h2", { text: "Evaluation protocol" }),
    element("ul", { class: "plain" }, ...lines.map(text => element("li", { text }))),
  );
}

const splitText = ({ split }) =>
  split === "last" ? "the last event of each user was held out." : "every event after the split time was held out.";

function training({ manifest }) {
  const { training: trained = {} } = manifest;
  const lines = [];
  if (trained.epochs)
    lines.push(
      `${counted(trained.epochs, "epoch")}, of which validation chose ${trained.best_epoch ?? trained.epochs}${trained.best_score ? ` (ndcg@10 ${decimal(trained.best_score)})` : ""}.`,
    );
  if (Array.isArray(trained.seconds))
    lines.push(
      `${duration(trained.seconds.reduce((sum, one) => sum + one, 0))} on ${counted(trained.threads ?? 1, "thread")}.`,
    );
  if (manifest.all) lines.push("Then trained again on all events, for as many epochs.");
  lines.push(`segue ${manifest.segue ?? "?"}, torch ${manifest.torch ?? "?"}.`);
  return element(
    "section",
    {},
    element("h2", { text: "Training" }),
    element("ul", { class: "plain" }, ...lines.map(text => element("li", { text }))),
  );
}

// What the service says of its models → a card: what it learned from, how it was measured, and against what.

import { byId, element, iconButton, segments } from "./dom.js";
import { count, counted, decimal, duration, percent } from "./format.js";
import { on, shownModels, state } from "./state.js";

const USUAL = "ndcg@10";

let shown = null; // a model's name
let metric = USUAL;

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
        ? [measured(report), depths(report), protocol(report)]
        : [element("p", { class: "hint", text: "This run carries no measurement." })]),
      training(model),
    ),
  );
}

// Runs made before their manifest had counts show none.
function counts(counted) {
  return counted ? [["Users", count(counted.users)], ["Events", count(counted.events)]] : [];
}

function facts({ items, length, seen, manifest, report }) {
  const pairs = [
    ["Recipe", manifest.recipe],
    ...counts(manifest.data?.counts),
    ["Items", count(items)],
    ["Test cases", report ? count(report.cases) : "–"],
    ["Reads the newest", counted(length, "item")],
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

/** The model among the baselines, as bars with their intervals. */
function measured(report) {
  const metrics = Object.keys(report.metrics).filter(name => Object.values(report.baselines).every(one => name in one));
  if (!metrics.includes(metric)) metric = metrics.includes(USUAL) ? USUAL : metrics[0];
  const rows = [
    { name: "this model", own: true, value: report.metrics[metric], interval: report.intervals[metric] },
    ...Object.entries(report.baselines).map(([name, one]) => ({
      name,
      value: one[metric],
      interval: report.baseline_intervals?.[name]?.[metric],
      note: report.baseline_notes?.[name],
    })),
  ];
  const most = Math.max(...rows.map(({ value, interval }) => Math.max(value, interval?.[1] ?? 0)), Number.MIN_VALUE);
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
    element("div", { class: "section-head" }, element("h2", { text: "Against simpler ways" }), select),
    element(
      "table",
      { class: "bars" },
      element("caption", { class: "unseen", text: `${metric} of the model and the baselines` }),
      element("tbody", {}, ...rows.map(row => bar(row, most))),
    ),
    element("p", { class: "hint", text: `${meaning(metric)} The line is the 95 % interval, users resampled.` }),
  );
}

function bar({ name, own, value, interval, note }, most) {
  const fill = element("span", { class: "bar-fill" });
  fill.style.width = `${(100 * value) / most}%`;
  const drawn = element("div", { class: "bar-room", "aria-hidden": "true" }, fill);
  if (interval) {
    const whisker = element("span", { class: "whisker" });
    whisker.style.left = `${(100 * interval[0]) / most}%`;
    whisker.style.width = `${(100 * (interval[1] - interval[0])) / most}%`;
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

/** A popularity is a count, everything else a share. */
const figure = (name, value) => (name.startsWith("popularity") ? count(Math.round(value)) : value.toFixed(3));

function meaning(name) {
  const [kind, depth] = name.split("@");
  return (
    {
      hit: `How often the item that came next is among the first ${depth}.`,
      ndcg: `Whether the item that came next is among the first ${depth}, and how high.`,
      mrr: `One divided by the rank of the item that came next, where it is among the first ${depth}.`,
      coverage: `The share of the catalogue that is shown to anybody among the first ${depth}.`,
      popularity: `How many training events the items shown have, on average.`,
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
    element("h2", { text: "At every depth" }),
    element(
      "div",
      { class: "table-room", tabindex: "0", role: "region", "aria-label": "Metrics at every depth" },
      element(
        "table",
        { class: "depths" },
        element(
          "thead",
          {},
          element(
            "tr",
            {},
            element("th", { scope: "col", text: "first" }),
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
    `${count(report.cases)} cases of the ${report.part ?? "test"} part; ${splitWords(report)}`,
    `Each is ranked among all ${count(report.items)} items. ${report.ties === "pessimistic" ? "Ties count against the model." : `Ties: ${report.ties}.`}`,
    `Seen items are ${report.seen}${report.repeats === undefined ? "" : `: ${percent(report.repeats)} of the validation targets are repeats`}.`,
  ];
  if (report.unreachable)
    lines.push(`${counted(report.unreachable, "target")} are seen items, which were excluded: counted as misses.`);
  if (report.unknown) lines.push(`${counted(report.unknown, "target")} never occur in training: counted as misses.`);
  if (report.without_history)
    lines.push(`${counted(report.without_history, "case")} have no history and were answered by popularity.`);
  if (report.target_time)
    lines.push("The model was told the moment of the answer; compare it only with models that were, too.");
  if (report.note) lines.push(report.note);
  return element(
    "section",
    {},
    element("h2", { text: "How it was measured" }),
    element("ul", { class: "plain" }, ...lines.map(text => element("li", { text }))),
  );
}

const splitWords = ({ split }) =>
  split === "last" ? "the last event of each user was held out." : "every event after a moment was held out.";

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
  if (manifest.all) lines.push("Trained again on every event afterwards, for as many epochs.");
  lines.push(`segue ${manifest.segue ?? "?"}, torch ${manifest.torch ?? "?"}.`);
  return element(
    "section",
    {},
    element("h2", { text: "Training" }),
    element("ul", { class: "plain" }, ...lines.map(text => element("li", { text }))),
  );
}

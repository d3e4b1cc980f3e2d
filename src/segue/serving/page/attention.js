// Attention weights by layer, head, query and key → a heat map and a sentence with the largest weights.
// The row that yields the answer is the last one, or the first step of a plan.

import { element, segments } from "./dom.js";
import { brief, decimal } from "./format.js";
import { heatmap } from "./heatmap.js";

const MEAN = "mean";
const NAMED = 3; // items in the sentence
const NEWEST = 24; // entries shown at first

/** `redraw` is called when another layer or head is chosen. The choice is kept for the next answer. */
export function attentionView(redraw) {
  let layer = null;
  let head = MEAN;
  let everything = false;

  const choose = change => {
    change();
    redraw();
  };

  function section(answer) {
    const layers = answer.attention;
    const chosenLayer = layer === null || layer >= layers.length ? layers.length - 1 : layer;
    const heads = layers[chosenLayer].weights.length;
    const chosenHead = heads === 1 ? "0" : head !== MEAN && Number(head) >= heads ? MEAN : head;
    const map = named(layers[chosenLayer], chosenHead, answer);
    const where = `${map.name}, ${chosenHead === MEAN ? "mean of the heads" : `head ${Number(chosenHead) + 1}`}`;
    return element(
      "section",
      { class: "detail-section" },
      element("h2", { text: "Attention weights" }),
      element(
        "div",
        { class: "attention-choice" },
        segments("Layer", "layer", layers.map(choiceOfLayer), String(chosenLayer), value =>
          choose(() => {
            layer = Number(value);
          }),
        ),
        segments(
          "Head",
          "head",
          [...(heads > 1 ? [{ value: MEAN, label: "Mean" }] : []), ...numbered(heads)],
          chosenHead,
          value =>
            choose(() => {
              head = value;
            }),
        ),
      ),
      element("p", { class: "headline", id: "gist", text: gist(map, where, subjectOf(layers, chosenLayer, map)) }),
      heatmap(everything ? map : newest(map), `Attention, ${where}`),
      allButton(map.columns.length, everything, () =>
        choose(() => {
          everything = !everything;
        }),
      ),
    );
  }

  return { section };
}

/** The label of `layer 2` is 2; other names are labels as they are. */
const choiceOfLayer = ({ name }, index) => ({ value: String(index), label: name.replace(/^layer (?=\d+$)/, "") });

const numbered = length => Array.from({ length }, (_, index) => ({ value: String(index), label: String(index + 1) }));

function allButton(length, everything, press) {
  if (length <= NEWEST) return null;
  const text = everything ? `Only the newest ${NEWEST}` : `All ${length} items`;
  return element("button", { type: "button", class: "text-button", text, "data-focus": "all", on: { click: press } });
}

function chosenWeights(weights, head) {
  if (head !== MEAN) return weights[Number(head)];
  return weights[0].map((row, query) =>
    row.map((_, key) => weights.reduce((sum, one) => sum + one[query][key], 0) / weights.length),
  );
}

/** The map with the names of its rows and columns. */
const named = ({ name, rows, columns, weights }, head, { contributions, plan }) => ({
  name,
  weights: chosenWeights(weights, head),
  rows: entriesOf(rows, contributions, plan),
  columns: entriesOf(columns, contributions, plan),
  answering: rows.every(row => row === null) ? 0 : rows.length - 1,
});

/** The name and position of each entry. An index of null is the query token or a step of a plan. */
function entriesOf(indexes, contributions, plan) {
  const own = indexes.filter(index => index === null).length;
  return indexes.map((index, at) => {
    if (index !== null) return { position: index + 1, name: brief(contributions[index].title ?? contributions[index].item) };
    const step = at + 1 + own - indexes.length; // these are the last ones
    if (own === 1) return { position: "?", name: "the query" };
    const chosen = plan[step - 1];
    return { position: `?${step}`, name: `step ${step}${chosen ? `: ${brief(chosen.title ?? chosen.id)}` : ""}` };
  });
}

const newest = ({ weights, rows, columns, answering }) => ({
  weights: weights.slice(-NEWEST).map(row => row.slice(-NEWEST)),
  rows: rows.slice(-NEWEST),
  columns: columns.slice(-NEWEST),
  answering: answering && Math.min(rows.length, NEWEST) - 1,
});

/** The subject of the sentence: the answer, if the row is the one that yields it. */
function subjectOf(layers, chosen, { rows, answering }) {
  if (layers[chosen].rows[answering] === layers.at(-1).rows.at(-1)) return "the answer";
  return `${rows[answering].position} “${rows[answering].name}”`;
}

/** The largest weights of that row as a sentence. */
function gist({ weights, columns, answering }, where, subject) {
  const named = weights[answering]
    .map((weight, key) => ({ weight, ...columns[key] }))
    .filter(({ weight }) => weight !== 0)
    .sort((one, other) => Math.abs(other.weight) - Math.abs(one.weight))
    .slice(0, NAMED)
    .map(({ weight, position, name }) => `${position} “${name}” (${decimal(weight)})`);
  return `In ${where}, ${subject} attends most to ${new Intl.ListFormat("en").format(named)}.`;
}

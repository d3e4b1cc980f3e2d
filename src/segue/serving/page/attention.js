// Attention weights by layer, head, query and key → a heat map with values to hover and walk, and the gist in words.
// The row that the answer is made from is the last, or the first of a plan's steps.

import { element, segments } from "./dom.js";
import { brief, decimal } from "./format.js";
import { heatmap } from "./heatmap.js";

const MEAN = "mean";
const NAMED = 3; // items in the gist
const NEWEST = 24; // entries shown before all of them are asked for

/** `redraw` is called when another layer or head was chosen. The choice stays from one answer to the next. */
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
      element("h2", { text: "Where the model looks" }),
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
      element("p", { class: "headline", id: "gist", text: gist(map, where, asking(layers, chosenLayer, map)) }),
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

/** `layer 2` is the choice 2; a layer of another name has it whole. */
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

/** The map with what each of its rows and columns is called. */
const named = ({ name, rows, columns, weights }, head, { contributions, plan }) => ({
  name,
  weights: chosenWeights(weights, head),
  rows: entriesOf(rows, contributions, plan),
  columns: entriesOf(columns, contributions, plan),
  answering: rows.every(row => row === null) ? 0 : rows.length - 1,
});

/** The name and the place in the history of each; null is a token of the model's own, or a step that chose an item. */
function entriesOf(indexes, contributions, plan) {
  const own = indexes.filter(index => index === null).length;
  return indexes.map((index, at) => {
    if (index !== null) return { place: index + 1, name: brief(contributions[index].title ?? contributions[index].item) };
    const step = at + 1 + own - indexes.length; // they are the last ones
    if (own === 1) return { place: "?", name: "the question" };
    const chosen = plan[step - 1];
    return { place: `?${step}`, name: `step ${step}${chosen ? `: ${brief(chosen.title ?? chosen.id)}` : ""}` };
  });
}

const newest = ({ weights, rows, columns, answering }) => ({
  weights: weights.slice(-NEWEST).map(row => row.slice(-NEWEST)),
  rows: rows.slice(-NEWEST),
  columns: columns.slice(-NEWEST),
  answering: answering && Math.min(rows.length, NEWEST) - 1,
});

/** Who looks in the row that is told of: the answer, where it is the token that the answer is made from. */
function asking(layers, chosen, { rows, answering }) {
  if (layers[chosen].rows[answering] === layers.at(-1).rows.at(-1)) return "the answer";
  return `${rows[answering].place} “${rows[answering].name}”`;
}

/** Where that row looks most, in words. */
function gist({ weights, columns, answering }, where, who) {
  const named = weights[answering]
    .map((weight, key) => ({ weight, ...columns[key] }))
    .filter(({ weight }) => weight !== 0)
    .sort((one, other) => Math.abs(other.weight) - Math.abs(one.weight))
    .slice(0, NAMED)
    .map(({ weight, place, name }) => `${place} “${name}” (${decimal(weight)})`);
  return `In ${where}, ${who} looks most at ${new Intl.ListFormat("en").format(named)}.`;
}

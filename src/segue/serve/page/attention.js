// Attention weights by layer, head, query and key → a heat map with values to hover and walk, and the gist in words.

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
    const { weights } = answer.attention;
    const heads = weights[0].length;
    const chosenLayer = layer === null || layer >= weights.length ? weights.length - 1 : layer;
    const chosenHead = head !== MEAN && Number(head) >= heads ? MEAN : head;
    const map = named(chosenMap(weights[chosenLayer], chosenHead), answer);
    const where = `layer ${chosenLayer + 1}, ${chosenHead === MEAN ? "mean of the heads" : `head ${Number(chosenHead) + 1}`}`;
    return element(
      "section",
      { class: "detail-section" },
      element("h2", { text: "Where the model looks" }),
      element(
        "div",
        { class: "attention-choice" },
        segments("Layer", "layer", numbered(weights.length), String(chosenLayer), value =>
          choose(() => {
            layer = Number(value);
          }),
        ),
        segments(
          "Head",
          "head",
          [...(heads > 1 ? [{ value: MEAN, label: "Mean" }] : []), ...numbered(heads)],
          heads > 1 ? chosenHead : "0",
          value =>
            choose(() => {
              head = value;
            }),
        ),
      ),
      element("p", { class: "headline", id: "gist", text: gist(map, where) }),
      heatmap(everything ? map : newest(map), `Attention, ${where}`),
      allButton(answer.attention.entries.length, everything, () =>
        choose(() => {
          everything = !everything;
        }),
      ),
    );
  }

  return { section };
}

const numbered = length => Array.from({ length }, (_, index) => ({ value: String(index), label: String(index + 1) }));

function allButton(length, everything, press) {
  if (length <= NEWEST) return null;
  const text = everything ? `Only the newest ${NEWEST}` : `All ${length} items`;
  return element("button", { type: "button", class: "text-button", text, "data-focus": "all", on: { click: press } });
}

function chosenMap(layer, head) {
  if (head !== MEAN) return layer[Number(head)];
  return layer[0].map((row, query) =>
    row.map((_, key) => layer.reduce((sum, one) => sum + one[query][key], 0) / layer.length),
  );
}

/** The map with what each of its entries is called and its place in the history; null is the question's own token. */
function named(weights, { attention, contributions }) {
  const entries = attention.entries.map(index =>
    index === null
      ? { place: "?", name: "the question" }
      : { place: index + 1, name: brief(contributions[index].title ?? contributions[index].item) },
  );
  return { weights, entries };
}

function newest({ weights, entries }) {
  return { weights: weights.slice(-NEWEST).map(row => row.slice(-NEWEST)), entries: entries.slice(-NEWEST) };
}

/** The last row is the one that the answer is made from. */
function gist({ weights, entries }, where) {
  const row = weights.at(-1) ?? [];
  const named = row
    .map((weight, key) => ({ weight, ...entries[key] }))
    .sort((one, other) => other.weight - one.weight)
    .slice(0, NAMED)
    .map(({ weight, place, name }) => `${place} “${name}” (${decimal(weight)})`);
  return `In ${where}, the answer looks most at ${new Intl.ListFormat("en").format(named)}.`;
}

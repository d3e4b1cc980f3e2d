// Weights by row and column → a drawn map: the pointer or the arrow keys walk it, and a line below says a cell's value.

import { element } from "./dom.js";
import { decimal } from "./format.js";

const MARGIN = 26; // pixels for the places along the top and the left
const LARGEST_CELL = 34;
const OVERHANG = 8; // pixels the last number may stand out
const NAMED = 10; // rows up to which they are named
const NAME = 130; // pixels for a name
const ROOM = 18; // pixels a number wants
const RESTING =
  "Each row is an item and where it looks; the answer is made from the framed row of the last layer. " +
  "Point at a cell, or walk with the arrow keys.";

/** `map`: {weights [query][key], rows, columns: [{place, name}], answering: the row to frame}. */
export function heatmap(map, label) {
  const { weights, rows, columns } = map;
  const canvas = element("canvas", {
    class: "heatmap",
    tabindex: "0",
    role: "img",
    "aria-label": label,
    "aria-describedby": "gist cell",
    "data-focus": "heatmap",
  });
  const readout = element("p", { class: "cell", id: "cell", "aria-live": "polite" });
  const most = Math.max(...weights.map(row => Math.max(...row.map(Math.abs))), Number.MIN_VALUE);
  const last = [rows.length - 1, columns.length - 1];
  let cell = null; // [query, key]
  let size = 0;

  const draw = () => {
    const wide = canvas.parentElement?.clientWidth ?? 0;
    if (!wide) return;
    const named = rows.length <= NAMED;
    size = Math.min(LARGEST_CELL, (wide - MARGIN - (named ? NAME : OVERHANG)) / columns.length);
    paint(canvas, {
      ...map,
      most,
      size,
      cell,
      wide: named ? wide : Math.min(wide, Math.ceil(MARGIN + size * columns.length) + OVERHANG),
    });
  };

  const show = next => {
    cell = next;
    readout.textContent = cell === null ? RESTING : sentence(cell, map);
    draw();
  };

  const under = event => {
    const box = canvas.getBoundingClientRect();
    const [key, query] = [event.clientX - box.left, event.clientY - box.top].map(offset =>
      Math.floor((offset - MARGIN) / size),
    );
    return query >= 0 && key >= 0 && query <= last[0] && key <= last[1] ? [query, key] : null;
  };

  canvas.addEventListener("pointermove", event => show(under(event)));
  canvas.addEventListener("pointerdown", event => show(under(event)));
  canvas.addEventListener("pointerleave", () => show(document.activeElement === canvas ? cell : null));
  canvas.addEventListener("focus", () => show(cell ?? last));
  canvas.addEventListener("blur", () => show(null));
  canvas.addEventListener("keydown", event => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    show((cell ?? last).map((place, axis) => Math.max(0, Math.min(last[axis], place + step[axis]))));
  });
  new ResizeObserver(draw).observe(canvas);
  const themes = new AbortController();
  addEventListener("themechange", () => (canvas.isConnected ? draw() : themes.abort()), { signal: themes.signal });
  readout.textContent = RESTING;
  return element(
    "figure",
    { class: "heatmap-figure" },
    element("div", { class: "heatmap-room" }, canvas),
    readout,
    legend(most, weights.some(row => row.some(weight => weight < 0))),
  );
}

function sentence([query, key], { weights, rows, columns }) {
  const [from, to] = [rows[query], columns[key]];
  return `${from.place} “${from.name}” looks at ${to.place} “${to.name}”: ${decimal(weights[query][key])}`;
}

function legend(most, below) {
  const minus = below ? [element("span", { text: decimal(-most) }), element("span", { class: "legend-ramp below" })] : [];
  return element(
    "div",
    { class: "legend", "aria-hidden": "true" },
    ...minus,
    element("span", { text: "0" }),
    element("span", { class: "legend-ramp" }),
    element("span", { text: decimal(most) }),
  );
}

function paint(canvas, { weights, rows, columns, answering, most, size, cell, wide }) {
  const edge = Math.ceil(MARGIN + size * rows.length);
  const scale = devicePixelRatio || 1;
  canvas.style.width = `${wide}px`;
  canvas.style.height = `${edge}px`;
  canvas.width = Math.round(wide * scale);
  canvas.height = Math.round(edge * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(canvas); // its colours follow the theme; custom properties would come unresolved
  const gap = size > 8 ? 1 : 0;
  for (const [query, row] of weights.entries())
    for (const [key, weight] of row.entries()) {
      context.fillStyle = weight < 0 ? style.caretColor : style.color;
      context.globalAlpha = Math.min(1, 0.03 + (0.97 * Math.abs(weight)) / most);
      context.fillRect(MARGIN + key * size, MARGIN + query * size, size - gap, size - gap);
    }
  context.globalAlpha = 1;
  places(context, { rows, columns, size, style });
  if (rows.length <= NAMED) names(context, { rows, columns, size, wide });
  context.strokeStyle = style.outlineColor;
  context.lineWidth = 1;
  frame(context, 0, answering, columns.length, 1, size, gap);
  if (cell === null) return;
  context.lineWidth = 2;
  frame(context, cell[1], cell[0], 1, 1, size, gap);
}

/** A frame round cells, by column and row. */
function frame(context, column, row, columns, rows, size, gap) {
  context.strokeRect(
    MARGIN + column * size - 0.5,
    MARGIN + row * size - 0.5,
    columns * size - gap + 1,
    rows * size - gap + 1,
  );
}

/** What each row is called, to the right of it. */
function names(context, { rows, columns, size, wide }) {
  const left = MARGIN + columns.length * size + 8;
  context.textAlign = "left";
  for (const [index, { name }] of rows.entries())
    context.fillText(fitting(context, name, wide - left), left, MARGIN + (index + 0.5) * size);
}

/** As much of a text as has room. */
function fitting(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  const letters = [...text];
  while (letters.length && context.measureText(`${letters.join("")}…`).width > room) letters.pop();
  return `${letters.join("").trimEnd()}…`;
}

/** The places of rows along the left and of columns along the top, as many as have room, the last among them. */
function places(context, { rows, columns, size, style }) {
  const every = Math.max(1, Math.ceil(ROOM / size));
  const middle = index => MARGIN + (index + 0.5) * size;
  const spaced = entries => [...entries.entries()].filter(([index]) => (entries.length - 1 - index) % every === 0);
  context.font = `11px ${style.fontFamily}`;
  context.fillStyle = style.borderTopColor;
  context.textBaseline = "middle";
  context.textAlign = "center";
  for (const [index, { place }] of spaced(columns)) context.fillText(String(place), middle(index), MARGIN / 2);
  context.textAlign = "right";
  for (const [index, { place }] of spaced(rows)) context.fillText(String(place), MARGIN - 6, middle(index));
}

// Weights by row and column → a heat map. The pointer or the arrow keys select a cell; a line below shows its value.

import { element } from "./dom.js";
import { decimal } from "./format.js";

const MARGIN = 26; // pixels for the positions at the top and on the left
const MAX_CELL = 34;
const OVERHANG = 8; // pixels by which the last number may overhang
const MAX_NAMED = 10; // rows up to which names are drawn
const NAME = 130; // pixels for a name
const NUMBER = 18; // pixels for a number
const HELP =
  "Each row shows the items that one item attends to; the framed row of the last layer yields the answer. " +
  "Point at a cell, or use the arrow keys.";

/** `map`: {weights [query][key], rows, columns: [{position, name}], answering: the row to frame}. */
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
  const largest = Math.max(...weights.map(row => Math.max(...row.map(Math.abs))), Number.MIN_VALUE);
  const last = [rows.length - 1, columns.length - 1];
  let cell = null; // [query, key]
  let size = 0;

  const draw = () => {
    const wide = canvas.parentElement?.clientWidth ?? 0;
    if (!wide) return;
    const named = rows.length <= MAX_NAMED;
    size = Math.min(MAX_CELL, (wide - MARGIN - (named ? NAME : OVERHANG)) / columns.length);
    paint(canvas, {
      ...map,
      largest,
      size,
      cell,
      wide: named ? wide : Math.min(wide, Math.ceil(MARGIN + size * columns.length) + OVERHANG),
    });
  };

  const show = next => {
    cell = next;
    readout.textContent = cell === null ? HELP : sentence(cell, map);
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
    show((cell ?? last).map((index, axis) => Math.max(0, Math.min(last[axis], index + step[axis]))));
  });
  new ResizeObserver(draw).observe(canvas);
  const themes = new AbortController();
  addEventListener("themechange", () => (canvas.isConnected ? draw() : themes.abort()), { signal: themes.signal });
  readout.textContent = HELP;
  return element(
    "figure",
    { class: "heatmap-figure" },
    element("div", { class: "heatmap-room" }, canvas),
    readout,
    legend(largest, weights.some(row => row.some(weight => weight < 0))),
  );
}

function sentence([query, key], { weights, rows, columns }) {
  const [from, to] = [rows[query], columns[key]];
  return `${from.position} “${from.name}” attends to ${to.position} “${to.name}”: ${decimal(weights[query][key])}`;
}

function legend(largest, below) {
  const minus = below ? [element("span", { text: decimal(-largest) }), element("span", { class: "legend-ramp below" })] : [];
  return element(
    "div",
    { class: "legend", "aria-hidden": "true" },
    ...minus,
    element("span", { text: "0" }),
    element("span", { class: "legend-ramp" }),
    element("span", { text: decimal(largest) }),
  );
}

function paint(canvas, { weights, rows, columns, answering, largest, size, cell, wide }) {
  const edge = Math.ceil(MARGIN + size * rows.length);
  const scale = devicePixelRatio || 1;
  canvas.style.width = `${wide}px`;
  canvas.style.height = `${edge}px`;
  canvas.width = Math.round(wide * scale);
  canvas.height = Math.round(edge * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(canvas); // its colours follow the theme; custom properties would not be resolved
  const gap = size > 8 ? 1 : 0;
  for (const [query, row] of weights.entries())
    for (const [key, weight] of row.entries()) {
      context.fillStyle = weight < 0 ? style.caretColor : style.color;
      context.globalAlpha = Math.min(1, 0.03 + (0.97 * Math.abs(weight)) / largest);
      context.fillRect(MARGIN + key * size, MARGIN + query * size, size - gap, size - gap);
    }
  context.globalAlpha = 1;
  positions(context, { rows, columns, size, style });
  if (rows.length <= MAX_NAMED) names(context, { rows, columns, size, wide });
  context.strokeStyle = style.outlineColor;
  context.lineWidth = 1;
  frame(context, 0, answering, columns.length, 1, size, gap);
  if (cell === null) return;
  context.lineWidth = 2;
  frame(context, cell[1], cell[0], 1, 1, size, gap);
}

/** Frame cells, by column and row. */
function frame(context, column, row, columns, rows, size, gap) {
  context.strokeRect(
    MARGIN + column * size - 0.5,
    MARGIN + row * size - 0.5,
    columns * size - gap + 1,
    rows * size - gap + 1,
  );
}

/** Draw the name of each row to its right. */
function names(context, { rows, columns, size, wide }) {
  const left = MARGIN + columns.length * size + 8;
  context.textAlign = "left";
  for (const [index, { name }] of rows.entries())
    context.fillText(fitting(context, name, wide - left), left, MARGIN + (index + 0.5) * size);
}

/** As much of a text as fits. */
function fitting(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  const letters = [...text];
  while (letters.length && context.measureText(`${letters.join("")}…`).width > room) letters.pop();
  return `${letters.join("").trimEnd()}…`;
}

/** Draw the positions of rows on the left and of columns at the top, as many as fit, including the last. */
function positions(context, { rows, columns, size, style }) {
  const every = Math.max(1, Math.ceil(NUMBER / size));
  const middle = index => MARGIN + (index + 0.5) * size;
  const spaced = entries => [...entries.entries()].filter(([index]) => (entries.length - 1 - index) % every === 0);
  context.font = `11px ${style.fontFamily}`;
  context.fillStyle = style.borderTopColor;
  context.textBaseline = "middle";
  context.textAlign = "center";
  for (const [index, { position }] of spaced(columns)) context.fillText(String(position), middle(index), MARGIN / 2);
  context.textAlign = "right";
  for (const [index, { position }] of spaced(rows)) context.fillText(String(position), MARGIN - 6, middle(index));
}

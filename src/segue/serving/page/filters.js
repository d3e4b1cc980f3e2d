// Catalogue columns → filters: an item matches if, in every chosen column, it has one of the chosen values.

import { latest, searchItems, superseded } from "./api.js";
import { byId, element, icon, redrawn } from "./dom.js";
import { brief } from "./format.js";
import { choose, on, shownModels, state } from "./state.js";

const SAMPLE = 100; // frequent items whose values are suggested

let open = false;
let column = null;
let typed = ""; // kept when suggestions arrive and the form is redrawn
let samples = new Map(); // column → values

export function startFilters() {
  on("query", draw);
  on("models", draw);
}

/** The columns that every shown model can filter by. */
function columns() {
  const [first, ...others] = shownModels().map(model => model.columns);
  return (first ?? []).filter(name => others.every(names => names.includes(name)));
}

async function suggest() {
  if (samples.size) return;
  const signal = latest("samples");
  try {
    const { items } = await searchItems("", SAMPLE, signal);
    const values = new Map();
    for (const item of items)
      for (const [name, value] of Object.entries(item.details ?? {}))
        if (value !== null) values.set(name, (values.get(name) ?? new Set()).add(String(value)));
    samples = values;
    draw();
  } catch (error) {
    if (!superseded(error)) samples = new Map(); // values can still be typed
  }
}

function draw() {
  const parent = byId("filters");
  const names = columns();
  const chosen = Object.entries(state.where).flatMap(([name, values]) => values.map(value => ({ name, value })));
  parent.hidden = !names.length && !chosen.length;
  redrawn(parent, () => {
    const chips = chosen.map(chip);
    if (names.length) chips.push(openButton());
    parent.replaceChildren(
      element("div", { class: "chips" }, ...chips),
      ...(open && names.length ? [chooser(names)] : []),
    );
  });
}

function chip({ name, value }) {
  return element(
    "button",
    {
      type: "button",
      class: "chip",
      "aria-label": `Remove the filter ${name}: ${value}`,
      "data-focus": `chip ${name}:${value}`,
      on: { click: () => without(name, value) },
    },
    element("bdi", { text: `${name}: ${brief(value, 24)}` }),
    icon("close"),
  );
}

const openButton = () =>
  element(
    "button",
    {
      type: "button",
      class: "chip add",
      "aria-expanded": String(open),
      "data-focus": "filter-open",
      on: {
        click: () => {
          open = !open;
          typed = "";
          draw();
          if (open) suggest();
        },
      },
    },
    icon("plus"),
    "Filter",
  );

function chooser(names) {
  if (!names.includes(column)) [column] = names;
  const values = [...(samples.get(column) ?? [])].sort();
  const select = element(
    "select",
    { "aria-label": "Column", "data-focus": "filter-column" },
    ...names.map(name => element("option", { value: name, text: name })),
  );
  select.value = column;
  select.addEventListener("change", () => {
    column = select.value;
    draw();
  });
  const input = element("input", {
    type: "text",
    "aria-label": "Value",
    placeholder: "value",
    list: "filter-values",
    "data-focus": "filter-value",
    autocomplete: "off",
    on: { input: () => (typed = input.value) },
  });
  input.value = typed;
  const submit = event => {
    event.preventDefault();
    if (input.value !== "") including(column, input.value);
  };
  return element(
    "form",
    { class: "filter-form", on: { submit } },
    select,
    input,
    element("datalist", { id: "filter-values" }, ...values.map(value => element("option", { value }))),
    element("button", { type: "submit", class: "button", text: "Add" }),
  );
}

function including(name, value) {
  open = false;
  typed = "";
  const values = new Set([...(state.where[name] ?? []), value]);
  choose({ where: { ...state.where, [name]: [...values] } });
}

function without(name, value) {
  const { [name]: values, ...others } = state.where;
  const left = values.filter(one => one !== value);
  choose({ where: left.length ? { ...others, [name]: left } : others });
}

// Names, attributes and text → elements. Text is always inserted as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

const SHAPES = {
  close: "M4 4l8 8M12 4l-8 8",
  up: "M8 13V3M3.5 7.5L8 3l4.5 4.5",
  down: "M8 3v10M3.5 8.5L8 13l4.5-4.5",
  near: "M2.5 6c2-2.2 3.7-2.2 5.5-.6s3.5 1.6 5.5-.6M2.5 11c2-2.2 3.7-2.2 5.5-.6s3.5 1.6 5.5-.6",
  grip: "M6 3.5v.01M10 3.5v.01M6 8v.01M10 8v.01M6 12.5v.01M10 12.5v.01",
  sun:
    "M8 5.2a2.8 2.8 0 1 0 0 5.6a2.8 2.8 0 1 0 0-5.6M8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15" +
    "M3 3l1.1 1.1M11.9 11.9L13 13M3 13l1.1-1.1M11.9 4.1L13 3",
  moon: "M13.5 9.8A6 6 0 0 1 6.2 2.5a5.8 5.8 0 1 0 7.3 7.3z",
  plus: "M8 3.5v9M3.5 8h9",
};

/** An element with attributes (`null` and `false` leave one out), listeners under `on`, and children. */
export function element(name, { on = {}, text, ...attributes } = {}, ...children) {
  const created = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes))
    if (value !== null && value !== undefined && value !== false)
      created.setAttribute(attribute, value === true ? "" : value);
  for (const [event, listener] of Object.entries(on)) created.addEventListener(event, listener);
  if (text !== undefined) created.textContent = text;
  created.append(...children.filter(child => child !== null));
  return created;
}

/** An icon, hidden from screen readers. */
export function icon(shape) {
  const svg = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  svg.setAttribute("viewBox", "0 0 16 16");
  svg.setAttribute("class", `icon icon-${shape}`);
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", SHAPES[shape]);
  svg.append(path);
  return svg;
}

/** A button with an icon and a label. */
export function iconButton(shape, label, press, attributes = {}) {
  return element(
    "button",
    { type: "button", class: "icon-button", "aria-label": label, title: label, on: { click: press }, ...attributes },
    icon(shape),
  );
}

export const byId = id => document.getElementById(id);

/** Redraw inside `parent` and keep the focus on the same control, by its `data-focus`. */
export function redrawn(parent, draw) {
  const focused = parent.contains(document.activeElement) ? document.activeElement.dataset.focus : undefined;
  draw();
  if (focused === undefined || parent.contains(document.activeElement)) return;
  focusControl(parent, focused);
}

/** Focus the control of that name, or else the last one of its kind. */
function focusControl(parent, name) {
  const controls = [...parent.querySelectorAll("[data-focus]")].filter(control => !control.disabled);
  const same = controls.find(control => control.dataset.focus === name);
  const kind = name.split(" ")[0];
  const alike = controls.filter(control => control.dataset.focus.split(" ")[0] === kind);
  (same ?? alike.at(-1) ?? controls[0])?.focus();
}

/** Announce a text to screen readers. */
export function announce(text) {
  byId("announcement").textContent = text;
}

/** Redraw a list whose rows have `data-row`, and animate the rows that moved. */
export function gliding(list, draw) {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return draw();
  const before = new Map([...list.children].map(row => [row.dataset.row, row.getBoundingClientRect().top]));
  draw();
  if (!before.size) return;
  for (const row of list.children) {
    const top = before.get(row.dataset.row);
    const moved = top === undefined ? 0 : top - row.getBoundingClientRect().top;
    if (top === undefined) row.animate([{ opacity: 0 }, { opacity: 1 }], { duration: 240, easing: "ease-out" });
    else if (moved)
      row.animate([{ transform: `translateY(${moved}px)` }, { transform: "none" }], {
        duration: 240,
        easing: "ease-out",
      });
  }
}

/** A group of radio buttons, drawn as one row. */
export function segments(legend, name, options, chosen, choose) {
  const inputs = options.map(({ value, label }) =>
    element(
      "label",
      {},
      element("input", {
        type: "radio",
        name,
        value,
        checked: value === chosen,
        "data-focus": `${name} ${value}`,
        on: { change: () => choose(value) },
      }),
      element("span", { text: label }),
    ),
  );
  return element("fieldset", { class: "segments" }, element("legend", { text: legend }), ...inputs);
}

// The OpenAPI document → a page on which every operation can be read and tried.

import { byId, element } from "./dom.js";

const KEY = "segue-key"; // the page at / stores its key there as well

async function start() {
  const key = byId("key-input");
  key.value = sessionStorage.getItem(KEY) ?? "";
  key.addEventListener("input", () =>
    key.value ? sessionStorage.setItem(KEY, key.value) : sessionStorage.removeItem(KEY),
  );
  byId("key-form").addEventListener("submit", event => event.preventDefault());
  const operations = byId("operations");
  try {
    const schema = await (await fetch("/schema/openapi.json")).json();
    byId("about").textContent = schema.info.description ?? "";
    operations.replaceChildren(
      ...Object.entries(schema.paths).flatMap(([path, methods]) =>
        Object.entries(methods)
          .filter(([, operation]) => typeof operation === "object" && "responses" in operation)
          .map(([method, operation]) => drawOperation(method, path, operation)),
      ),
    );
  } catch (error) {
    operations.replaceChildren(
      element("p", { role: "alert", text: `/schema/openapi.json cannot be read: ${error.message}` }),
    );
  }
}

function drawOperation(method, path, operation) {
  const inputs = (operation.parameters ?? []).map(parameter => ({ parameter, input: parameterInput(parameter) }));
  const body = bodyInput(operation);
  const output = element("pre", { hidden: true, tabindex: "0", "aria-label": "Answer", "aria-live": "polite" });
  const submit = () => send(method, path, inputs, body, output);
  const inside = element("div", { class: "operation" });
  if (operation.description) inside.append(element("p", { text: operation.description }));
  if (inputs.length) inside.append(element("h2", { text: "Parameters" }), ...inputs.map(parameterRow));
  if (body) inside.append(element("h2", { text: "Body" }), body);
  inside.append(
    responses(operation.responses),
    element("button", { type: "button", class: "button primary", text: "Send", on: { click: submit } }),
    output,
  );
  return element(
    "details",
    {},
    element(
      "summary",
      {},
      element("span", { class: `method ${method}`, text: method.toUpperCase() }),
      element("span", { class: "path", text: path }),
      element("span", { class: "summary", text: operation.summary ?? "" }),
    ),
    inside,
  );
}

function parameterInput(parameter) {
  const attributes = { "aria-label": parameter.name, autocomplete: "off", spellcheck: "false" };
  const input = several(parameter)
    ? element("textarea", { rows: "1", ...attributes })
    : element("input", { type: "text", ...attributes });
  const first = Object.values(parameter.examples ?? {})[0]?.value;
  input.value = parameter.example ?? first ?? parameter.schema?.default ?? "";
  return input;
}

/** Whether a parameter may be repeated. */
function several({ schema }) {
  return [schema, ...(schema?.anyOf ?? schema?.oneOf ?? [])].some(one => one?.type === "array");
}

function parameterRow({ parameter, input }) {
  const needed = parameter.required ? " *" : "";
  const more = several(parameter) ? " One value a line." : "";
  return element(
    "div",
    { class: "parameter" },
    element("code", { text: `${parameter.name}${needed}` }),
    input,
    element("span", { class: "hint", text: `${parameter.description ?? ""}${more}` }),
  );
}

function bodyInput(operation) {
  const content = operation.requestBody?.content?.["application/json"];
  if (content === undefined) return null;
  const area = element("textarea", { "aria-label": "Body", spellcheck: "false" });
  area.value = JSON.stringify(content.example ?? Object.values(content.examples ?? {})[0]?.value ?? {}, null, 2);
  return area;
}

function responses(documented) {
  const lines = Object.entries(documented).map(([status, { description }]) =>
    element("li", {}, element("code", { text: status }), ` ${description ?? ""}`),
  );
  return element("ul", { class: "responses" }, ...lines);
}

async function send(method, path, inputs, body, output) {
  output.hidden = false;
  output.textContent = "…";
  const query = new URLSearchParams();
  let target = path;
  for (const { parameter, input } of inputs) {
    if (parameter.in === "path") target = target.replace(`{${parameter.name}}`, () => encodeURIComponent(input.value));
    else if (input.value !== "")
      for (const value of several(parameter) ? input.value.split("\n").filter(Boolean) : [input.value])
        query.append(parameter.name, value);
  }
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body) headers["content-type"] = "application/json";
  try {
    const response = await fetch(query.size ? `${target}?${query}` : target, {
      method: method.toUpperCase(),
      headers,
      body: body?.value,
    });
    const text = await response.text();
    output.textContent = `${response.status} ${response.statusText}\n${pretty(text)}`;
  } catch (error) {
    output.textContent = `The service did not answer: ${error.message}`;
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not JSON: unchanged
  }
}

start();

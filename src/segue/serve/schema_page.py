"""The OpenAPI document as a page to read and try, with nothing loaded from elsewhere."""

from __future__ import annotations

from typing import Any

from litestar import Request
from litestar.openapi.plugins import OpenAPIRenderPlugin

# Everything shown is set as text, never as HTML: ids and titles come from strangers' catalogues.
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>segue</title>
<style>
  :root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
  body { max-width: 52rem; margin: 2rem auto; padding: 0 1rem; }
  section { border-top: 1px solid #8886; padding: .5rem 0 1rem; }
  h2 { font: 600 1rem ui-monospace, monospace; }
  label { display: block; margin: .5rem 0; }
  input, textarea, pre { font: .9rem ui-monospace, monospace; box-sizing: border-box; }
  textarea { width: 100%; height: 9rem; }
  pre { background: #8882; padding: .5rem; overflow: auto; max-height: 24rem; }
</style>
<h1>segue</h1>
<p id="about"></p>
<p><a href="/schema/openapi.json">openapi.json</a></p>
<main></main>
<script>
const element = (name, text = "") => Object.assign(document.createElement(name), { textContent: text });

function field(parent, text, control) {
  const label = element("label", text + " ");
  label.append(control);
  parent.append(label);
  return control;
}

async function send(method, path, body, output) {
  output.textContent = "…";
  try {
    const options = body === null ? { method } : { method, body, headers: { "content-type": "application/json" } };
    const response = await fetch(path, options);
    const text = await response.text();
    let shown = text;
    try { shown = JSON.stringify(JSON.parse(text), null, 2); } catch { /* not JSON: as it came */ }
    output.textContent = response.status + "\\n" + shown;
  } catch (error) {
    output.textContent = "The service did not answer: " + error.message;
  }
}

function draw(method, path, operation) {
  const section = element("section");
  section.append(element("h2", method.toUpperCase() + " " + path));
  section.append(element("p", [operation.summary, operation.description].filter(Boolean).join(". ")));
  const inputs = (operation.parameters || []).map(parameter => {
    const input = element("input");
    input.value = parameter.example ?? parameter.schema?.default ?? "";
    return [parameter, field(section, parameter.name, input)];
  });
  let body = null;
  const content = operation.requestBody?.content["application/json"];
  if (content) {
    body = field(section, "body", element("textarea"));
    body.value = JSON.stringify(Object.values(content.examples || {})[0]?.value ?? {}, null, 2);
  }
  const button = element("button", "Send"), output = element("pre");
  button.onclick = () => {
    let target = path;
    const query = new URLSearchParams();
    for (const [parameter, input] of inputs) {
      const encoded = encodeURIComponent(input.value);
      if (parameter.in === "path") target = target.replace("{" + parameter.name + "}", () => encoded);
      else if (input.value !== "") query.set(parameter.name, input.value);
    }
    send(method.toUpperCase(), target + (query.size ? "?" + query : ""), body && body.value, output);
  };
  section.append(button, output);
  document.querySelector("main").append(section);
}

fetch("/schema/openapi.json").then(response => response.json()).then(schema => {
  document.querySelector("#about").textContent = schema.info.description;
  for (const [path, methods] of Object.entries(schema.paths))
    for (const [method, operation] of Object.entries(methods)) draw(method, path, operation);
});
</script>
</html>
"""


class SchemaPage(OpenAPIRenderPlugin):
    """Draws the document in the browser, from /schema/openapi.json."""

    def __init__(self) -> None:
        super().__init__(path="/", favicon="")

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:  # noqa: ARG002
        return PAGE.encode()

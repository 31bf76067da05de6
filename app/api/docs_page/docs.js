// Renders /openapi.json: each operation with its parameters, a curl line and a form that sends it. No dependencies.
"use strict";

const KEY = "toolcrib-key";

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

function setUpKey() {
  const input = document.getElementById("key");
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given) {
    // Out of the address bar and the history at once; the fragment was never sent to the server.
    sessionStorage.setItem(KEY, given);
    history.replaceState(null, "", location.pathname);
  }
  input.value = sessionStorage.getItem(KEY) || "";
  input.addEventListener("input", () => {
    sessionStorage.setItem(KEY, input.value);
    document.dispatchEvent(new Event("key"));
  });
  document.getElementById("key-form").addEventListener("submit", (event) => event.preventDefault());
  document.getElementById("show-key").addEventListener("change", (event) => {
    input.type = event.target.checked ? "text" : "password";
  });
}

function resolve(document_, schema) {
  let found = schema;
  while (found && found.$ref) found = found.$ref.split("/").slice(1).reduce((part, name) => part[name], document_);
  return found || {};
}

// A body to start from: what is required, and the defaults of the rest.
function example(document_, schema, depth = 0) {
  const found = resolve(document_, schema);
  if (found.const !== undefined) return found.const;
  if (found.default !== undefined) return found.default;
  if (found.enum) return found.enum[0];
  if (found.anyOf) return example(document_, found.anyOf[0], depth);
  if (found.type === "array") return found.minItems ? [example(document_, found.items, depth + 1)] : [];
  if (found.type === "object" && found.properties && depth < 4) {
    const required = new Set(found.required || []);
    return Object.fromEntries(Object.entries(found.properties)
      .filter(([name]) => required.has(name))
      .map(([name, inner]) => [name, example(document_, inner, depth + 1)]));
  }
  return { string: "", integer: 0, number: 0, boolean: false, object: {} }[found.type] ?? {};
}

const STARTS = {
  createBatch: { calls: [{ name: "bash", arguments: { command: "ls -l" } }] },
  createWorkspace: { name: "demo", files: { "task.txt": "status: draft\n" } },
  callTool: { command: "ls -l" },
};

function quote(text) {
  return "'" + text.replaceAll("'", "'\\''") + "'";
}

function operationView(document_, path, method, operation) {
  const parameters = operation.parameters || [];
  const inputs = new Map();
  const rows = parameters.map((parameter) => {
    const input = element("input", { placeholder: parameter.required ? "required" : "", ariaLabel: parameter.name });
    inputs.set(parameter, input);
    const schema = resolve(document_, parameter.schema);
    const kinds = schema.enum || (schema.anyOf || []).flatMap((one) => resolve(document_, one).enum || []);
    const text = [parameter.description || "", kinds.length ? kinds.join(", ") : ""].filter(Boolean).join(" ");
    return element("tr", {}, element("td", {}, element("code", {}, parameter.name), ` (${parameter.in})`),
      element("td", {}, input), element("td", {}, text));
  });
  const content = operation.requestBody && operation.requestBody.content["application/json"];
  const body = content && element("textarea", { spellcheck: false, ariaLabel: "Body" });
  if (body) body.value = JSON.stringify(STARTS[operation.operationId] || example(document_, content.schema), null, 2);

  const streams = Object.values(operation.responses).some((response) => response.content?.["text/event-stream"]);

  const request = () => {
    let url = path;
    const query = new URLSearchParams();
    const headers = {};
    const key = sessionStorage.getItem(KEY);
    if (operation.security && key) headers.Authorization = `Bearer ${key}`;
    for (const [parameter, input] of inputs) {
      if (parameter.in === "path") url = url.replace(`{${parameter.name}}`, encodeURIComponent(input.value) || `{${parameter.name}}`);
      else if (input.value && parameter.in === "query") query.set(parameter.name, input.value);
      else if (input.value) headers[parameter.name] = input.value;
    }
    const suffix = query.size ? `?${query}` : "";
    return { url: url + suffix, headers, body: body && body.value ? body.value : undefined };
  };
  const curl = element("pre");
  const renew = () => {
    const { url, headers, body: sent } = request();
    const flags = { GET: streams ? "-N " : "", HEAD: "-I " }[method] ?? `-X ${method} `;
    const lines = [`curl ${flags}${quote(location.origin + url)}`];
    // The line is made to be copied: the key stays out of it.
    for (const [name, value] of Object.entries(headers)) {
      lines.push(name === "Authorization" ? '-H "Authorization: Bearer $TOOLCRIB_API_KEY"' : `-H ${quote(`${name}: ${value}`)}`);
    }
    if (sent) lines.push(`-d ${quote(sent)}`);
    curl.textContent = lines.join(" \\\n  ");
  };
  const answer = element("pre", { hidden: true });
  const send = element("button", { type: "button" }, "Send");
  send.addEventListener("click", async () => {
    const { url, headers, body: sent } = request();
    answer.hidden = false;
    answer.textContent = "…";
    try {
      const response = await fetch(url, { method, headers, body: sent });
      answer.textContent = `${response.status} ${response.statusText}\n`;
      const reader = response.body && response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (let part; reader && !(part = await reader.read()).done; ) {
        text += part.value;
        if (!(response.headers.get("content-type") || "").includes("json")) answer.append(part.value);
      }
      if ((response.headers.get("content-type") || "").includes("json") && text) {
        answer.append(JSON.stringify(JSON.parse(text), null, 2));
      }
    } catch (error) {
      answer.append(String(error));
    }
  });
  const statuses = Object.entries(operation.responses).map(([status, response]) =>
    element("tr", {}, element("td", {}, element("code", {}, status)), element("td", {}, response.description)));
  const inner = element("div", {});
  if (operation.description) inner.append(element("p", {}, operation.description.replaceAll("`", "")));
  if (rows.length) inner.append(element("table", {}, ...rows));
  if (body) inner.append(element("p", {}, "Body"), body);
  inner.append(curl, send, answer, element("p", {}, "Answers"), element("table", {}, ...statuses));
  inner.addEventListener("input", renew);
  document.addEventListener("key", renew);
  renew();
  return element("details", { id: operation.operationId }, element("summary", {},
    element("span", { className: "method" }, method), element("code", {}, path), ` ${operation.summary || ""}`), inner);
}

async function main() {
  setUpKey();
  const notice = document.getElementById("notice");
  let description;
  try {
    description = await (await fetch("/openapi.json")).json();
  } catch (error) {
    notice.textContent = `openapi.json could not be loaded: ${error}`;
    return;
  }
  notice.remove();
  document.getElementById("version").textContent = description.info.version;
  const groups = new Map();
  for (const [path, methods] of Object.entries(description.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = (operation.tags || ["other"])[0];
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push([path, method.toUpperCase(), operation]);
    }
  }
  for (const [tag, operations] of groups) {
    const list = element("ul");
    document.getElementById("operations").append(element("h2", {}, tag));
    for (const [path, method, operation] of operations) {
      const view = operationView(description, path, method, operation);
      document.getElementById("operations").append(view);
      const link = element("a", { href: `#${operation.operationId}` }, operation.summary || operation.operationId);
      link.addEventListener("click", () => { view.open = true; });
      list.append(element("li", {}, link));
    }
    document.getElementById("index").append(element("strong", {}, tag), list);
  }
}

main();

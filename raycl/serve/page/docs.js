// The API as a page, made of openapi.json.

function make(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function table(caption, heads, rows) {
  const made = make("table");
  made.append(make("caption", "", caption));
  const head = make("tr");
  for (const each of heads) {
    const cell = make("th", "", each);
    cell.scope = "col";
    head.append(cell);
  }
  made.append(head);
  for (const row of rows) {
    const line = make("tr");
    line.append(...row.map((text) => make("td", "", text)));
    made.append(line);
  }
  return made;
}

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" or ");
  if (schema.enum) return schema.enum.join(" or ");
  if (schema.type === "array") return `list of ${typeOf(schema.items)}`;
  return schema.type ?? "any";
}

function exampleOf(path, verb, operation) {
  const base = new URL("./", location.href);
  const names = (operation.parameters ?? []).filter((each) => each.in === "query" && each.required).map((each) => `${each.name}=4711`);
  const url = new URL(path.slice(1).replace("{id}", "4711"), base) + (names.length ? `?${names.join("&")}` : "");
  const body = verb === "post" ? " -F image=@cat.jpg" : "";
  return `curl -H "Authorization: Bearer $TOKEN"${body} "${url}"`;
}

function describe(path, verb, operation, schemas) {
  const call = make("section", "card call");
  const title = make("h2");
  title.append(make("span", "verb", verb.toUpperCase()), " ", make("code", "", path));
  call.append(title, make("p", "", operation.description ?? operation.summary));
  const parameters = (operation.parameters ?? []).map((each) => [each.name, each.in, each.required ? "yes" : `no: ${each.schema.default}`, each.schema.description ?? each.description ?? ""]);
  if (parameters.length) call.append(table("Parameters", ["Name", "In", "Needed", "What"], parameters));
  for (const [kind, { schema }] of Object.entries(operation.requestBody?.content ?? {})) {
    call.append(table(`Body, ${kind}`, ["Field", "Type", "What"], fieldsOf(schema)));
  }
  const answer = typeOf(operation.responses["200"].content["application/json"].schema);
  call.append(table(`Answer: ${answer}`, ["Field", "Type", "What"], fieldsOf(schemas[answer])));
  const refusals = Object.keys(operation.responses).filter((status) => status !== "200");
  call.append(make("p", "quiet", `Refused with ${refusals.join(", ")} and {"detail": "one line"}.`));
  const example = make("pre", "", exampleOf(path, verb, operation));
  example.tabIndex = 0;
  call.append(example);
  return call;
}

const fieldsOf = (schema) => Object.entries(schema.properties).map(([name, each]) => [name, typeOf(each), each.description ?? ""]);

const api = await (await fetch("openapi.json")).json();
const { schemas } = api.components;
const calls = Object.entries(api.paths).flatMap(([path, verbs]) => Object.entries(verbs).map(([verb, operation]) => describe(path, verb, operation, schemas)));
const parts = make("section", "card call");
parts.append(make("h2", "", "Parts of answers"));
for (const name of ["Neighbor", "Curve", "Row", "Text", "Shard", "AgeBin"]) parts.append(table(name, ["Field", "Type", "What"], fieldsOf(schemas[name])));
document.getElementById("calls").append(...calls, parts);

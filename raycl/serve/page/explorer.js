// The page of the explorer. User input and data become text, never markup.

const POLL_MS = 2000;
const NUM_KEPT = 180; // points of a line: six minutes
const POLLS_PER_RUN = 5; // polls between two readings of the run's curves
const NUM_RANDOM = 12;
const KINDS = { queue: "Queue", memory_bank: "Memory bank", partition: "Partition functions", embeddings: "Embeddings" };
const ONLY_LIVE = ["Written per second", "Read per second", "Queries answered", "Shards"];
const ONLY_STEPS = ["Mean age", "Oldest age", "Mean norm", "Smallest norm", "Largest norm"];
const SCORES = { knn_top1: "kNN top-1 accuracy", recall_at_10: "Recall@10", recall_at_1: "Recall@1" };
const TOKEN = "raycl-token";
const MOST = 100;
const REPEATS = 8; // a queue may hold a sample several times; request more rows to fill the list

const find = (id) => document.getElementById(id);
const count = new Intl.NumberFormat("en-US");
const short = (value, digits = 1) => (value === null ? "none yet" : value.toLocaleString("en-US", { maximumFractionDigits: digits }));

// Remove the token from the address bar, the history and screenshots.
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token"); // the part after # is never sent
  if (given) {
    history.replaceState(null, "", location.pathname);
    sessionStorage.setItem(TOKEN, given);
  }
  return sessionStorage.getItem(TOKEN);
}

let token = takeToken();
let shown = { samples: false, queries: "", repeats: 1, live: true, steps: true };
let asked = 0; // drop answers to earlier queries
let polled = 0;
const history_ = [];
const samples = new Map();

class Refused extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

async function call(path, options = {}) {
  let answer;
  try {
    answer = await fetch(`api/${path}`, { ...options, headers: { ...options.headers, Authorization: `Bearer ${token}` } });
  } catch {
    throw new Refused(0, "The explorer does not answer; check that its command still runs.");
  }
  if (answer.ok) return answer.json();
  const body = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, typeof body.detail === "string" ? body.detail : `The explorer answered ${answer.status}.`);
}

function make(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

// ---- the state of the connection

function setState(state, text, notice = "") {
  if (find("state").dataset.state !== state || find("state-text").textContent !== text) {
    find("state").dataset.state = state;
    find("state-text").textContent = text;
  }
  if (find("notice").textContent !== notice) find("notice").textContent = notice;
  find("notice").hidden = !notice;
}

function askForToken(notice) {
  find("main").hidden = true;
  find("token-form").hidden = false;
  setState("away", "Token needed", notice);
  find("token").focus();
}

// ---- the live panel

function tellStats(stats) {
  document.title = `${stats.name} · raycl explorer`;
  find("bank-name").textContent = stats.name;
  shown.live = stats.shards.length > 0; // else it was saved
  shown.steps = stats.kind !== "embeddings"; // which are all of one step, and of unit length
  for (const part of document.querySelectorAll("[data-only]")) part.hidden = !shown[part.dataset.only];
  find("live-title").textContent = shown.live ? "Live" : "Saved";
  const kind = KINDS[stats.kind] ?? stats.kind;
  find("bank-facts").textContent = `${kind} of ${count.format(stats.rows)} rows of ${stats.dim}, ${stats.dtype} · ${stats.run.split("/").slice(-2).join("/")}`;
  find("bank-facts").title = stats.run;
  find("filled").max = stats.rows;
  find("filled").value = stats.filled;
  find("filled-text").textContent = `${count.format(stats.filled)} of ${count.format(stats.rows)}`;
  const norm = (value) => (value === null ? "none yet" : value.toFixed(3));
  const facts = [
    ["Newest step", short(stats.newest_step)],
    ["Mean age", short(stats.age_mean)],
    ["Oldest age", short(stats.age_max)],
    ["Written per second", short(stats.puts_per_second)],
    ["Read per second", short(stats.reads_per_second)],
    ["Queries answered", count.format(stats.questions)],
    ["Shards", count.format(stats.shards.length) + (stats.restarts ? `, ${stats.restarts} restarts` : "")],
    ["Mean norm", norm(stats.norm_mean)],
    ["Smallest norm", norm(stats.norm_min)],
    ["Largest norm", norm(stats.norm_max)],
  ];
  const left = [...(shown.live ? [] : ONLY_LIVE), ...(shown.steps ? [] : ONLY_STEPS)];
  tellFacts(facts.filter(([name]) => !left.includes(name)));
  history_.push({ filled: stats.filled, age: stats.age_mean ?? 0 });
  if (history_.length > NUM_KEPT) history_.shift();
  drawLine("filled-line", "filled-trend", "Rows filled", history_.map((point) => point.filled));
  drawLine("age-line", "age-trend", "Mean age in steps", history_.map((point) => point.age));
  tellAges(stats.age_histogram);
  shown.samples = stats.shows_samples;
  shown.repeats = stats.kind === "queue" ? REPEATS : 1;
  find("no-samples").hidden = stats.shows_samples;
  offerKinds(stats.queries);
}

function tellFacts(facts) {
  const list = find("facts");
  if (list.childElementCount !== facts.length) {
    list.replaceChildren(...facts.map(([name]) => {
      const pair = make("div");
      pair.append(make("dt", "", name), make("dd"));
      return pair;
    }));
  }
  facts.forEach(([, value], index) => { list.children[index].lastChild.textContent = value; });
}

// The curves of the run itself, if it has logged any.
async function tellRun() {
  const { curves } = await call("run").catch(() => ({ curves: [] }));
  const loss = curves.find((curve) => curve.name === "loss");
  const score = curves.find((curve) => curve.name in SCORES);
  find("loss").hidden = !loss;
  find("score").hidden = !score;
  if (loss) drawLine("loss-line", "loss-trend", "Loss", loss.values, (value) => short(value, 3));
  if (!score) return;
  find("score-name").textContent = SCORES[score.name];
  drawLine("score-line", "score-trend", SCORES[score.name], score.values, (value) => `${(100 * value).toFixed(1)}%`);
}

function drawLine(id, trend, name, values, form = short) {
  const low = Math.min(...values);
  const span = Math.max(...values) - low;
  const points = values.map((value, index) => {
    const x = values.length > 1 ? (240 * index) / (values.length - 1) : 0;
    return `${x.toFixed(1)},${(span ? 41 - (38 * (value - low)) / span : 22).toFixed(1)}`;
  });
  if (points.length === 1) points.push(`240,${points[0].split(",")[1]}`);
  const line = find(id).firstElementChild ?? find(id).appendChild(document.createElementNS("http://www.w3.org/2000/svg", "polyline"));
  line.setAttribute("points", points.join(" "));
  const [first, last] = [form(values[0]), form(values.at(-1))];
  find(trend).textContent = first === last ? last : `${first} to ${last}`;
  find(id).setAttribute("aria-label", `${name} over time: from ${first} to ${last}`);
}

function tellAges(bins) {
  const most = Math.max(...bins.map((bin) => bin.rows), 1);
  const rows = bins.map((bin, index) => {
    const from = index ? bins[index - 1].below : 0;
    const row = make("tr");
    const head = make("th", "", bin.below - from === 1 ? `${from}` : `${count.format(from)} to ${count.format(bin.below - 1)}`);
    head.scope = "row";
    const share = make("td");
    share.append(bar(bin.rows / most));
    row.append(head, share, make("td", "number", count.format(bin.rows)));
    return row;
  });
  find("ages").replaceChildren(...rows);
}

function bar(share) {
  const outer = make("div", "bar");
  const inner = make("div");
  inner.style.width = `${(100 * Math.max(0, Math.min(1, share))).toFixed(1)}%`;
  outer.setAttribute("aria-hidden", "true");
  outer.append(inner);
  return outer;
}

function offerKinds(kinds) {
  if (shown.queries === kinds.join()) return;
  shown.queries = kinds.join();
  const offered = [...document.querySelectorAll(".kinds label")].filter((label) => {
    label.hidden = !kinds.includes(label.firstElementChild.value);
    label.className = "";
    return !label.hidden;
  });
  offered.at(-1).className = offered.length === 1 ? "only" : "last";
}

async function poll() {
  if (!document.hidden && token) {
    try {
      const stats = await call("stats");
      find("token-form").hidden = true;
      find("main").hidden = false;
      tellStats(stats);
      setState("live", shown.live ? "Live" : "Saved");
      if (!shown.live || polled++ % POLLS_PER_RUN === 0) tellRun();
      if (!asked && stats.filled) showRandom();
    } catch (error) {
      if (error.status === 401) {
        token = null;
        sessionStorage.removeItem(TOKEN);
        askForToken(error.message);
      } else if (error.status === 503) {
        setState("away", "Bank away", `The bank is gone: ${error.message} The page resumes with the run.`);
      } else {
        setState("away", "No answer", error.message);
      }
    }
  }
  setTimeout(poll, shown.live ? POLL_MS : POLLS_PER_RUN * POLL_MS);
}

// ---- queries

const kindAsked = () => document.querySelector('input[name="kind"]:checked').value;

function showKind() {
  for (const field of document.querySelectorAll(".field[data-kind]")) field.hidden = field.dataset.kind !== kindAsked();
}

function question() {
  const wanted = Number(find("k").value);
  if (!Number.isInteger(wanted) || wanted < 1 || wanted > MOST) throw new Refused(422, `Neighbors are a number from 1 to ${MOST}.`);
  const k = Math.min(MOST, wanted * shown.repeats);
  if (kindAsked() === "id") {
    const id = find("id").value.trim() || find("id").placeholder; // the first of the random samples
    if (!/^-?\d+$/.test(id)) throw new Refused(422, "A sample id is a whole number; type one.");
    return { title: `sample ${id}`, id, wanted, send: () => call(`nearest?${new URLSearchParams({ id, k })}`) };
  }
  const path = `nearest?${new URLSearchParams({ k })}`;
  if (kindAsked() === "image") {
    const [file] = find("image").files;
    if (!file) throw new Refused(422, "Choose an image first.");
    if (file.size > 10e6) throw new Refused(413, "The image has more than 10 MB; choose a smaller one.");
    const body = new FormData();
    body.append("image", file);
    return { title: file.name, file, wanted, send: () => call(path, { method: "POST", body }) };
  }
  const text = find("text").value;
  if (!text.trim()) throw new Refused(422, "The text is empty; type one.");
  const body = JSON.stringify({ text });
  return { title: text, wanted, send: () => call(path, { method: "POST", body, headers: { "Content-Type": "application/json" } }) };
}

async function ask() {
  const mine = ++asked;
  find("find").disabled = true;
  find("results-state").textContent = "Looking …";
  let what;
  try {
    what = question();
    const answer = await what.send();
    if (mine !== asked) return;
    tellQuery(what, answer);
    const found = bySample(answer.neighbors).slice(0, what.wanted);
    const marks = tellNeighbors(found, what.id);
    const newest = answer.newest_step === null ? "" : `; newest step ${count.format(answer.newest_step)}`;
    const state = `${found.length} nearest to ${what.title.slice(0, 80)}${newest}`;
    find("results-state").textContent = state;
    const same = (await marks).filter((each) => each !== null);
    if (mine === asked && same.length) find("results-state").textContent = `${state}; ${same.filter(Boolean).length} of ${same.length} have its label (✓)`;
  } catch (error) {
    if (mine !== asked) return;
    if (what) find("neighbors").replaceChildren();
    if (what) find("query").hidden = true;
    find("results-state").textContent = error.message;
  } finally {
    if (mine === asked) find("find").disabled = false;
  }
}

function tellQuery(what, answer) {
  const box = find("query");
  box.replaceChildren(make("h2", "", "Query"));
  if (what.file) {
    const picture = make("img");
    picture.alt = `The image ${what.file.name}`;
    picture.src = URL.createObjectURL(what.file);
    picture.addEventListener("load", () => markSmall(picture));
    box.append(picture);
  } else if (what.id) {
    const place = make("div");
    box.append(make("p", "quiet", `Sample ${what.id}`), place);
    showSample(what.id, place, true);
    tellRows(what.id, box);
  } else {
    box.append(make("p", "", what.title));
  }
  if (answer.checkpoint) box.append(make("p", "quiet", `Encoded by ${answer.checkpoint}`));
  box.hidden = false;
}

async function tellRows(id, box) {
  const line = make("p", "quiet");
  box.append(line);
  try {
    const { rows } = await call(`rows/${id}`);
    const age = rows[0].age === null ? "never written" : `age ${steps(rows[0].age)}`;
    const norm = rows[0].norm === null ? "" : `, norm ${rows[0].norm.toFixed(3)}`;
    if (shown.steps) line.textContent = `${rows.length > 1 ? `${rows.length} rows, the newest: ` : ""}${age}${norm}`;
  } catch (error) {
    line.textContent = error.message;
  }
}

// Merge the rows of a sample into one neighbor: the nearest row and the number of rows.
function bySample(neighbors) {
  const found = new Map();
  for (const neighbor of neighbors) {
    const known = found.get(neighbor.sample_id);
    if (known) known.rows += 1;
    else found.set(neighbor.sample_id, { ...neighbor, rows: 1 });
  }
  return [...found.values()];
}

const steps = (age) => `${count.format(age)} ${age === 1 ? "step" : "steps"}`;

function fact(name, value) {
  const line = make("div", "fact");
  line.append(make("span", "quiet", name), " ", make("span", "", value));
  return line;
}

// Samples to begin with; a reader who knows no id chooses one of them.
async function showRandom() {
  const mine = ++asked;
  find("find").disabled = false; // the answer to a query under way will be dropped
  try {
    const { sample_ids: ids } = await call(`random?${new URLSearchParams({ k: NUM_RANDOM })}`);
    if (mine !== asked) return;
    find("query").hidden = true;
    find("id").placeholder = ids[0] ?? "";
    tellNeighbors(ids.map((id) => ({ sample_id: id })));
    find("results-title").textContent = "Random samples";
    find("results-state").textContent = ids.length ? "Choose one to see its neighbors." : "The bank has no rows yet.";
  } catch (error) {
    if (mine === asked) find("results-state").textContent = error.message;
  }
}

// Draw a card for each neighbor, or for each sample without a query. Return whether each has the query's label; null if unknown.
function tellNeighbors(neighbors, queryId) {
  const marks = [];
  find("results-title").textContent = "Neighbors";
  find("neighbors").classList.remove("wide");
  find("neighbors").replaceChildren(...neighbors.map((neighbor) => {
    const card = make("li", "neighbor");
    const place = make("div", "open");
    place.addEventListener("click", () => askFor(neighbor.sample_id)); // the button below is for the keyboard
    if (shown.samples) {
      card.append(place);
      marks.push(showSample(neighbor.sample_id, place, false).then(() => markLabel(card, neighbor.sample_id, queryId)));
    }
    const facts = make("div", "facts-of");
    const again = make("button", "again", `id ${neighbor.sample_id}`);
    again.type = "button";
    again.setAttribute("aria-label", `Find neighbors of sample ${neighbor.sample_id}`);
    again.addEventListener("click", () => askFor(neighbor.sample_id));
    if (neighbor.similarity !== undefined) facts.append(
      fact("cosine", neighbor.similarity.toFixed(4)),
      bar(neighbor.similarity),
    );
    if (neighbor.similarity !== undefined && shown.steps) facts.append(
      fact("step", count.format(neighbor.step)),
      fact("age", steps(neighbor.age)),
      fact("norm", neighbor.norm === null ? "replaced" : neighbor.norm.toFixed(3)),
    );
    if (neighbor.rows > 1) facts.append(fact("rows", count.format(neighbor.rows)));
    facts.append(again);
    card.append(facts);
    return card;
  }));
  return Promise.all(marks);
}

async function markLabel(card, id, queryId) {
  const [own, query] = await Promise.all([samples.get(id), samples.get(queryId)]).catch(() => []);
  if (!own || !query || own.label === null || query.label === null) return null; // a sample could not be read
  const same = own.label === query.label;
  card.classList.add(same ? "same" : "other");
  if (same) card.querySelector(".label").lastChild.append(" ✓");
  return same;
}

function askFor(id) {
  document.querySelector('input[name="kind"][value="id"]').checked = true;
  showKind();
  find("id").value = id;
  ask();
}

// ---- samples

async function showSample(id, place, isQuery) {
  if (!shown.samples) return;
  if (!samples.has(id)) samples.set(id, call(`samples/${id}`));
  try {
    drawSample(await samples.get(id), place, isQuery);
  } catch (error) {
    samples.delete(id);
    place.className = "words";
    place.replaceChildren(make("p", "quiet", error.message));
  }
}

function drawSample(sample, place, isQuery) {
  if (sample.image) {
    const frame = make("div", isQuery ? "" : "picture");
    const picture = make("img");
    picture.alt = `Sample ${sample.sample_id}${sample.label === null ? "" : `, label ${sample.label}`}`;
    picture.addEventListener("load", () => markSmall(picture));
    picture.src = sample.image;
    frame.append(picture);
    place.append(frame);
  } else if (!isQuery) {
    find("neighbors").classList.add("wide");
  }
  const words = make("div", "words");
  const hasRoles = sample.texts.length > 1 || sample.image;
  for (const { role, text } of sample.texts) {
    const line = make("div");
    if (hasRoles) line.append(make("span", "role", role));
    line.append(make("span", "", text));
    words.append(line);
  }
  if (sample.texts.length) place.append(words);
  if (sample.label !== null) {
    const line = fact("label", sample.label);
    line.classList.add("label");
    if (isQuery) place.append(line);
    else place.parentElement?.querySelector(".facts-of").prepend(line);
  }
}

function markSmall(picture) {
  // Magnify small images without smoothing.
  picture.classList.toggle("small", Math.max(picture.naturalWidth, picture.naturalHeight) <= 64);
}

// ---- events

find("ask-form").addEventListener("submit", (event) => {
  event.preventDefault();
  ask();
});
for (const choice of document.querySelectorAll('input[name="kind"]')) choice.addEventListener("change", showKind);
find("random").addEventListener("click", showRandom);
find("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  token = find("token").value.trim();
  sessionStorage.setItem(TOKEN, token);
  find("token").value = "";
  location.reload();
});
if (!token) askForToken("");
showKind();
poll();

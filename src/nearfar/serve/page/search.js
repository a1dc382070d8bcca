// Search by image or item, and the history of searches.

import * as api from "./api.js";
import { $, hideMessage, imageElement, make, navigateWithMessage, plural, selectedClass, showError } from "./dom.js";

const SHOWN_AT_START = 24;
const KEPT = 24; // entries of the history that are shown
const uploads = new Map(); // uploaded images of this session, by number
let facts, labels;
let step = { kind: "start", key: 0 };
let shown = step; // the step whose image is shown beside the results; differs from `step` while a request is running
let trail = []; // history, oldest first
let working = null;
let lastUpload = Date.now(); // only grows, also across reloads, so that no address refers to another image later
let changed = async () => {};
let shuffle = 1 + Math.floor(Math.random() * 1e6);
let byKeyboard = false;

/** The last search result, for the map. */
export const found = { query: null, hits: [] };

const same = (one, other) => one.kind === other.kind && one.key === other.key;
const addressOf = ({ kind, key }) => (kind === "start" ? "#search" : `#${kind}=${key}`);

/** Register a function to call after an item was added or removed. */
export function onChange(call) {
  changed = call;
}

export function update(info, known) {
  facts = info;
  labels = known.map(({ label }) => label);
  $("labels").replaceChildren(...known.map(({ label, count }) => make("option", { value: label, label: `${label} · ${count}` })));
  for (const field of [$("filter"), $("map-filter")]) {
    field.disabled = !known.length;
    field.placeholder = known.length ? "all classes" : "no classes";
  }
  $("drop").disabled = !facts.pictures;
  if (!facts.pictures) {
    $("drop").querySelector("span").replaceChildren(make("strong", { textContent: "This index takes no images" }), make("span", { textContent: "It was built from vectors: search with its items." }));
  }
}

/** The address of the current step. */
export const address = () => addressOf(step);

/** Show a step; `onward` is true for a new step, false for one shown again. */
export async function show(next, onward = false) {
  step = next;
  working?.abort();
  const { signal } = (working = new AbortController());
  const label = selectedClass($("filter"), labels);
  $("query").inert = !same(shown, step);
  $("hits").classList.add("waiting");
  $("view-search").classList.toggle("asked", step.kind !== "start");
  try {
    if (step.kind === "start") await showStart(label);
    else if (step.kind === "item") await showItem(label);
    else await showUpload(label);
    remember();
    if (onward) scrollToResults();
  } catch (error) {
    if (signal.aborted) return;
    const refused = step.kind === "upload" && ["bad_image", "too_large"].includes(error.code);
    if (refused) forget(step);
    $("query").hidden = refused || step.kind !== "upload";
    empty("Nothing to show", refused ? "Try another image." : "");
    showError(error, error.code === "offline" || error.code === "busy" ? () => show(step) : null);
  }
  drawTrail();
  $("hits").classList.remove("waiting");
}

// — kinds of steps —

async function showStart(label) {
  const { total, items } = await api.sample(SHOWN_AT_START, shuffle, label, working.signal);
  $("query").hidden = true;
  found.query = null;
  found.hits = [];
  if (!total) return empty("The index is empty", facts.read_only ? "" : "Drop an image to add it.");
  title("Browse the index", `A random sample of ${plural(total, "image")}${label ? ` of ${label}` : ""}. Click one to find its neighbors.`);
  cards(items);
  $("again").hidden = total <= SHOWN_AT_START;
}

async function showItem(label) {
  const answer = await api.searchItem(step.key, count(), label, working.signal);
  const { query } = answer;
  showQuery(api.thumbnail(query.id), query.label ?? `No. ${query.id}`, query.name, true);
  neighbors(answer, query.label, label);
  found.query = query.id;
}

async function showUpload(label) {
  const upload = uploads.get(step.key);
  if (!upload) {
    $("query").hidden = true;
    return empty("Image not available", "Uploads are not kept when the page is reloaded. Upload the image again.");
  }
  showQuery(upload.url, "Your image", upload.file.name || "pasted", false);
  title("Searching…", "");
  const answer = await api.searchPicture(upload.file, count(), label, working.signal);
  neighbors(answer, null, label);
  found.query = null;
}

/** Search with a file. */
export function upload(file) {
  if (!facts?.pictures) return showError(Object.assign(new Error("This index was built from vectors and takes no images."), { code: "no_model" }));
  if (file.size > facts.limits.bytes) {
    const size = (bytes) => `${(bytes / 2 ** 20).toFixed(1)} MiB`;
    return showError(Object.assign(new Error(`The file has ${size(file.size)}; the limit is ${size(facts.limits.bytes)}.`), { code: "too_large" }));
  }
  lastUpload += 1;
  uploads.set(lastUpload, { file, url: URL.createObjectURL(file) });
  location.hash = `#upload=${lastUpload}`;
}

// — showing —

function showQuery(source, heading, words, inIndex) {
  shown = step;
  $("query").hidden = $("query").inert = false;
  const image = imageElement(source, `Query: ${heading}`, "no preview");
  image.id = "query-image";
  image.loading = "eager";
  document.querySelector(".frame").replaceChildren(image);
  $("query-title").textContent = heading;
  $("query-words").textContent = words;
  $("to-map").hidden = !inIndex;
  $("remove").hidden = !inIndex || facts.read_only;
  $("query-actions").hidden = !inIndex;
  $("add").hidden = inIndex || facts.read_only;
}

function neighbors({ hits, unknown, milliseconds }, label, only) {
  $("again").hidden = true;
  found.hits = hits.map((hit) => hit.id);
  if (!hits.length) return empty("No neighbors", only ? `The index has no other items of ${only}.` : "The index has no other items.");
  const same = label ? hits.filter((hit) => hit.label === label).length : null;
  const words = same === null || only ? "" : `${same} of ${hits.length} in the same class · `;
  title("Nearest neighbors", `${words}${milliseconds < 10 ? milliseconds.toFixed(1) : Math.round(milliseconds)} ms${only ? ` · ${only} only` : ""}`);
  cards(hits, only ? null : label);
  if (unknown !== null) decide(hits, unknown);
}

/** Tell which results match, with the error rates of the threshold. */
function decide(hits, unknown) {
  const { similarity, false_accept, false_reject, unknown_accept, known_found, items, table, about } = facts.index.threshold;
  const matching = hits.filter((hit) => hit.match).length;
  const percent = (share) => `${(100 * share).toFixed(2)} %`;
  const most = table?.items.at(-1);
  const of100 = (share) => `${items > most ? "about " : ""}${Number((100 * share).toFixed(share < 0.02 ? 1 : 0))} of 100`;
  const rates = table
    ? `Among ${plural(items, "image")}, ${of100(unknown_accept)} strangers, whose class is not here, would match, and ${of100(known_found)} known images are found${items > most ? `, estimated from ${plural(most, "image")}` : ""}`
    : `In the calibration, ${percent(false_accept)} of the pairs of two classes match, and ${percent(false_reject)} of the pairs of one class do not`;
  $("decision").querySelector("strong").textContent = unknown ? "No match." : `${plural(matching, "image")} of ${hits.length} match${matching === 1 ? "es" : ""}.`;
  $("decision").querySelector("span").textContent = `A match has a similarity of ${similarity.toFixed(3)} or more. ${rates}${about?.note ? `; ${about.note}` : ""}.`;
  $("decision").hidden = false;
}

/** Scroll up to the beginning of the results if it is above the window. */
function scrollToResults() {
  const above = $("results-title").getBoundingClientRect().top - $("stuck").offsetHeight - 14;
  if (above < 0) window.scrollBy(0, above);
}

function title(heading, words) {
  $("decision").hidden = true;
  $("results-title").textContent = heading;
  $("results-words").textContent = words;
}

function empty(heading, words) {
  title(heading, words);
  $("hits").replaceChildren();
  $("again").hidden = true;
}

function cards(items, label = null) {
  const scores = items.map((item) => item.score).filter((score) => score !== undefined);
  const cosine = scores.every((score) => Math.abs(score) <= 1.001);
  const [low, high] = [Math.min(...scores), Math.max(...scores)];
  const length = (score) => (cosine ? Math.max(0, score) : (score - low) / (high - low || 1));
  $("hits").replaceChildren(...items.map((item, place) => card(item, place, label, length)));
  if (byKeyboard) $("hits").querySelector("button")?.focus();
  byKeyboard = false;
}

/** The name of an item without the folder that repeats its class. */
const inFolder = ({ name, label }) => (label !== null && name.startsWith(`${label}/`) ? name.slice(label.length + 1) : name);

function card(item, place, label, length) {
  const kind = label === null || item.score === undefined ? "" : item.label === label ? "same" : "other";
  const sign = { same: "✓", other: "✗" }[kind];
  const words = item.label ?? `No. ${item.id}`;
  const scored = item.score !== undefined;
  const decision = { true: "match", false: "no match" }[item.match];
  const spoken = scored ? `${place + 1}: ${words}, similarity ${item.score.toFixed(3)}${{ same: ", same class", other: ", another class" }[kind] ?? ""}${decision ? `, ${decision}` : ""}` : `${words}, ${item.name}`;
  const button = make(
    "button",
    { type: "button", attrs: { "aria-label": spoken, title: item.name } },
    make("span", { class: "picture" }, imageElement(api.thumbnail(item.id), "", item.name)),
    scored ? make("span", { class: "bar" }, bar(length(item.score))) : null,
    make(
      "span",
      { class: "words" },
      make("span", { class: "label" }, sign ? make("span", { class: "sign", textContent: sign }) : null, words),
      make("span", { class: "name", textContent: inFolder(item) }),
      scored ? make("span", { class: "score", textContent: item.score.toFixed(3) }) : null,
      decision ? make("span", { class: "match", textContent: decision }) : null,
    ),
  );
  button.addEventListener("click", (event) => {
    byKeyboard = event.detail === 0;
    location.hash = `#item=${item.id}`;
  });
  return make("li", { class: `hit ${kind} ${decision === "no match" ? "far" : ""}` }, button);
}

function bar(share) {
  const filled = make("i");
  filled.style.width = `${(100 * share).toFixed(1)}%`;
  return filled;
}

// — history —

function remember() {
  if (step.kind === "item" || uploads.has(step.key)) trail = [...trail.filter((each) => !same(each, step)), step].slice(-KEPT);
}

/** Remove a step from the history. */
function forget(gone) {
  trail = trail.filter((each) => !same(each, gone));
  if (gone.kind === "upload") {
    URL.revokeObjectURL(uploads.get(gone.key).url);
    uploads.delete(gone.key);
  }
  drawTrail();
}

function drawTrail() {
  $("trail").hidden = !trail.length;
  $("steps").replaceChildren(
    ...[...trail].reverse().map((each) => {
      const source = each.kind === "item" ? api.thumbnail(each.key) : uploads.get(each.key).url;
      const words = each.kind === "item" ? `Image no. ${each.key}` : "Your image";
      const button = make("button", { type: "button", title: words, attrs: { "aria-label": words } }, imageElement(source, "", "?"));
      if (same(each, step)) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => (location.hash = addressOf(each)));
      return make("li", {}, button);
    }),
  );
}

// — controls —

const count = () => Math.min(Number($("count").value), facts.limits.neighbors);

const refresh = () => {
  hideMessage();
  show(step);
};
$("filter").addEventListener("change", refresh);
$("filter").addEventListener("input", () => labels.includes($("filter").value.trim()) && refresh());
$("count").addEventListener("change", refresh);
$("again").addEventListener("click", () => {
  shuffle += 1;
  refresh();
});
$("to-map").addEventListener("click", () => (location.hash = "#map"));
$("drop").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", () => {
  const [file] = $("file").files;
  $("file").value = "";
  if (file) upload(file);
});
$("hits").addEventListener("keydown", (event) => {
  const buttons = [...$("hits").querySelectorAll("button")];
  const at = buttons.indexOf(document.activeElement);
  if (at < 0) return;
  const columns = buttons.filter((button) => button.offsetTop === buttons[0].offsetTop).length;
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + columns, ArrowUp: at - columns, Home: 0, End: buttons.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  buttons[Math.max(0, Math.min(buttons.length - 1, to))].focus();
});

$("remove").addEventListener("click", () => {
  const removed = shown;
  const from = location.hash;
  $("sure-words").textContent = `${$("query-words").textContent} will be removed from the index. The image file is not deleted.`;
  const dialog = $("sure-dialog");
  dialog.returnValue = "no";
  dialog.onclose = async () => {
    if (dialog.returnValue !== "yes") return;
    try {
      await api.remove(removed.key);
      forget(removed);
      await changed();
      navigateWithMessage(`No. ${removed.key} was removed.`, "#search", from);
    } catch (error) {
      showError(error);
    }
  };
  dialog.showModal();
});

$("add").addEventListener("submit", async (event) => {
  event.preventDefault();
  const { file } = uploads.get(shown.key);
  const from = location.hash;
  const button = $("add").querySelector("button");
  button.disabled = true;
  try {
    const { id } = await api.add(file, $("add-label").value.trim());
    await changed();
    navigateWithMessage(`Added as no. ${id}.`, `#item=${id}`, from);
  } catch (error) {
    showError(error);
  }
  button.disabled = false;
});

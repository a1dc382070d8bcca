// Comparison of training runs, and the leaderboard.

import * as api from "./api.js";
import { lineChart } from "./chart.js";
import { isDark, palette } from "./colors.js";
import { $, plural, make, showError } from "./dom.js";

const DRAWN = 8; // runs whose curves are drawn at first
const percent = (share) => (share === null || share === undefined ? "–" : (100 * share).toFixed(1));
const NAMES = { "recall@1": "R@1", "map@r": "MAP@R", "r-precision": "R-precision", r_precision: "R-precision", nmi: "NMI", ami: "AMI", f1: "F1" };
const named = (metric) => NAMES[metric] ?? metric.replace(/^recall@/, "R@");

let chosen = null; // names of runs with curves
let order = { key: null, down: true };
let metric = "recall@1";

export async function showRuns() {
  try {
    runsView(await api.runs());
  } catch (error) {
    showError(error, showRuns);
  }
}

function runsView({ runs, unfinished, damaged, metrics }) {
  const view = $("view-runs");
  if (!runs.length) {
    const words = unfinished.length ? `${plural(unfinished.length, "run is", "runs are")} in progress: ${unfinished.join(", ")}.` : "The folder has no runs yet.";
    return view.replaceChildren(make("div", { class: "block" }, make("h2", { textContent: "No finished runs" }), make("p", { class: "soft", textContent: words }), leftOut(damaged)));
  }
  const first = metrics.includes("recall@1") ? "recall@1" : metrics[0];
  order.key ??= `score ${first}`;
  chosen ??= new Set([...runs].sort((a, b) => (b.scores[first] ?? 0) - (a.scores[first] ?? 0)).slice(0, DRAWN).map((run) => run.name));
  const shownMetrics = metrics.filter((each) => ["recall@1", "map@r", "recall@2", "recall@4", "recall@8", "nmi"].includes(each));
  const columns = [
    { key: "name", title: "run", value: (run) => run.name, head: true },
    { key: "loss", title: "loss", value: (run) => run.loss },
    { key: "network", title: "network", value: (run) => run.network },
    { key: "dim", title: "dim", value: (run) => run.dim, number: true },
    { key: "data", title: "data", value: (run) => run.data },
    { key: "seed", title: "seed", value: (run) => run.seed, number: true },
    ...shownMetrics.map((each) => ({ key: `score ${each}`, title: `${named(each)} %`, value: (run) => run.scores[each] ?? null, shown: percent, number: true })),
    { key: "seconds", title: "time", value: (run) => run.seconds, shown: duration, number: true },
    { key: "memory", title: "MiB", value: (run) => run.memory, shown: (value) => (value === null ? "–" : Math.round(value).toLocaleString("en")), number: true },
  ];
  const colors = palette(runs.length, isDark());
  const colorOf = new Map(runs.map((run, place) => [run.name, colors[place]]));
  const charts = make("div", { class: "charts" });
  const draw = () => charts.replaceChildren(...curves(runs.filter((run) => chosen.has(run.name)), colorOf));
  const block = make("div", { class: "block" }, make("h2", { textContent: plural(runs.length, "run") }));
  const waiting = unfinished.length ? ` ${plural(unfinished.length, "run is", "runs are")} not finished.` : "";
  block.append(make("p", { class: "soft", textContent: `Measured on test classes, which are not used in training. Select runs to draw their curves.${waiting}` }), leftOut(damaged));
  const sortable = () => {
    const column = columns.find((each) => each.key === order.key) ?? columns[0];
    const sorted = [...runs].sort((a, b) => compare(column.value(a), column.value(b)) * (order.down ? -1 : 1));
    return table(columns, sorted, {
      sort: (key) => {
        order = { key, down: order.key === key ? !order.down : columns.find((each) => each.key === key).number === true };
        block.querySelector(".scroll").replaceWith(sortable());
        block.querySelector("[aria-sort] button").focus();
      },
      tick: (run, on) => {
        if (on) chosen.add(run.name);
        else chosen.delete(run.name);
        draw();
      },
      ticked: (run) => chosen.has(run.name),
    });
  };
  block.append(sortable());
  draw();
  view.replaceChildren(block, make("div", { class: "block" }, make("h2", { textContent: "Curves" }), charts));
}

function curves(runs, colorOf) {
  const parts = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))];
  if (!parts.length) return [make("p", { class: "soft", textContent: runs.length ? "These runs were not evaluated during training." : "Select a run to see its curve." })];
  return parts.map((part) => {
    const lines = runs.filter((run) => run.curves[part]?.length).map((run) => ({ name: run.name, color: colorOf.get(run.name), points: run.curves[part] }));
    const keys = lines.map(({ name, color }) => {
      const dash = make("i");
      dash.style.background = color;
      return make("li", {}, dash, name);
    });
    return make("figure", {}, make("figcaption", { class: "soft", textContent: `R@1 % on ${part === "train" ? "training classes" : `${part} classes`}, by epoch` }), lineChart(lines), make("ul", { class: "lines" }, ...keys));
  });
}

function table(columns, rows, { sort, tick, ticked }) {
  const head = columns.map(({ key, title, number }) => {
    const cell = make("th", { scope: "col", class: number ? "number" : "" }, make("button", { type: "button", textContent: title + (order.key === key ? (order.down ? " ↓" : " ↑") : ""), onclick: () => sort(key) }));
    if (order.key === key) cell.setAttribute("aria-sort", order.down ? "descending" : "ascending");
    return cell;
  });
  const body = rows.map((run) => {
    const box = make("input", { type: "checkbox", checked: ticked(run), attrs: { "aria-label": `Draw ${run.name}` } });
    box.addEventListener("change", () => tick(run, box.checked));
    const cells = columns.map(({ value, shown, number, head: first }) => make(first ? "th" : "td", { class: number ? "number" : "", textContent: shown ? shown(value(run)) : String(value(run) ?? "–") }));
    return make("tr", {}, make("td", {}, box), ...cells);
  });
  return make("div", { class: "scroll" }, make("table", {}, make("thead", {}, make("tr", {}, make("td"), ...head)), make("tbody", {}, ...body)));
}

export async function showLeaderboard() {
  try {
    leaderboardView(await api.leaderboard(metric));
  } catch (error) {
    showError(error, showLeaderboard);
  }
}

/** The runs that cannot be read, with the reason. */
function leftOut(damaged) {
  if (!damaged.length) return "";
  const lines = damaged.map(({ name, reason }) => make("li", { textContent: `${name}: ${reason}` }));
  return make("div", { class: "soft damaged" }, `${plural(damaged.length, "run")} cannot be read and ${damaged.length === 1 ? "is" : "are"} not shown:`, make("ul", { class: "reasons" }, ...lines));
}

function leaderboardView({ metrics, experiments, tournament, damaged }) {
  const view = $("view-leaderboard");
  if (!experiments.length) {
    return view.replaceChildren(make("div", { class: "block" }, make("h2", { textContent: "No finished runs" }), make("p", { class: "soft", textContent: "Losses are ranked here when runs are finished." }), leftOut(damaged)));
  }
  const select = make("select", { id: "metric" }, ...metrics.map((each) => make("option", { value: each, textContent: named(each), selected: each === metric })));
  select.addEventListener("change", () => {
    metric = select.value;
    showLeaderboard();
  });
  const chooser = make("div", { class: "row block" }, make("label", { htmlFor: "metric", class: "soft", textContent: "Ranked by" }), select, make("span", { class: "soft", textContent: "on test classes, which are not used in training" }));
  view.replaceChildren(chooser, ...(tournament.rows.length && tournament.experiments.length > 1 ? [standings(tournament)] : []), ...experiments.map(experiment), ...(damaged.length ? [make("div", { class: "block" }, leftOut(damaged))] : []));
}

function standings({ experiments, rows, note }) {
  const body = rows.map((row, place) => make("tr", { class: place === 0 ? "best" : "" }, make("th", { scope: "row", textContent: row.loss }), ...[row.average.toFixed(2), row.std === null ? "–" : row.std.toFixed(2)].map((value) => make("td", { class: "number", textContent: value }))));
  return make("div", { class: "block" }, make("h2", { textContent: "Tournament" }), make("p", { class: "soft", textContent: `Average rank over ${plural(experiments.length, "fair experiment")}; lower is better.${note ? ` ${note[0].toUpperCase()}${note.slice(1)}.` : ""}` }), plainTable(["loss", "average", "std"], body));
}

function experiment({ name, fair, reasons, notes, statistics, rows }) {
  const body = rows.map((row) =>
    make(
      "tr",
      { class: row.baseline ? "baseline" : row.rank === 1 ? "best" : "" },
      make("td", { class: "number", textContent: row.rank ?? "–" }),
      make("th", { scope: "row", textContent: row.loss }),
      ...[percent(row.mean), row.std === null ? "–" : `± ${percent(row.std)}`, row.low === null ? "–" : `${percent(row.low)}–${percent(row.high)}`, row.group || "–", row.runs, duration(row.seconds)].map((value) => make("td", { class: "number", textContent: value })),
    ),
  );
  const alone = fair && rows.length === 1;
  const verdict = alone ? "There is only one loss: nothing to compare it with." : fair ? "Fair comparison: these runs differ only in the loss and its settings." : "Not ranked: these runs differ in more than the loss.";
  const listed = (lines, heading = null) => (lines.length ? make("div", { class: "soft" }, heading, make("ul", { class: "reasons" }, ...lines.map((line) => make("li", { textContent: line })))) : null);
  return make("div", { class: "block" }, make("h2", { textContent: name }), make("p", { class: `verdict ${alone ? "soft" : fair ? "fair" : "unfair"}`, textContent: verdict }), listed(reasons), listed(notes, alone ? null : fair ? "Other differences, which do not affect fairness:" : "Other differences:"), plainTable(["rank", "loss", "mean %", "std", "95 %", "group", "runs", "time"], body, 1, "ranks"), listed(statistics));
}

function plainTable(titles, body, wordsAt = 0, kind = "") {
  const head = titles.map((title, place) => make("th", { scope: "col", class: place === wordsAt ? "" : "number", textContent: title }));
  return make("div", { class: "scroll" }, make("table", { class: kind }, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...body)));
}

function compare(a, b) {
  if (a === null || a === undefined) return -1;
  if (b === null || b === undefined) return 1;
  return typeof a === "number" ? a - b : String(a).localeCompare(String(b));
}

function duration(seconds) {
  if (seconds < 100) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  return seconds < 6000 ? `${(seconds / 60).toFixed(1)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

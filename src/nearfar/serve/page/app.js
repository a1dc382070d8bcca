// The page: tabs, theme, token, keyboard. What is shown is in the address, so back and forward work as everywhere.

import * as api from "./api.js";
import "./dropping.js";
import { $, arrive, counted, hush, tell } from "./dom.js";
import * as map from "./map.js";
import * as runs from "./runs.js";
import * as search from "./search.js";

const TABS = ["search", "map", "runs", "leaderboard"];
const views = { search, map, runs: { show: runs.showRuns }, leaderboard: { show: runs.showLeaderboard } };
let facts = null;
let asking = null;

// — token —

api.onTokenNeeded(() => {
  asking ??= new Promise((open) => {
    const dialog = $("token-dialog");
    $("token-form").onsubmit = async (event) => {
      event.preventDefault();
      try {
        if (await api.login($("token").value)) {
          dialog.close();
          asking = null;
          open();
          return;
        }
        $("token-wrong").textContent = "This is not the token.";
      } catch (error) {
        $("token-wrong").textContent = error.message;
      }
      $("token").select();
    };
    dialog.oncancel = (event) => event.preventDefault(); // there is nothing to see without it
    dialog.showModal();
  });
  return asking;
});

/** A token in the address is used once and wiped out of it. */
async function tokenFromAddress() {
  const found = /^#token=(.+)$/.exec(location.hash);
  if (!found) return;
  history.replaceState(null, "", location.pathname);
  await api.login(decodeURIComponent(found[1]));
}

// — where we are —

/** #item=12, #upload=3, #map, #runs, #leaderboard, or nothing: the start. */
function place() {
  const [word, value] = location.hash.slice(1).split("=");
  if (word === "item" || word === "upload") return { tab: "search", step: { kind: word, key: Number(value) } };
  return { tab: TABS.includes(word) ? word : "search", step: { kind: "start", key: 0 } };
}

function route() {
  if (!facts) return;
  const { tab, step } = place();
  for (const each of TABS) {
    const chosen = each === tab;
    $(`tab-${each}`).setAttribute("aria-selected", chosen);
    $(`tab-${each}`).tabIndex = chosen ? 0 : -1;
    $(`view-${each}`).hidden = !chosen;
  }
  arrive();
  const onward = remember();
  if (onward && tab !== "search") window.scrollTo(0, 0);
  views[tab].show(step, onward);
}

/** Number the entries of the browser's history, to know whether there is a way back or forward; true for a new one. */
let here = null;
let last = 0;
function remember() {
  const at = history.state?.at;
  here = at ?? (here === null ? 0 : here + 1);
  if (at === undefined) {
    last = here; // what lay ahead is gone
    history.replaceState({ at: here }, "");
  }
  last = Math.max(last, here);
  $("back").disabled = here === 0;
  $("forward").disabled = here === last;
  return at === undefined;
}

/** Go to a tab, at once. */
function go(tab) {
  if (place().tab === tab) return;
  history.pushState(null, "", tab === "search" ? search.address() : `#${tab}`);
  route();
}

// — theme —

const THEMES = ["auto", "light", "dark"];
const ICONS = {
  auto: "M12 3a9 9 0 1 0 0 18V3Z M12 3a9 9 0 0 1 0 18",
  light: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8Z M12 2v2 M12 20v2 M2 12h2 M20 12h2 M5 5l1.4 1.4 M17.6 17.6 19 19 M5 19l1.4-1.4 M17.6 6.4 19 5",
  dark: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5Z",
};

function setTheme(name) {
  const root = document.documentElement;
  if (name === "auto") delete root.dataset.theme;
  else root.dataset.theme = name;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  $("theme").replaceChildren(svg);
  $("theme").setAttribute("aria-label", `Colours: ${name === "auto" ? "as the system says" : name}`);
  $("theme").dataset.theme = name;
  try {
    localStorage.setItem("nearfar theme", name);
  } catch {} // private windows
  map.repaint();
}

function storedTheme() {
  try {
    const found = localStorage.getItem("nearfar theme");
    return THEMES.includes(found) ? found : "auto";
  } catch {
    return "auto";
  }
}

// — keyboard —

function typing(event) {
  return event.target.closest?.("input, select, textarea, dialog");
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || typing(event) || document.querySelector("dialog[open]")) return;
  const actions = {
    o: () => $("file").click(),
    "/": () => (place().tab === "map" ? $("map-filter") : (go("search"), $("filter"))).focus(),
    b: () => !$("back").disabled && history.back(),
    m: () => go("map"),
    s: () => go("search"),
    "?": () => $("help-dialog").showModal(),
  };
  const act = actions[event.key.toLowerCase()];
  if (act) {
    event.preventDefault();
    act();
  }
});

document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
  const shown = TABS.map((tab) => $(`tab-${tab}`)).filter((tab) => !tab.hidden);
  const at = shown.indexOf(document.activeElement);
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: shown.length - 1 }[event.key];
  if (next === undefined || at < 0) return;
  event.preventDefault();
  const chosen = shown[(next + shown.length) % shown.length];
  chosen.focus();
  chosen.click();
});

// — beginning —

/** What is served now, for the header and the views. */
async function learn() {
  const [info, { labels }] = await Promise.all([api.info(), api.labels()]);
  facts = info;
  const words = [facts.name, counted(facts.count, "picture"), labels.length ? counted(labels.length, "class", "classes") : "", facts.read_only ? "read-only" : ""];
  $("facts").textContent = words.filter(Boolean).join(" · ");
  search.learn(facts, labels);
  map.learn(facts, labels);
}

async function begin() {
  try {
    await learn();
    api.keepThumbnails(facts.version);
    document.title = `${facts.name} · nearfar`;
    $("tab-runs").hidden = $("tab-leaderboard").hidden = !facts.runs;
    route();
  } catch (error) {
    tell(error, begin);
  }
}

for (const tab of TABS) $(`tab-${tab}`).addEventListener("click", () => go(tab));
$("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf($("theme").dataset.theme) + 1) % 3]));
$("help").addEventListener("click", () => $("help-dialog").showModal());
$("dismiss").addEventListener("click", hush);
$("back").addEventListener("click", () => history.back());
$("forward").addEventListener("click", () => history.forward());
window.addEventListener("hashchange", route);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // its address would be that of the start
  $("content").focus();
});
search.onChange(() => learn().catch(tell));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => map.repaint());
setTheme(storedTheme());
try {
  await tokenFromAddress();
} catch (error) {
  tell(error);
}
begin();

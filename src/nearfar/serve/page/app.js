// The page: tabs, theme, token, keyboard. The URL fragment holds the current view, so that back and forward work.

import * as api from "./api.js";
import "./dropzone.js";
import { $, showPendingMessage, plural, hideMessage, showError } from "./dom.js";
import * as map from "./map.js";
import * as search from "./search.js";

const views = { search, map };
const TABS = Object.keys(views);
let facts = null;
let asking = null;

// — token —

api.onTokenRequired(() => {
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
        $("token-wrong").textContent = "The token is wrong.";
      } catch (error) {
        $("token-wrong").textContent = error.message;
      }
      $("token").select();
    };
    dialog.oncancel = (event) => event.preventDefault(); // nothing can be shown without it
    dialog.showModal();
  });
  return asking;
});

/** Use a token in the URL once and remove it from the URL. */
async function tokenFromAddress() {
  const found = /^#token=(.+)$/.exec(location.hash);
  if (!found) return;
  history.replaceState(null, "", location.pathname);
  await api.login(decodeURIComponent(found[1]));
}

// — routing —

/** #item=12, #upload=3, #map, or nothing: the start view. */
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
  showPendingMessage();
  const onward = remember();
  if (onward && tab !== "search") window.scrollTo(0, 0);
  views[tab].show(step, onward);
}

/** Number the entries of the browser history to enable the back and forward buttons; true for a new entry. */
let here = null;
let last = 0;
function remember() {
  const at = history.state?.at;
  here = at ?? (here === null ? 0 : here + 1);
  if (at === undefined) {
    last = here; // entries ahead are discarded by the browser
    history.replaceState({ at: here }, "");
  }
  last = Math.max(last, here);
  $("back").disabled = here === 0;
  $("forward").disabled = here === last;
  return at === undefined;
}

/** Switch to a tab. */
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
  $("theme").setAttribute("aria-label", `Theme: ${name === "auto" ? "system setting" : name}`);
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
  const shown = TABS.map((tab) => $(`tab-${tab}`));
  const at = shown.indexOf(document.activeElement);
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: shown.length - 1 }[event.key];
  if (next === undefined || at < 0) return;
  event.preventDefault();
  const chosen = shown[(next + shown.length) % shown.length];
  chosen.focus();
  chosen.click();
});

// — startup —

/** Load the properties of the index for the header and the views. */
async function update() {
  const [info, { labels }] = await Promise.all([api.info(), api.labels()]);
  facts = info;
  const words = [facts.name, plural(facts.count, "image"), labels.length ? plural(labels.length, "class", "classes") : "", facts.read_only ? "read-only" : ""];
  $("facts").textContent = words.filter(Boolean).join(" · ");
  search.update(facts, labels);
  map.update(facts, labels);
}

async function begin() {
  try {
    await update();
    api.setThumbnailVersion(facts.version);
    document.title = `${facts.name} · nearfar`;
    $("leaderboard").hidden = !facts.runs;
    route();
  } catch (error) {
    showError(error, begin);
  }
}

for (const tab of TABS) $(`tab-${tab}`).addEventListener("click", () => go(tab));
$("theme").addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf($("theme").dataset.theme) + 1) % 3]));
$("help").addEventListener("click", () => $("help-dialog").showModal());
$("dismiss").addEventListener("click", hideMessage);
$("back").addEventListener("click", () => history.back());
$("forward").addEventListener("click", () => history.forward());
window.addEventListener("hashchange", route);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // its fragment would be taken for the start view
  $("content").focus();
});
search.onChange(() => update().catch(showError));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => map.repaint());
setTheme(storedTheme());
try {
  await tokenFromAddress();
} catch (error) {
  showError(error);
}
begin();

// The map: pan, zoom, hover and click by mouse, touch or keyboard.

import * as api from "./api.js";
import { isDark, pixelOf, palette } from "./colors.js";
import { $, selectedClass, plural, make, showError } from "./dom.js";
import { Overlay } from "./overlay.js";
import { Plane, parse } from "./plane.js";
import { found } from "./search.js";
import * as tip from "./tooltip.js";

const LEGEND = 40; // classes that have a button
const IDLE_MS = 140; // after the last move, before antialiased points and thumbnails are drawn
let facts, counts, plane, overlay;
let loaded = null; // the version of the index whose points are loaded
let view = null;
let whole = 1; // the scale at which the whole map is visible
let colors = [];
let wanted = null; // the number of the selected class
let drawing = false;
let moved = 0;
let hovered = -1;
const held = new Map(); // pointers that are down
let dragged = 0;

const canvas = $("points");
const ratio = () => Math.min(2, window.devicePixelRatio || 1);
const shown = () => !$("view-map").hidden;

export function update(info, labels) {
  facts = info;
  counts = new Map(labels.map(({ label, count }) => [label, count]));
  if (loaded && shown()) show();
}

export async function show() {
  const words = `${plural(facts.count, "image")}; similar images are close to each other`;
  try {
    if (loaded !== facts.version) {
      $("map-words").textContent = "Computing the map…";
      plane = new Plane(parse(await api.map()));
      overlay = new Overlay($("above"), plane);
      loaded = facts.version;
      view = null;
      legend();
      choose(); // the numbers of the classes may have changed
    }
  } catch (error) {
    $("map-words").textContent = "";
    return showError(error, () => show());
  }
  $("map-words").textContent = plane.count ? words : "The index is empty.";
  hovered = -1;
  resize();
  if (!view) fit();
  if (found.query !== null && show.last !== found.query) center(found.query, found.hits);
  show.last = found.query;
  draw();
}

/** Draw again after the theme has changed. */
export function repaint() {
  if (!plane) return;
  legend();
  draw();
}

// — view —

function resize() {
  const box = $("map").getBoundingClientRect();
  for (const each of [canvas, $("above")]) {
    const [width, height] = [Math.round(box.width * ratio()), Math.round(box.height * ratio())];
    if (each.width !== width || each.height !== height) [each.width, each.height] = [width, height];
  }
}

function fit() {
  const { left, top, width, height } = plane.bounds;
  whole = 0.92 * Math.min(canvas.width / width, canvas.height / height);
  view = { x: left + width / 2, y: top + height / 2, scale: whole };
  draw();
}

/** Center the view on the query of the last search, with most of its results around it. */
function center(id, hits) {
  const place = plane.places.get(id);
  if (place === undefined) return;
  const [x, y] = [plane.xs[place], plane.ys[place]];
  const reach = (other) => Math.max((2 * Math.abs(plane.xs[other] - x)) / canvas.width, (2 * Math.abs(plane.ys[other] - y)) / canvas.height);
  const far = hits.map((hit) => plane.places.get(hit)).filter((other) => other !== undefined).map(reach).sort((a, b) => a - b);
  const wide = far[Math.floor(0.9 * (far.length - 1))] || 0;
  view = { x, y, scale: Math.max(1.5 * whole, Math.min(30 * whole, wide ? 0.7 / wide : 3 * whole)) };
}

/** Zoom around a point of the canvas, in its pixels. */
function zoom(factor, x = canvas.width / 2, y = canvas.height / 2) {
  const scale = Math.max(0.6 * whole, Math.min(5000 * whole, view.scale * factor));
  view.x += (x - canvas.width / 2) * (1 / view.scale - 1 / scale);
  view.y += (y - canvas.height / 2) * (1 / view.scale - 1 / scale);
  view.scale = scale;
  moving();
}

function pan(x, y) {
  const { left, top, width, height } = plane.bounds;
  view.x = Math.max(left, Math.min(left + width, view.x - x / view.scale));
  view.y = Math.max(top, Math.min(top + height, view.y - y / view.scale));
  moving();
}

function moving() {
  moved = performance.now();
  draw();
}

// — drawing —

function draw() {
  if (drawing || !plane) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    if (shown() && view) frame();
  });
}

let pixels = null;
function frame() {
  const began = performance.now();
  const quick = began - moved < IDLE_MS;
  const context = canvas.getContext("2d");
  if (pixels?.width !== canvas.width || pixels?.height !== canvas.height) pixels = context.createImageData(canvas.width, canvas.height);
  const style = getComputedStyle(document.documentElement);
  const painted = plane.paint(new Uint32Array(pixels.data.buffer), canvas.width, canvas.height, view, {
    colors: [...colors.map(pixelOf), pixelOf(style.getPropertyValue("--accent"))],
    background: pixelOf(style.getPropertyValue("--card")),
    faint: pixelOf(style.getPropertyValue("--edge")),
    wanted,
    radius: radius(),
    quick: quick && plane.count > 20_000,
  });
  context.putImageData(pixels, 0, 0);
  canvas.dataset.ms = (performance.now() - began).toFixed(1);
  canvas.dataset.painted = painted;
  canvas.dataset.zoom = (view.scale / whole).toFixed(2);
  overlay.draw(view, {
    ratio: ratio(),
    zoom: view.scale / whole,
    quick,
    wanted,
    colorOf: (number) => colors[number] ?? style.getPropertyValue("--accent"),
    ink: style.getPropertyValue("--ink"),
    card: style.getPropertyValue("--card"),
    query: found.query,
    hits: found.hits,
    hovered,
    cross: document.activeElement === canvas && canvas.matches(":focus-visible"),
    ready: draw,
  });
  if (quick) setTimeout(draw, IDLE_MS);
}

/** Points grow with the zoom and are smaller on maps with many points. */
function radius() {
  const many = Math.max(1.1, Math.min(3.6, 130 / Math.sqrt(plane.count)));
  return ratio() * Math.min(7, many * Math.min(3, (view.scale / whole) ** 0.3));
}

// — classes —

function legend() {
  colors = palette(plane.labels.length, isDark());
  const few = plane.labels.length <= LEGEND ? plane.labels : [];
  $("legend").replaceChildren(
    ...few.map((label, number) => {
      const dot = make("i");
      dot.style.background = colors[number];
      const facts = { type: "button", title: plural(counts.get(label) ?? 0, "image"), attrs: { "aria-pressed": wanted === number } };
      const button = make("button", facts, dot, label);
      button.addEventListener("click", () => {
        $("map-filter").value = wanted === number ? "" : label;
        choose();
      });
      return make("li", {}, button);
    }),
  );
}

/** Highlight the selected class, or show all. */
function choose() {
  const label = selectedClass($("map-filter"), plane.labels);
  wanted = label === null ? null : plane.labels.indexOf(label);
  for (const [place, button] of $("legend").querySelectorAll("button").entries()) button.setAttribute("aria-pressed", place === wanted);
  draw();
}

// — pointing —

const at = (event) => {
  const box = canvas.getBoundingClientRect();
  return { x: (event.clientX - box.left) * ratio(), y: (event.clientY - box.top) * ratio() };
};

function under({ x, y }) {
  const thumbnail = overlay.thumbnailAt(x, y);
  if (thumbnail >= 0) return thumbnail;
  const reach = (14 * ratio()) / view.scale;
  const place = { x: view.x + (x - canvas.width / 2) / view.scale, y: view.y + (y - canvas.height / 2) / view.scale };
  return plane.nearest(place.x, place.y, reach, wanted);
}

function hover(place, x, y) {
  canvas.classList.toggle("over", place >= 0);
  if (place !== hovered) {
    hovered = place;
    draw();
    if (place < 0) tip.hide();
    else tip.show(plane.ids[place], plane.labels[plane.classes[place]]);
  }
  if (place >= 0) tip.moveTo(x / ratio(), y / ratio());
}

const searchWith = (place) => (location.hash = `#item=${plane.ids[place]}`);

canvas.addEventListener("pointerdown", (event) => {
  if (!plane || event.button > 0) return;
  canvas.setPointerCapture(event.pointerId);
  held.set(event.pointerId, at(event));
  if (held.size === 1) dragged = 0;
});
canvas.addEventListener("pointermove", (event) => {
  if (!plane || !view) return;
  const now = at(event);
  const before = held.get(event.pointerId);
  if (!before) return hover(under(now), now.x, now.y);
  if (held.size === 2) {
    const [other] = [...held].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
    const spread = (place) => Math.hypot(place.x - other.x, place.y - other.y) || 1;
    zoom(spread(now) / spread(before), (now.x + other.x) / 2, (now.y + other.y) / 2);
    dragged += 10;
  } else {
    dragged += Math.hypot(now.x - before.x, now.y - before.y);
    if (dragged > 4 * ratio()) {
      canvas.classList.add("held");
      hover(-1);
      pan(now.x - before.x, now.y - before.y);
    }
  }
  held.set(event.pointerId, now);
});
const release = (event) => {
  const known = held.delete(event.pointerId);
  canvas.classList.remove("held");
  if (!known || event.type !== "pointerup" || held.size || dragged > 4 * ratio()) return;
  const place = under(at(event));
  if (place >= 0) searchWith(place);
};
canvas.addEventListener("pointerup", release);
canvas.addEventListener("pointercancel", release);
canvas.addEventListener("pointerleave", () => plane && hover(-1));
canvas.addEventListener(
  "wheel",
  (event) => {
    if (!plane) return;
    event.preventDefault();
    const pixelsMoved = event.deltaY * [1, 16, 200][event.deltaMode];
    const { x, y } = at(event);
    zoom(Math.exp(-Math.max(-400, Math.min(400, pixelsMoved)) * (event.ctrlKey ? 0.01 : 0.002)), x, y);
    hover(-1);
  },
  { passive: false },
);
canvas.addEventListener("keydown", (event) => {
  if (!plane || event.ctrlKey || event.metaKey || event.altKey) return;
  const far = (event.shiftKey ? 200 : 50) * ratio();
  const acts = {
    ArrowLeft: () => pan(far, 0),
    ArrowRight: () => pan(-far, 0),
    ArrowUp: () => pan(0, far),
    ArrowDown: () => pan(0, -far),
    "+": () => zoom(1.4),
    "=": () => zoom(1.4),
    "-": () => zoom(1 / 1.4),
    0: fit,
    Enter: () => hovered >= 0 && searchWith(hovered),
  };
  const act = acts[event.key];
  if (!act) return;
  event.preventDefault();
  act();
  if (event.key !== "Enter") hoverCenter();
});
canvas.addEventListener("focus", () => plane && view && canvas.matches(":focus-visible") && hoverCenter());
canvas.addEventListener("blur", () => plane && hover(-1));

/** For the keyboard: hover over the point nearest to the center. */
function hoverCenter() {
  const reach = Math.max(canvas.width, canvas.height) / 6 / view.scale;
  hover(plane.nearest(view.x, view.y, reach, wanted), canvas.width / 2, canvas.height / 2);
  draw();
}

$("zoom-in").addEventListener("click", () => plane && zoom(1.6));
$("zoom-out").addEventListener("click", () => plane && zoom(1 / 1.6));
$("zoom-all").addEventListener("click", () => plane && fit());
$("map-filter").addEventListener("change", () => plane && choose());
new ResizeObserver(() => {
  if (!plane || !shown()) return;
  resize();
  draw();
}).observe($("map"));

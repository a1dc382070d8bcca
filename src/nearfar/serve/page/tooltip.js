// The tooltip beside a point of the map.

import * as api from "./api.js";
import { $ } from "./dom.js";

const DELAY_MS = 60; // before the name is requested
const card = $("tip");
const image = card.querySelector("img");
let turn = 0;

image.addEventListener("error", () => (image.hidden = true));
image.addEventListener("load", () => image.classList.toggle("small", image.naturalWidth < 64 && image.naturalHeight < 64));

export function hide() {
  turn += 1;
  card.hidden = true;
}

export function show(id, label) {
  const mine = (turn += 1);
  card.hidden = image.hidden = false;
  image.src = api.thumbnail(id);
  card.querySelector("strong").textContent = label ?? `No. ${id}`;
  card.querySelector("span").textContent = " ";
  setTimeout(async () => {
    if (mine !== turn) return;
    try {
      const item = await api.item(id);
      if (mine === turn) card.querySelector("span").textContent = item.name;
    } catch {} // shown without a name
  }, DELAY_MS);
}

/** Move the tooltip beside a position of the map, where it fits. */
export function moveTo(x, y) {
  const [width, height] = [card.offsetWidth, card.offsetHeight];
  const box = $("map");
  const left = x + 18 + width > box.clientWidth ? x - 18 - width : x + 18;
  const top = Math.max(8, Math.min(box.clientHeight - height - 8, y - height / 2));
  card.style.transform = `translate(${Math.max(8, left)}px, ${top}px)`;
}

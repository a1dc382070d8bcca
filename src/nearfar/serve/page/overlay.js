// Drawn over the points of the map: thumbnails when zoomed in, the last search, the hovered point.

import { thumbnail } from "./api.js";

const NEAR = 2.5; // zoom from which thumbnails are shown
const SIDE = 46; // px of a thumbnail
const MOST = 90; // thumbnails at most
const KEPT = 500;

export class Overlay {
  constructor(canvas, plane) {
    this.canvas = canvas;
    this.plane = plane;
    this.images = new Map();
    this.placed = []; // thumbnails in view: {place, x, y, side} in pixels
  }

  draw(view, look) {
    const { canvas, plane } = this;
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, canvas.width, canvas.height);
    const spot = (place) => [(plane.xs[place] - view.x) * view.scale + canvas.width / 2, (plane.ys[place] - view.y) * view.scale + canvas.height / 2];
    this.thumbnails(context, view, look, spot);
    for (const id of look.hits) this.ring(context, plane.places.get(id), spot, 5.5, 1.5, look);
    this.ring(context, look.query === null ? undefined : plane.places.get(look.query), spot, 9, 3, look);
    if (look.hovered >= 0) this.ring(context, look.hovered, spot, 7, 2.4, look);
    if (look.cross) cross(context, canvas, look);
  }

  thumbnailAt(x, y) {
    const found = this.placed.findLast((each) => Math.abs(each.x - x) <= each.side / 2 && Math.abs(each.y - y) <= each.side / 2);
    return found ? found.place : -1;
  }

  /** Draw as many thumbnails as fit without overlap; while the map moves, only those already loaded. */
  thumbnails(context, view, look, spot) {
    this.placed = [];
    this.canvas.dataset.thumbnails = 0;
    if (look.zoom < NEAR) return;
    const { canvas, plane } = this;
    const side = SIDE * look.ratio;
    const taken = new Map(); // spots by cell of about the size of a thumbnail
    const half = { x: canvas.width / 2 / view.scale, y: canvas.height / 2 / view.scale };
    let looked = 0;
    const place = (place) => {
      if (look.wanted !== null && plane.classes[place] !== look.wanted) return;
      const [x, y] = spot(place);
      if (x < 0 || y < 0 || x > canvas.width || y > canvas.height) return;
      // Cells are fixed to the map, not to the window, so that panning does not change which thumbnails are shown.
      const step = 1.15 * side;
      const cell = [Math.floor((plane.xs[place] * view.scale) / step), Math.floor((plane.ys[place] * view.scale) / step)];
      if (neighborCells(cell).some((key) => overlaps(taken.get(key), x, y, side))) return;
      taken.set(`${cell}`, [x, y]);
      const image = this.image(plane.ids[place], look);
      if (image) this.placed.push({ place, x, y, side, image });
    };
    // The last search has priority.
    for (const id of look.query === null ? [] : [look.query, ...look.hits]) if (plane.places.has(id)) place(plane.places.get(id));
    plane.rows(view.x - half.x, view.y - half.y, view.x + half.x, view.y + half.y, (start, end) => {
      for (let each = start; each < end && this.placed.length < MOST && looked < 20_000; each += 1) {
        looked += 1;
        place(each);
      }
    });
    for (const { place, x, y, image } of this.placed) {
      context.fillStyle = look.colorOf(plane.classes[place]);
      rounded(context, x, y, side / 2 + 2 * look.ratio, 7 * look.ratio);
      context.fill();
      context.save();
      rounded(context, x, y, side / 2, 5 * look.ratio);
      context.clip();
      context.imageSmoothingEnabled = image.naturalWidth >= 64;
      const scale = side / Math.min(image.naturalWidth, image.naturalHeight);
      context.drawImage(image, x - (scale * image.naturalWidth) / 2, y - (scale * image.naturalHeight) / 2, scale * image.naturalWidth, scale * image.naturalHeight);
      context.restore();
    }
    this.canvas.dataset.thumbnails = this.placed.length;
  }

  image(id, { quick, ready }) {
    const known = this.images.get(id);
    if (known) return known.complete && known.naturalWidth ? known : null;
    if (quick) return null;
    if (this.images.size >= KEPT) this.images.delete(this.images.keys().next().value);
    const image = new Image();
    image.onload = ready;
    image.src = thumbnail(id);
    this.images.set(id, image);
    return null;
  }

  ring(context, place, spot, radius, width, look) {
    if (place === undefined || place < 0) return;
    const [x, y] = spot(place);
    const covered = this.placed.find((each) => each.place === place);
    for (const [color, extra] of [[look.card, 2], [look.ink, 0]]) {
      context.beginPath();
      context.strokeStyle = color;
      context.lineWidth = (width + extra) * look.ratio;
      if (covered) rounded(context, x, y, covered.side / 2 + 3 * look.ratio, 7 * look.ratio);
      else context.arc(x, y, radius * look.ratio, 0, 2 * Math.PI);
      context.stroke();
    }
  }
}

function neighborCells([column, row]) {
  return [-1, 0, 1].flatMap((across) => [-1, 0, 1].map((down) => `${[column + across, row + down]}`));
}

function overlaps(other, x, y, side) {
  return other !== undefined && Math.abs(other[0] - x) < 1.1 * side && Math.abs(other[1] - y) < 1.1 * side;
}

function rounded(context, x, y, half, corner) {
  context.beginPath();
  context.roundRect(x - half, y - half, 2 * half, 2 * half, corner);
}

function cross(context, canvas, { ratio, ink }) {
  const [x, y, arm] = [canvas.width / 2, canvas.height / 2, 12 * ratio];
  context.strokeStyle = ink;
  context.lineWidth = ratio;
  context.beginPath();
  context.moveTo(x - arm, y);
  context.lineTo(x + arm, y);
  context.moveTo(x, y - arm);
  context.lineTo(x, y + arm);
  context.stroke();
}

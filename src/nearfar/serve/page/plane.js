// All points of a map, sorted into grid cells so that drawing and hit testing visit only the points in view.
//
// Points are painted directly into pixels: a hundred thousand take a few milliseconds.

const MAGIC = "NFMAP1";
const PER_CELL = 6;

/** Parse the response of /api/v1/map; see docs/serve.md for the format. */
export function parse(buffer) {
  const start = new TextDecoder().decode(buffer.slice(0, 6));
  if (start !== MAGIC) throw new Error("not a map");
  const length = new DataView(buffer).getUint32(8, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 16, length)));
  const { count } = header;
  const at = 16 + length;
  return {
    labels: header.labels,
    ids: new Uint32Array(buffer, at, count),
    classes: new Int32Array(buffer, at + 4 * count, count),
    points: new Float32Array(buffer, at + 8 * count, 2 * count),
  };
}

export class Plane {
  constructor({ labels, ids, classes, points }) {
    this.labels = labels;
    this.count = ids.length;
    this.bounds = bounds(points);
    const { left, top, width, height } = this.bounds;
    const cells = Math.max(1, Math.min(512, Math.floor(Math.sqrt(this.count / PER_CELL))));
    this.cells = cells;
    const cellOf = (point) => {
      const column = Math.min(cells - 1, Math.floor(((points[2 * point] - left) / width) * cells));
      const row = Math.min(cells - 1, Math.floor(((points[2 * point + 1] - top) / height) * cells));
      return row * cells + column;
    };
    // Sorted by cell, in random order within a cell, so that no class is painted over all others.
    this.starts = new Uint32Array(cells * cells + 1);
    for (let point = 0; point < this.count; point += 1) this.starts[cellOf(point) + 1] += 1;
    for (let cell = 0; cell < cells * cells; cell += 1) this.starts[cell + 1] += this.starts[cell];
    const next = this.starts.slice(0, -1);
    this.xs = new Float32Array(this.count);
    this.ys = new Float32Array(this.count);
    this.ids = new Uint32Array(this.count);
    this.classes = new Int32Array(this.count);
    this.places = new Map();
    for (const point of shuffled(this.count)) {
      const place = next[cellOf(point)]++;
      this.xs[place] = points[2 * point];
      this.ys[place] = points[2 * point + 1];
      this.ids[place] = ids[point];
      this.classes[place] = classes[point];
      this.places.set(ids[point], place);
    }
  }

  /** Call `visit` with the first and last position of each row of cells that a rectangle touches. */
  rows(left, top, right, bottom, visit) {
    const { bounds: box, cells } = this;
    const column = (x) => Math.max(0, Math.min(cells - 1, Math.floor(((x - box.left) / box.width) * cells)));
    const row = (y) => Math.max(0, Math.min(cells - 1, Math.floor(((y - box.top) / box.height) * cells)));
    const [first, last] = [column(left), column(right)];
    for (let at = row(top), end = row(bottom); at <= end; at += 1) visit(this.starts[at * cells + first], this.starts[at * cells + last + 1]);
  }

  /** The position of the point nearest to (x, y) within a distance, or −1. `wanted` is a class, or null for all. */
  nearest(x, y, reach, wanted = null) {
    let best = -1;
    let least = reach * reach;
    this.rows(x - reach, y - reach, x + reach, y + reach, (start, end) => {
      for (let place = start; place < end; place += 1) {
        if (wanted !== null && this.classes[place] !== wanted) continue;
        const distance = (this.xs[place] - x) ** 2 + (this.ys[place] - y) ** 2;
        if (distance <= least) [best, least] = [place, distance];
      }
    });
    return best;
  }

  /**
   * Paint the visible points into pixels (Uint32, 0xAABBGGRR) and return their number.
   *
   * view: {x, y} of the center and `scale` in pixels per unit. colors: by class, the last one for no class. faint: the
   * color of classes other than `wanted`. quick: no antialiasing, while the map moves.
   */
  paint(pixels, width, height, view, { colors, background, faint, wanted = null, radius, quick = false }) {
    pixels.fill(background);
    const stamp = quick ? square(Math.max(1, Math.round(1.7 * radius))) : disc(radius);
    const reach = (stamp.size + 1) / view.scale;
    const half = { x: width / 2 / view.scale + reach, y: height / 2 / view.scale + reach };
    let painted = 0;
    const pass = (chosen, colorOf) =>
      this.rows(view.x - half.x, view.y - half.y, view.x + half.x, view.y + half.y, (start, end) => {
        for (let place = start; place < end; place += 1) {
          if (!chosen(this.classes[place])) continue;
          const x = Math.round((this.xs[place] - view.x) * view.scale + width / 2 - stamp.size / 2);
          const y = Math.round((this.ys[place] - view.y) * view.scale + height / 2 - stamp.size / 2);
          if (x < 0 || y < 0 || x + stamp.size > width || y + stamp.size > height) continue;
          painted += 1;
          (quick ? fill : blend)(pixels, width, x, y, stamp, colorOf(this.classes[place]));
        }
      });
    const color = (number) => colors[number < 0 ? colors.length - 1 : number];
    if (wanted === null) pass(() => true, color);
    else {
      pass((number) => number !== wanted, () => faint);
      pass((number) => number === wanted, color);
    }
    return painted;
  }
}

function fill(pixels, width, x, y, { size }, color) {
  for (let row = 0, at = y * width + x; row < size; row += 1, at += width) for (let column = 0; column < size; column += 1) pixels[at + column] = color;
}

function blend(pixels, width, x, y, { size, cover }, color) {
  const [red, green, blue] = [color & 255, (color >> 8) & 255, (color >> 16) & 255];
  let from = 0;
  for (let row = 0, at = y * width + x; row < size; row += 1, at += width) {
    for (let column = 0; column < size; column += 1) {
      const share = cover[from++];
      if (share === 0) continue;
      const under = pixels[at + column];
      const r = (under & 255) + (((red - (under & 255)) * share) >> 8);
      const g = ((under >> 8) & 255) + (((green - ((under >> 8) & 255)) * share) >> 8);
      const b = ((under >> 16) & 255) + (((blue - ((under >> 16) & 255)) * share) >> 8);
      pixels[at + column] = 0xff000000 | (b << 16) | (g << 8) | r;
    }
  }
}

const square = (size) => ({ size, cover: null });
const discs = new Map();

/** Coverage of each pixel by a disc, 0 to 256; slightly transparent, so that density is visible. */
function disc(radius) {
  const key = Math.round(4 * radius);
  if (!discs.has(key)) {
    const size = Math.ceil(2 * radius + 1);
    const cover = new Uint16Array(size * size);
    for (let row = 0; row < size; row += 1)
      for (let column = 0; column < size; column += 1) {
        const distance = Math.hypot(row + 0.5 - size / 2, column + 0.5 - size / 2);
        cover[row * size + column] = Math.round(216 * Math.max(0, Math.min(1, radius + 0.5 - distance)));
      }
    discs.set(key, { size, cover });
  }
  return discs.get(key);
}

function bounds(points) {
  let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
  for (let at = 0; at < points.length; at += 2) {
    left = Math.min(left, points[at]);
    right = Math.max(right, points[at]);
    top = Math.min(top, points[at + 1]);
    bottom = Math.max(bottom, points[at + 1]);
  }
  if (!points.length) [left, top, right, bottom] = [0, 0, 1, 1];
  return { left, top, width: right - left || 1e-6, height: bottom - top || 1e-6 };
}

/** 0 … count − 1, always in the same random order. */
function shuffled(count) {
  const order = Uint32Array.from({ length: count }, (_, at) => at);
  let state = 12345;
  for (let at = count - 1; at > 0; at -= 1) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    const other = Math.floor((state / 2 ** 32) * (at + 1));
    [order[at], order[other]] = [order[other], order[at]];
  }
  return order;
}

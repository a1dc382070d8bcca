// A line chart in SVG.

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT] = [520, 260, 38, 26, 10, 8];

function svg(tag, attributes = {}, text = null) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  return element;
}

/** Fractions by epoch: lines are {name, color, points: [[epoch, fraction], …]}. */
export function lineChart(lines) {
  const all = lines.flatMap(({ points }) => points);
  const [first, last] = [Math.min(...all.map(([x]) => x)), Math.max(...all.map(([x]) => x))];
  const [low, high] = [Math.min(...all.map(([, y]) => y)), Math.max(...all.map(([, y]) => y))];
  const step = tick(Math.max(high - low, 0.02));
  const ceiling = Math.min(1, Math.ceil(high / step - 1e-9) * step);
  const floor = Math.max(0, Math.min(Math.floor(low / step + 1e-9) * step, ceiling - 2 * step));
  const across = (x) => LEFT + ((x - first) / (last - first || 1)) * (WIDTH - LEFT - RIGHT);
  const up = (y) => HEIGHT - BOTTOM - ((y - floor) / (ceiling - floor)) * (HEIGHT - BOTTOM - TOP);
  const chart = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, class: "chart", role: "img", "aria-label": lines.map(({ name, points }) => `${name}: ${(100 * points.at(-1)[1]).toFixed(1)} %`).join(", ") });
  for (let y = floor; y <= ceiling + step / 2; y += step) {
    chart.append(svg("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: up(y), y2: up(y) }));
    chart.append(svg("text", { x: LEFT - 8, y: up(y) + 4, "text-anchor": "end" }, String(Number((100 * y).toFixed(2)))));
  }
  const every = Math.max(1, Math.ceil((last - first) / 8));
  for (let x = first; x <= last; x += every) chart.append(svg("text", { x: across(x), y: HEIGHT - 6, "text-anchor": "middle" }, String(x)));
  for (const { color, points } of lines) {
    const path = points.map(([x, y], at) => `${at ? "L" : "M"}${across(x).toFixed(1)} ${up(y).toFixed(1)}`).join("");
    chart.append(svg("path", { d: path, stroke: color }));
    for (const [x, y] of points.length <= 30 ? points : points.slice(-1)) chart.append(svg("circle", { cx: across(x), cy: up(y), r: 2.6, fill: color }));
  }
  return chart;
}

function tick(range) {
  const raw = range / 5;
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
}

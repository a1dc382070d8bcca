// Colours: of classes, of day and night, and as pixels.

const FEW = ["#2f6fbf", "#d9730d", "#1f9254", "#a34bb5", "#c93a3a", "#0f9aa8", "#b08a00", "#e0569b", "#7a5c3e", "#6b7785"];
const FEW_AT_NIGHT = ["#6ea8ea", "#f59a4c", "#4fc78c", "#cf8fe0", "#f27b73", "#45c6d3", "#dcb93b", "#f58abb", "#bd9a78", "#a3adb8"];

/** A colour for each class, as CSS: well apart where there are few, around the circle where there are many. */
export function palette(count, night) {
  const few = night ? FEW_AT_NIGHT : FEW;
  return Array.from({ length: count }, (_, at) =>
    count <= few.length ? few[at] : `hsl(${((at * 137.508) % 360).toFixed(1)} ${at % 2 ? 62 : 74}% ${(night ? 64 : 44) + (at % 3) * 5}%)`,
  );
}

/** Whether the page is dark. */
export function night() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

const seen = new Map();
/** A colour of CSS as a pixel. */
export function packed(colour) {
  if (!seen.has(colour)) {
    const probe = packed.probe ??= new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    probe.fillStyle = colour.trim();
    probe.fillRect(0, 0, 1, 1);
    const [red, green, blue] = probe.getImageData(0, 0, 1, 1).data;
    seen.set(colour, (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0);
  }
  return seen.get(colour);
}

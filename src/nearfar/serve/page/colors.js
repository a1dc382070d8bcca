// Colors of classes in light and dark mode, and their pixel values.

const FEW = ["#2f6fbf", "#d9730d", "#1f9254", "#a34bb5", "#c93a3a", "#0f9aa8", "#b08a00", "#e0569b", "#7a5c3e", "#6b7785"];
const FEW_DARK = ["#6ea8ea", "#f59a4c", "#4fc78c", "#cf8fe0", "#f27b73", "#45c6d3", "#dcb93b", "#f58abb", "#bd9a78", "#a3adb8"];

/** A CSS color for each class: a fixed palette for few classes, evenly spread hues for many. */
export function palette(count, dark) {
  const few = dark ? FEW_DARK : FEW;
  return Array.from({ length: count }, (_, at) =>
    count <= few.length ? few[at] : `hsl(${((at * 137.508) % 360).toFixed(1)} ${at % 2 ? 62 : 74}% ${(dark ? 64 : 44) + (at % 3) * 5}%)`,
  );
}

/** Whether the page is dark. */
export function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

const seen = new Map();
/** The pixel value (0xAABBGGRR) of a CSS color. */
export function pixelOf(color) {
  if (!seen.has(color)) {
    const probe = pixelOf.probe ??= new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    probe.fillStyle = color.trim();
    probe.fillRect(0, 0, 1, 1);
    const [red, green, blue] = probe.getImageData(0, 0, 1, 1).data;
    seen.set(color, (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0);
  }
  return seen.get(color);
}

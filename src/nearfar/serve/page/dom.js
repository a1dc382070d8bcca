// Small helpers for making elements. Text from the index is always text, never markup.

export const $ = (id) => document.getElementById(id);

/** An element with properties, a class under `class`, attributes under `attrs`, and children. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") element.className = value;
    else if (key === "attrs") for (const [name, word] of Object.entries(value)) element.setAttribute(name, word);
    else element[key] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** A picture that says so in words where there is none; tiny ones keep their pixels. */
export function picture(source, alt, words = "no picture") {
  const image = make("img", { alt, decoding: "async", loading: "lazy", draggable: false });
  image.addEventListener("load", () => image.classList.toggle("small", image.naturalWidth < 64 && image.naturalHeight < 64));
  image.addEventListener("error", () => image.replaceWith(make("span", { textContent: words })));
  image.src = source;
  return image;
}

export const counted = (number, one, many = one + "s") => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

const alarm = () => $("problem");

/** Tell what went wrong, in words, with a way to try again if there is one. */
export function tell(error, again = null) {
  if (error.name === "AbortError") return;
  console.warn(error);
  show(error.code ? error.message : "Something on this page failed; reload it to go on.", false, again);
}

let news = null;

/** Tell what went well, and where it shows: whoever is still where it was asked for is taken there. */
export function goWith(words, address, from) {
  if (location.hash !== from) return show(words, true, null);
  news = words;
  location.hash = address;
}

/** A new step is shown: old words go, those meant for it come. */
export function arrive() {
  hush();
  if (news !== null) show(news, true, null);
  news = null;
}

function show(words, good, again) {
  alarm().classList.toggle("good", good);
  alarm().querySelector("p").textContent = words;
  alarm().hidden = false;
  $("retry").hidden = !again;
  $("retry").onclick = () => {
    hush();
    again();
  };
}

export function hush() {
  alarm().hidden = true;
}

/** The class that a field names; null for all, also where there is no such class, which is said beside the field. */
export function chosenClass(field, known) {
  const word = field.value.trim();
  const wrong = word !== "" && !known.includes(word);
  field.setAttribute("aria-invalid", wrong);
  $(`${field.id}-wrong`).textContent = wrong ? `No class “${word}”: all are shown.` : "";
  return wrong ? null : word || null;
}

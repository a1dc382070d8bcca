// Helpers to create elements and show messages. Text from the index is inserted as text, never as markup.

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

/** An image, replaced by a text if it cannot be loaded; tiny ones are shown without smoothing. */
export function imageElement(source, alt, words = "no image") {
  const image = make("img", { alt, decoding: "async", loading: "lazy", draggable: false });
  image.addEventListener("load", () => image.classList.toggle("small", image.naturalWidth < 64 && image.naturalHeight < 64));
  image.addEventListener("error", () => image.replaceWith(make("span", { textContent: words })));
  image.src = source;
  return image;
}

export const plural = (number, one, many = one + "s") => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

const messageBox = () => $("problem");

/** Show an error message, with a button to try again if `again` is given. */
export function showError(error, again = null) {
  if (error.name === "AbortError") return;
  console.warn(error);
  show(error.code ? error.message : "An error occurred on this page. Reload it to continue.", false, again);
}

let pendingMessage = null;

/** Show a success message and navigate to an address, unless the user has left the view `from` meanwhile. */
export function navigateWithMessage(words, address, from) {
  if (location.hash !== from) return show(words, true, null);
  pendingMessage = words;
  location.hash = address;
}

/** Hide the old message when a new view is shown, and show the one meant for it. */
export function showPendingMessage() {
  hideMessage();
  if (pendingMessage !== null) show(pendingMessage, true, null);
  pendingMessage = null;
}

function show(words, good, again) {
  messageBox().classList.toggle("good", good);
  messageBox().querySelector("p").textContent = words;
  messageBox().hidden = false;
  $("retry").hidden = !again;
  $("retry").onclick = () => {
    hideMessage();
    again();
  };
}

export function hideMessage() {
  messageBox().hidden = true;
}

/** The class entered in a field; null for all classes, and for an unknown class, which is reported beside the field. */
export function selectedClass(field, known) {
  const word = field.value.trim();
  const wrong = word !== "" && !known.includes(word);
  field.setAttribute("aria-invalid", wrong);
  $(`${field.id}-wrong`).textContent = wrong ? `Unknown class “${word}”: showing all classes.` : "";
  return wrong ? null : word || null;
}

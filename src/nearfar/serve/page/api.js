// Client of the HTTP API. Every failure is thrown as an ApiError with a message for the user.

export class ApiError extends Error {
  constructor(message, code = "failed") {
    super(message);
    this.code = code;
  }
}

const API = "/api/v1";
let requestToken = async () => {
  throw new ApiError("This server requires a token.", "no_token");
};

export function onTokenRequired(ask) {
  requestToken = ask;
}

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(API + path, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not respond. Is it still running?", "offline");
  }
  if (answer.status === 401) {
    await requestToken();
    return ask(path, options);
  }
  if (!answer.ok) throw await readError(answer);
  return answer;
}

async function readError(answer) {
  try {
    const { error } = await answer.json();
    return new ApiError(sentence(error.message), error.code);
  } catch {
    return new ApiError(`The server responded with status ${answer.status}.`);
  }
}

function sentence(words) {
  const whole = words.charAt(0).toUpperCase() + words.slice(1);
  return /[.!?]$/.test(whole) ? whole : whole + ".";
}

const json = async (path, options) => (await ask(path, options)).json();
const query = (values) => {
  const found = new URLSearchParams();
  for (const [key, value] of Object.entries(values)) if (value !== null && value !== undefined && value !== "") found.set(key, value);
  return found.size ? `?${found}` : "";
};

export const info = () => json("/info");
export const labels = () => json("/labels");
export const item = (id) => json(`/items/${id}`);
export const sample = (limit, shuffle, label, signal) => json(`/items${query({ limit, shuffle, label })}`, { signal });
export const map = async () => (await ask("/map")).arrayBuffer();
export const searchItem = (id, k, label, signal) => json(`/search/id/${id}${query({ k, label })}`, { method: "POST", signal });
export const remove = (id) => json(`/items/${id}`, { method: "DELETE" });

export function searchPicture(file, k, label, signal) {
  const body = new FormData();
  body.set("image", file, file.name || "picture");
  return json(`/search${query({ k, label })}`, { method: "POST", body, signal });
}

export function add(file, label) {
  const body = new FormData();
  body.set("image", file, file.name || "picture");
  if (label) body.set("label", label);
  return json("/items", { method: "POST", body });
}

/** Exchange the token for a session; false if the token is wrong. */
export async function login(token) {
  let answer;
  try {
    answer = await fetch(`${API}/session`, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ token }),
    });
  } catch {
    throw new ApiError("The server does not respond. Is it still running?", "offline");
  }
  if (answer.status === 401 || answer.status === 422) return false;
  if (!answer.ok) throw await readError(answer);
  return true;
}

let version = "";
export const setThumbnailVersion = (word) => {
  version = word;
};
export const thumbnail = (id) => `${API}/items/${id}/thumbnail?v=${version}`;

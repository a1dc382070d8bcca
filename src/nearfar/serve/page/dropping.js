// Dropping and pasting pictures, anywhere on the page.

import { $, tell } from "./dom.js";
import { upload } from "./search.js";

let inside = 0;
const holdsFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
document.addEventListener("dragenter", (event) => {
  if (!holdsFiles(event)) return;
  inside += 1;
  $("dropping").hidden = false;
});
document.addEventListener("dragleave", (event) => {
  if (holdsFiles(event) && --inside <= 0) $("dropping").hidden = true;
});
document.addEventListener("dragover", (event) => holdsFiles(event) && event.preventDefault());
document.addEventListener("drop", (event) => {
  inside = 0;
  $("dropping").hidden = true;
  if (!holdsFiles(event)) return;
  event.preventDefault();
  const [file] = event.dataTransfer.files;
  if (file) upload(file);
});
document.addEventListener("paste", (event) => {
  const [file] = event.clipboardData?.files ?? [];
  if (file) {
    event.preventDefault();
    upload(file);
  } else if (!event.target.closest?.("input")) {
    tell(Object.assign(new Error("There is no picture in the clipboard."), { code: "no_picture" }));
  }
});

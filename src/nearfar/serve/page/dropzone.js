// Dropping and pasting images anywhere on the page.

import { $, showError } from "./dom.js";
import { upload } from "./search.js";

let inside = 0;
const holdsFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
document.addEventListener("dragenter", (event) => {
  if (!holdsFiles(event)) return;
  inside += 1;
  $("dropzone").hidden = false;
});
document.addEventListener("dragleave", (event) => {
  if (holdsFiles(event) && --inside <= 0) $("dropzone").hidden = true;
});
document.addEventListener("dragover", (event) => holdsFiles(event) && event.preventDefault());
document.addEventListener("drop", (event) => {
  inside = 0;
  $("dropzone").hidden = true;
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
    showError(Object.assign(new Error("There is no image in the clipboard."), { code: "no_picture" }));
  }
});

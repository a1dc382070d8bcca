// What the theme leaves to be done for keyboards and screen readers, once it has set up the page.
window.addEventListener("load", () => {
  document.querySelector(".md-search[role=dialog]")?.setAttribute("aria-label", "Search");
  for (const wide of document.querySelectorAll(".md-typeset__scrollwrap")) wide.tabIndex = 0;
});

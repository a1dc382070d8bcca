document.querySelectorAll("table.sorts").forEach(function (table) {
  var heads = Array.from(table.tHead.rows[0].cells);
  heads.forEach(function (head, column) {
    var button = head.querySelector("button");
    if (!button) return;
    button.addEventListener("click", function () {
      var number = head.classList.contains("number");
      var before = head.getAttribute("aria-sort");
      var down = before ? before === "ascending" : number;
      heads.forEach(function (other) { other.removeAttribute("aria-sort"); });
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      var body = table.tBodies[0];
      var key = function (row) {
        var cell = row.cells[column];
        return cell.dataset.key === undefined ? cell.textContent.trim() : cell.dataset.key;
      };
      Array.from(body.rows).map(function (row, place) { return [key(row), place, row]; }).sort(function (a, b) {
        if (a[0] === "" || b[0] === "") return (a[0] === "") - (b[0] === "") || a[1] - b[1];
        var order = number ? a[0] - b[0] : a[0].localeCompare(b[0], "en", { numeric: true });
        return (down ? -order : order) || a[1] - b[1];
      }).forEach(function (entry) { body.appendChild(entry[2]); });
    });
  });
});

"use strict";
// The headers of every table.sortable become buttons that sort its rows: numbers (data-value) as numbers, before
// texts; missing values (class "missing") stay last. Without this script the tables are as they were written.
for (const table of document.querySelectorAll("table.sortable")) {
  const headers = Array.from(table.tHead.rows[0].cells);
  const rows = table.tBodies[0];
  const collator = new Intl.Collator("en", { numeric: true });

  const compare = (a, b) => {
    const [x, y] = [a.dataset.value, b.dataset.value];
    if (x !== undefined && y !== undefined) return Number(x) - Number(y);
    if (x !== undefined || y !== undefined) return x !== undefined ? -1 : 1;
    return collator.compare(a.textContent, b.textContent);
  };

  headers.forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    header.append(button);
    button.addEventListener("click", () => {
      const ascending = header.getAttribute("aria-sort") !== "ascending";
      for (const other of headers) other.removeAttribute("aria-sort");
      header.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const cells = Array.from(rows.rows, (row) => row.cells[column]);
      cells.sort((a, b) => {
        const missing = a.classList.contains("missing") - b.classList.contains("missing");
        return missing || (ascending ? compare(a, b) : compare(b, a));
      });
      rows.append(...cells.map((cell) => cell.parentNode));
    });
  });
}
// On paper nothing is folded.
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => (part.open = true)));

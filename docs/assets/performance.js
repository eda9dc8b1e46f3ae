// Selects above the tables of measurements. Without JavaScript all rows are shown.
(function () {
  "use strict";
  const NAMES = {
    gpu: "GPU", jax: "jax", headDim: "head dim", length: "length", mask: "mask",
  };
  const tables = Array.from(document.querySelectorAll("table.fp-results"));
  const place = document.getElementById("fp-filters");
  if (!place || !tables.length) return;
  const rows = tables.flatMap((table) => Array.from(table.tBodies[0].rows));
  const order = (a, b) => a.localeCompare(b, "en", { numeric: true });
  const count = document.createElement("span");
  const selects = {};

  function show() {
    let shown = 0;
    for (const row of rows) {
      row.hidden = Object.entries(selects).some(
        ([key, select]) => select.value !== "" && row.dataset[key] !== select.value
      );
      shown += row.hidden ? 0 : 1;
    }
    for (const table of tables) {
      const visible = Array.from(table.tBodies[0].rows).some((row) => !row.hidden);
      table.tHead.hidden = !visible;
      table.parentElement.classList.toggle("fp-empty", !visible);
      // Left out: a column in which no visible row has a number, and one whose value is chosen above.
      Array.from(table.tHead.rows[0].cells).forEach((head, i) => {
        const used = Array.from(table.tBodies[0].rows).some(
          (row) => !row.hidden && row.cells[i].textContent !== "–"
        );
        const chosen = Object.entries(NAMES).some(
          ([key, name]) => name === head.textContent && selects[key].value !== ""
        );
        head.hidden = !used || chosen;
        for (const row of table.tBodies[0].rows) row.cells[i].hidden = head.hidden;
      });
    }
    count.textContent = shown + " of " + rows.length + " rows";
  }

  for (const [key, name] of Object.entries(NAMES)) {
    const values = Array.from(new Set(rows.map((row) => row.dataset[key]))).sort(order);
    const label = document.createElement("label");
    const select = document.createElement("select");
    label.append(name, select);
    select.append(new Option("all", ""));
    for (const value of values) select.append(new Option(value, value));
    if (values.length === 1) select.value = values[0];
    select.addEventListener("change", show);
    selects[key] = select;
    place.append(label);
  }
  count.className = "fp-count";
  count.setAttribute("aria-live", "polite");
  place.append(count);
  show();
})();

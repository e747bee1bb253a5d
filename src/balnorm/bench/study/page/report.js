"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const hidden = new Set();
  const dashes = { solid: "", dashed: "7 4", dotted: "2 3" };

  // ---- Charts ------------------------------------------------------------------------------------------------------

  const svg = (name, attributes, parent, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    if (parent) parent.append(element);
    return element;
  };

  const look = (norm) => data.styles.find((style) => style.norm === norm);

  // Round numbers that divide a range into about as many parts as asked for.
  const ticks = (low, high, count) => {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(k * step);
    return { found, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
  };

  const shown = (value, percent, digits) =>
    value === null ? "diverged" : percent ? `${(100 * value).toFixed(digits)}%` : value.toFixed(digits);

  const draw = (box, figure, panel) => {
    box.replaceChildren();
    const width = Math.max(240, box.clientWidth), height = Math.min(320, Math.max(220, 0.62 * width));
    const left = 52, right = 10, top = 24, bottom = 38;
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": `${figure.title}, ${panel.title}` }, box);
    const curves = panel.curves.filter((curve) => !hidden.has(curve.norm));
    const all = panel.curves.flatMap((curve) => curve.x);
    let [x0, x1] = panel.x_range || [Math.min(...all), Math.max(...all)];
    if (x0 === x1) [x0, x1] = panel.x_log ? [x0 / 2, x1 * 2] : [x0 - 1, x1 + 1];
    const [y0, y1] = panel.y_range || [0, 1];
    const scale = panel.x_log ? Math.log : (value) => value;
    const sweep = figure.key.startsWith("by-"), inset = sweep ? 14 : 0;
    const X = (value) => left + inset + ((scale(value) - scale(x0)) / (scale(x1) - scale(x0))) * (width - left - right - 2 * inset);
    const Y = (value) => top + ((y1 - value) / (y1 - y0)) * (height - top - bottom);

    svg("text", { x: left, y: 14, class: "title" }, root, panel.title);
    const vertical = ticks(figure.percent ? 100 * y0 : y0, figure.percent ? 100 * y1 : y1, 5);
    for (const value of vertical.found) {
      const y = Y(figure.percent ? value / 100 : value);
      svg("line", { x1: left, x2: width - right, y1: y, y2: y, class: "grid" }, root);
      svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, root, value.toFixed(vertical.digits) + (figure.percent ? "%" : ""));
    }
    let marks = panel.x_log ? [...new Set(all)] : ticks(x0, x1, Math.min(8, width / 60, sweep ? 8 : x1 - x0)).found;
    if (!panel.x_log && !sweep) marks = marks.filter(Number.isInteger);
    for (const value of marks) {
      svg("text", { x: X(value), y: height - bottom + 16, "text-anchor": "middle" }, root, String(Number(value.toPrecision(6))));
    }
    svg("line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, class: "axis" }, root);
    svg("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, root, panel.x_label);
    if (panel.curves.length && panel.curves.every((curve) => curve.median.every((value) => value === null))) {
      svg("text", { x: (left + width - right) / 2, y: (top + height - bottom) / 2, "text-anchor": "middle" }, root, "diverged");
    }

    const clip = `clip-${figure.key}-${[...box.parentNode.children].indexOf(box)}`;
    svg("rect", { x: left, y: top - 1, width: width - left - right, height: height - top - bottom + 2 }, svg("clipPath", { id: clip }, root));
    const plot = svg("g", { "clip-path": `url(#${clip})` }, root);
    for (const curve of curves) {
      const band = curve.x.map((x, i) => [X(x), curve.low[i], curve.high[i]]).filter(([, low, high]) => low !== null && high !== null);
      if (band.length) {
        const outline = [...band.map(([x, , high]) => [x, Y(high)]), ...band.reverse().map(([x, low]) => [x, Y(low)])];
        svg("polygon", { points: outline.map((point) => point.join()).join(" "), fill: look(curve.norm).colour, class: "band" }, plot);
      }
    }
    for (const curve of curves) {
      const points = curve.x.map((x, i) => [x, curve.median[i]]).filter(([, y]) => y !== null);
      svg("polyline", {
        points: points.map(([x, y]) => `${X(x)},${Y(y)}`).join(" "),
        class: "line", stroke: look(curve.norm).colour, "stroke-dasharray": dashes[look(curve.norm).dash], "data-norm": curve.norm,
      }, plot);
      if (sweep || points.length === 1) {
        for (const [x, y] of points) svg("circle", { cx: X(x), cy: Y(y), r: 3.5, fill: look(curve.norm).colour }, plot);
      }
    }
    const cursor = svg("line", { y1: top, y2: height - bottom, class: "cursor", visibility: "hidden" }, root);

    const leave = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
    root.addEventListener("pointerleave", leave);
    root.addEventListener("pointermove", (event) => {
      const place = root.getBoundingClientRect();
      const at = ((event.clientX - place.left) / place.width) * width;
      const inside = [...new Set(curves.flatMap((curve) => curve.x))].filter((x) => x >= x0 && x <= x1);
      if (!inside.length) return leave();
      const x = inside.reduce((a, b) => (Math.abs(X(a) - at) <= Math.abs(X(b) - at) ? a : b));
      cursor.setAttribute("x1", X(x));
      cursor.setAttribute("x2", X(x));
      cursor.setAttribute("visibility", "visible");
      tell(event, figure, panel, curves, x);
    });
  };

  const tell = (event, figure, panel, curves, x) => {
    const digits = figure.percent ? 2 : 3;
    const rows = curves
      .map((curve) => ({ curve, i: curve.x.indexOf(x) }))
      .filter(({ i }) => i >= 0)
      .sort((a, b) => (b.curve.median[b.i] ?? -1) - (a.curve.median[a.i] ?? -1))
      .map(({ curve, i }) => {
        const row = document.createElement("tr");
        const sample = row.insertCell();
        sample.append(key(curve.norm));
        const low = shown(curve.low[i], figure.percent, digits), high = shown(curve.high[i], figure.percent, digits);
        for (const text of [curve.norm, shown(curve.median[i], figure.percent, digits), `${low} – ${high}`, `n = ${curve.n[i]}`]) {
          row.insertCell().textContent = text;
        }
        return row;
      });
    const table = document.createElement("table");
    table.append(...rows);
    const heading = document.createElement("div");
    heading.textContent = `${panel.x_label} ${x}`;
    tip.replaceChildren(heading, table);
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, window.innerWidth - width - 4))}px`;
    tip.style.top = `${event.clientY + 18 + height > window.innerHeight ? Math.max(4, event.clientY - height - 12) : event.clientY + 18}px`;
  };

  const key = (norm) => {
    const sample = svg("svg", { width: 26, height: 10, "aria-hidden": "true" });
    svg("line", { x1: 1, x2: 25, y1: 5, y2: 5, stroke: look(norm).colour, "stroke-width": 2.5, "stroke-dasharray": dashes[look(norm).dash] }, sample);
    return sample;
  };

  const boxes = [];
  document.querySelectorAll(".panels").forEach((place) => {
    const figure = data.figures[Number(place.dataset.figure)];
    place.classList.toggle("few", figure.panels.length < 3);
    for (const panel of figure.panels) {
      const box = document.createElement("div");
      box.className = "panel";
      place.append(box);
      boxes.push([box, figure, panel]);
    }
  });
  const redraw = () => boxes.forEach((each) => draw(...each));

  for (const { norm } of data.styles) {
    const label = document.createElement("label"), box = document.createElement("input");
    Object.assign(box, { type: "checkbox", checked: true, value: norm });
    box.addEventListener("change", () => { hidden[box.checked ? "delete" : "add"](norm); redraw(); });
    label.append(box, key(norm), norm);
    document.getElementById("legend").append(label);
  }
  redraw();
  let waiting;
  window.addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(redraw, 100); });

  // ---- Tables ------------------------------------------------------------------------------------------------------

  const compare = (a, b) => {
    if (a === "" || b === "") return a === b ? 0 : null; // nothing comes last, whichever way
    const [x, y] = [Number(a.replace("inf", "Infinity")), Number(b.replace("inf", "Infinity"))];
    return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b, undefined, { numeric: true }) : x === y ? 0 : x - y;
  };

  document.querySelectorAll(".sortable").forEach((table) => {
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, column) =>
      heading.querySelector("button").addEventListener("click", () => {
        const down = heading.getAttribute("aria-sort") === "ascending";
        headings.forEach((other) => other.removeAttribute("aria-sort"));
        heading.setAttribute("aria-sort", down ? "descending" : "ascending");
        const value = (row) => row.cells[column].dataset.sort;
        const rows = [...table.tBodies[0].rows].sort((a, b) => {
          const order = compare(value(a), value(b));
          return order === null ? (value(a) === "" ? 1 : -1) : down ? -order : order;
        });
        table.tBodies[0].append(...rows);
      }),
    );
  });
})();

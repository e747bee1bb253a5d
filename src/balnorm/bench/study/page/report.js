"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const tip = document.getElementById("tip");
  const hidden = new Set();
  const view = { seeds: false, log: false, time: false };
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
  const isSweep = (figure) => figure.key.startsWith("by-");
  const isNumber = (value) => typeof value === "number";

  // Round numbers that divide a range into about as many parts as asked for.
  const ticks = (low, high, count) => {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(k * step);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    return found.map((value) => [value, value.toFixed(digits)]);
  };

  // The same for a logarithmic axis: 1, 2, 5, 10, or powers of ten alone; in a small range, as for a linear one.
  const logTicks = (low, high) => {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const factor of [1, 2, 5]) found.push([factor, power]);
    }
    const marks = found.filter(([factor, power]) => factor * 10 ** power >= low && factor * 10 ** power <= high);
    if (marks.length < 3) return ticks(low, high, 5);
    return (marks.length > 9 ? marks.filter(([factor]) => factor === 1) : marks).map(([factor, power]) => {
      const value = Number(`${factor}e${power}`);
      return [value, String(value)];
    });
  };

  const shown = (value, percent, digits) =>
    value === null ? "diverged" : percent ? `${(100 * value).toFixed(digits)}%` : value.toFixed(digits);

  // The curves of a panel as points: where each is on the x axis, and which of the curve's values it has. Where x is the
  // time, the axis covers the times of the panel's epochs.
  const prepare = (figure, panel) => {
    const sweep = isSweep(figure), time = view.time && !sweep;
    const [first, last] = panel.x_range || [-Infinity, Infinity];
    const inside = (epoch) => !time || (epoch >= first && epoch <= last);
    const longest = Math.max(0, ...figure.panels.flatMap((each) => each.curves.flatMap((curve) => curve.seconds)));
    const [unit, length] = longest < 180 ? ["seconds", 1] : longest < 10800 ? ["minutes", 60] : ["hours", 3600];
    const curves = panel.curves.map((curve) => {
      const xs = time ? curve.seconds.map((seconds) => seconds / length) : curve.x;
      const points = curve.x.map((epoch, i) => ({ x: xs[i], i, epoch })).filter(({ x, epoch }) => isNumber(x) && inside(epoch));
      const lines = !view.seeds ? [] : sweep
        ? curve.x.flatMap((x, i) => data.runs[curve.settings[i]].filter((run) => run.finished && run.values[figure.metric].length).map((run) => [[x, run.values[figure.metric].at(-1)]]))
        : data.runs[curve.settings[0]].map((run) =>
            run.values[figure.metric].map((y, i) => [time ? run.seconds[i] / length : i + 1, y, i + 1]).filter(([, , epoch]) => inside(epoch)));
      return { curve, points, lines };
    });
    const all = curves.flatMap(({ points }) => points.map(({ x }) => x));
    const times = [...all, ...curves.flatMap(({ lines }) => lines.flat().map(([x]) => x))];
    let range = time ? [panel.x_range ? Math.min(...times) : 0, Math.max(...times)] : panel.x_range || [Math.min(...all), Math.max(...all)];
    if (!all.length) range = [0, 1];
    if (range[0] === range[1]) range = panel.x_log ? [range[0] / 2, range[1] * 2] : [range[0] - 1, range[1] + 1];
    return { curves, all, range, sweep, time, unit, label: time ? `time, ${unit}` : panel.x_label, log: panel.x_log };
  };

  // The y range of a panel: that of its file, wider for single seeds by no more than itself, and without what is not
  // positive on a logarithmic axis. Panels that share their range keep sharing it.
  const vertical = (figure, panel) => {
    let [low, high] = panel.y_range || [0, 1];
    const log = view.log && figure.loss && panel.y_range !== null, height = high - low, values = [];
    for (const other of figure.panels) {
      if (JSON.stringify(other.y_range) !== JSON.stringify(panel.y_range)) continue;
      const [first, last] = other.x_range || [-Infinity, Infinity];
      for (const curve of other.curves) {
        const within = curve.x.map((x, i) => i).filter((i) => curve.x[i] >= first && curve.x[i] <= last);
        const own = within.flatMap((i) => [curve.low[i], curve.median[i], curve.high[i]]).filter((y) => isNumber(y) && y >= low && y <= high);
        values.push(...own);
        if (!view.seeds || !own.length) continue;
        for (const run of curve.settings.flatMap((setting) => data.runs[setting])) {
          const ys = run.values[figure.metric];
          const seen = isSweep(figure) ? ys.slice(-1) : ys.filter((_, i) => i + 1 >= first && i + 1 <= last);
          values.push(...seen.filter((y) => y >= low - height && y <= high + height));
        }
      }
    }
    if (view.seeds && values.length) {
      low = Math.min(low, Math.min(...values) - 0.02 * height);
      high = Math.max(high, Math.max(...values) + 0.02 * height);
    }
    const lowest = Math.min(...values.filter((y) => y > 0));
    return log && lowest < high ? { range: [lowest / 1.05, high], log } : { range: [low, high], log: false };
  };

  const draw = (box, figure, panel) => {
    const focused = box.contains(document.activeElement);
    box.replaceChildren();
    const width = Math.max(240, box.clientWidth), height = Math.min(320, Math.max(220, 0.62 * width));
    const left = 52, right = 10, top = 24, bottom = 38;
    const name = `${figure.title}, ${panel.title}. Arrow keys show the values.`;
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label": name }, box);
    const across = prepare(figure, panel), up = vertical(figure, panel), sweep = across.sweep;
    const curves = across.curves.filter(({ curve }) => !hidden.has(curve.norm));
    const [x0, x1] = across.range, [y0, y1] = up.range;
    const scale = (log) => (log ? Math.log : (value) => value);
    const sx = scale(across.log), sy = scale(up.log), inset = sweep ? 14 : 0;
    const X = (value) => left + inset + ((sx(value) - sx(x0)) / (sx(x1) - sx(x0))) * (width - left - right - 2 * inset);
    const Y = (value) => top + ((sy(y1) - sy(Math.max(value, up.log ? y0 / 2 : -Infinity))) / (sy(y1) - sy(y0))) * (height - top - bottom);

    svg("text", { x: left, y: 14, class: "title" }, root, panel.title);
    const percent = figure.percent ? 100 : 1;
    for (const [value, text] of up.log ? logTicks(y0, y1) : ticks(percent * y0, percent * y1, 5)) {
      const y = Y(value / percent);
      svg("line", { x1: left, x2: width - right, y1: y, y2: y, class: "grid" }, root);
      svg("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, root, text + (figure.percent ? "%" : ""));
    }
    const linear = () => ticks(x0, x1, Math.min(8, width / 60, sweep || across.time ? 8 : x1 - x0)).map(([value]) => value);
    let marks = across.log ? [...new Set(across.all)] : linear();
    if (!across.log && !sweep && !across.time) marks = marks.filter(Number.isInteger);
    for (const value of marks) {
      svg("text", { x: X(value), y: height - bottom + 16, "text-anchor": "middle" }, root, String(Number(value.toPrecision(6))));
    }
    svg("line", { x1: left, x2: width - right, y1: height - bottom, y2: height - bottom, class: "axis" }, root);
    svg("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, root, across.label);
    if (panel.curves.length && panel.curves.every((curve) => curve.median.every((value) => value === null))) {
      svg("text", { x: (left + width - right) / 2, y: (top + height - bottom) / 2, "text-anchor": "middle" }, root, "diverged");
    }

    const clip = `clip-${figure.key}-${[...box.parentNode.children].indexOf(box)}`;
    svg("rect", { x: left, y: top - 1, width: width - left - right, height: height - top - bottom + 2 }, svg("clipPath", { id: clip }, root));
    const plot = svg("g", { "clip-path": `url(#${clip})` }, root);
    const written = (points) => points.map(([x, y]) => `${X(x)},${Y(y)}`).join(" ");
    for (const { curve, points, lines } of curves) {
      const colour = look(curve.norm).colour;
      const band = points.filter(({ i }) => curve.low[i] !== null && curve.high[i] !== null);
      if (band.length && !view.seeds) {
        const outline = [...band.map(({ x, i }) => [x, curve.high[i]]), ...band.reverse().map(({ x, i }) => [x, curve.low[i]])];
        svg("polygon", { points: written(outline), fill: colour, class: "band" }, plot);
      }
      for (const line of lines) {
        if (line.length > 1) svg("polyline", { points: written(line), class: "seed", stroke: colour }, plot);
        else for (const [x, y] of line) svg("circle", { cx: X(x), cy: Y(y), r: 2.5, class: "seed", stroke: colour }, plot);
      }
    }
    for (const { curve, points } of curves) {
      const line = points.map(({ x, i }) => [x, curve.median[i]]).filter(([, y]) => y !== null);
      svg("polyline", {
        points: written(line), class: "line", stroke: look(curve.norm).colour,
        "stroke-dasharray": dashes[look(curve.norm).dash], "data-norm": curve.norm,
      }, plot);
      if (sweep || line.length === 1) {
        for (const [x, y] of line) svg("circle", { cx: X(x), cy: Y(y), r: 3.5, fill: look(curve.norm).colour }, plot);
      }
    }
    follow(root, { figure, across, curves, X, width, top, bottom: height - bottom });
    if (focused) root.focus();
  };

  // ---- Values under the pointer, or where the arrow keys lead ------------------------------------------------------

  const follow = (root, { figure, across, curves, X, width, top, bottom }) => {
    const [x0, x1] = across.range;
    const cursor = svg("line", { y1: top, y2: bottom, class: "cursor", visibility: "hidden" }, root);
    const stops = [...new Set(curves.flatMap(({ points }) => points.map(({ x }) => x)))].filter((x) => x >= x0 && x <= x1).sort((a, b) => a - b);
    let at = stops.length;
    const leave = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
    const show = (index, place) => {
      if (!stops.length) return leave();
      at = Math.min(stops.length - 1, Math.max(0, index));
      cursor.setAttribute("x1", X(stops[at]));
      cursor.setAttribute("x2", X(stops[at]));
      cursor.setAttribute("visibility", "visible");
      const frame = root.getBoundingClientRect();
      const here = { x: frame.left + (X(stops[at]) / width) * frame.width, y: frame.bottom - 12 };
      tell(place || here, figure, across, curves, stops[at]);
    };
    root.addEventListener("pointerleave", leave);
    root.addEventListener("blur", leave);
    root.addEventListener("pointermove", (event) => {
      const frame = root.getBoundingClientRect(), where = ((event.clientX - frame.left) / frame.width) * width;
      const away = stops.map((x) => Math.abs(X(x) - where));
      show(away.indexOf(Math.min(...away)), { x: event.clientX, y: event.clientY });
    });
    root.addEventListener("keydown", (event) => {
      if (event.key === "Escape") return leave();
      const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: stops.length - 1 }[event.key];
      if (to === undefined || event.ctrlKey || event.altKey || event.metaKey) return;
      event.preventDefault();
      show(to);
    });
  };

  // What each curve has there: at an epoch or a number, or at a time, the last epoch that was over by then.
  const tell = (place, figure, across, curves, x) => {
    const digits = figure.percent ? 2 : 3;
    const rows = curves
      .map(({ curve, points }) => ({ curve, point: points.filter((each) => (across.time ? each.x <= x : each.x === x)).at(-1) }))
      .filter(({ point }) => point)
      .sort((a, b) => (b.curve.median[b.point.i] ?? -1) - (a.curve.median[a.point.i] ?? -1))
      .map(({ curve, point: { i, epoch } }) => {
        const row = document.createElement("tr");
        row.insertCell().append(key(curve.norm));
        const low = shown(curve.low[i], figure.percent, digits), high = shown(curve.high[i], figure.percent, digits);
        const cells = [curve.norm, shown(curve.median[i], figure.percent, digits), `${low} – ${high}`, `n = ${curve.n[i]}`];
        for (const text of across.time ? [...cells, `epoch ${epoch}`] : cells) row.insertCell().textContent = text;
        return row;
      });
    const table = document.createElement("table");
    table.append(...rows);
    const heading = document.createElement("div");
    const number = Number(x.toPrecision(4));
    heading.textContent = across.time ? `${number} ${across.unit}` : `${across.label} ${number}`;
    tip.replaceChildren(heading, table);
    tip.hidden = false;
    const { width, height } = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(place.x + 14, window.innerWidth - width - 4))}px`;
    tip.style.top = `${place.y + 18 + height > window.innerHeight ? Math.max(4, place.y - height - 12) : place.y + 18}px`;
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
  const redraw = () => {
    boxes.forEach((each) => draw(...each));
    document.querySelectorAll(".reading").forEach((caption) => {
      const sweep = isSweep(data.figures[Number(caption.dataset.figure)]);
      const seeds = sweep ? "Small circles: single seeds." : "Thin lines: single seeds, as far as they trained.";
      caption.textContent = `Line: median over seeds. ${view.seeds ? seeds : "Band: 25% to 75%."}`;
      if (view.time && !sweep) caption.textContent += " Time: the epochs' seconds, summed, with whatever else the machine did.";
    });
  };

  const addSwitch = (place, checked, change, ...content) => {
    const label = document.createElement("label"), box = document.createElement("input");
    Object.assign(box, { type: "checkbox", checked });
    box.addEventListener("change", () => { change(box.checked); redraw(); });
    label.append(box, ...content);
    document.getElementById(place).append(label);
  };
  const byEpoch = data.figures.filter((figure) => !isSweep(figure));
  const views = {
    seeds: ["single seeds", Object.values(data.runs).some((runs) => runs.length > 1)],
    log: ["logarithmic axis for losses", data.figures.some((figure) => figure.loss)],
    time: ["time instead of epochs", byEpoch.length > 0],
  };
  for (const [name, [text, useful]] of Object.entries(views)) {
    if (useful) addSwitch("view", false, (on) => { view[name] = on; }, text);
  }
  for (const { norm } of data.styles) {
    addSwitch("legend", true, (on) => hidden[on ? "delete" : "add"](norm), key(norm), norm);
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

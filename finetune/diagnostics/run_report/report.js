"use strict";
// Draws the charts of the page with Plotly. Nothing is fetched, unless the page is live.
(() => {
  const root = document.documentElement;
  let state = JSON.parse(document.getElementById("report-data").textContent);
  let axis = "step";
  const logarithmic = {};

  function stored(name, value) {
    try {
      if (value === undefined) return localStorage.getItem(name);
      localStorage.setItem(name, value);
    } catch { /* a page opened from a file may have no storage */ }
    return null;
  }

  const TRACES = {
    line: { mode: "lines" },
    faint: { mode: "lines", opacity: 0.35 },
    points: { mode: "lines+markers" },
    stacked: { mode: "lines", stackgroup: "one" },
    cross: { mode: "markers", marker: { symbol: "x", size: 10 } },
    dashed: { mode: "lines" },
  };

  function traceOf(curve, chart) {
    const trace = {
      ...TRACES[curve.y.length === 1 && curve.style === "line" ? "points" : curve.style],
      name: curve.name,
      x: curve.x[axis],
      y: curve.y,
      line: { color: curve.color, width: curve.style === "faint" ? 1 : 2, dash: curve.style === "dashed" ? "dash" : "solid" },
      hovertemplate: `%{y:.5~g} ${chart.unit}`,
    };
    trace.marker = { ...trace.marker, color: curve.color };
    if (curve.texts.length) Object.assign(trace, { text: curve.texts, hovertemplate: "%{text}<extra></extra>" });
    return trace;
  }

  function layoutOf(chart) {
    const text = getComputedStyle(document.body).color, grid = { gridcolor: "rgba(128, 128, 128, 0.25)", automargin: true };
    const type = logarithmic[chart.key] ? "log" : "linear";
    return {
      margin: { l: 50, r: 10, t: 10, b: 40 },
      paper_bgcolor: "transparent",
      plot_bgcolor: "transparent",
      font: { color: text },
      hovermode: "x unified",
      hoverlabel: { bgcolor: getComputedStyle(document.querySelector(".card")).backgroundColor },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      legend: { orientation: "h", y: 1, yanchor: "bottom" },
      uirevision: `${axis}-${type}`,
      xaxis: { ...grid, title: { text: chart.axis || state.axes[axis] } },
      yaxis: { ...grid, title: { text: chart.unit }, type, rangemode: chart.from_zero ? "tozero" : "normal" },
      shapes: chart.marks.map((mark) => ({ type: "line", yref: "paper", x0: mark.x[axis], x1: mark.x[axis], y0: 0, y1: 1, line: { color: text, width: 1, dash: "dot" } })),
      annotations: chart.marks.map((mark) => ({ yref: "paper", x: mark.x[axis], y: 1, text: mark.sign, hovertext: mark.label, showarrow: false, yanchor: "top", xanchor: "left" })),
    };
  }

  function draw() {
    for (const box of document.querySelectorAll("[data-chart]")) {
      const chart = state.charts[box.dataset.chart];
      if (!chart) continue;
      const traces = chart.curves.map((curve) => traceOf(curve, chart));
      Plotly.react(box, traces, layoutOf(chart), { displaylogo: false, responsive: true, displayModeBar: false });
    }
    reachByKeyboard();
  }

  // What is wider than its place is moved by the arrow keys, once it has the focus.
  function reachByKeyboard() {
    for (const box of document.querySelectorAll(".scroll")) {
      const wide = box.scrollWidth > box.clientWidth;
      for (const [name, value] of [["tabindex", "0"], ["role", "group"], ["aria-label", "Table, wider than the page"]]) {
        if (wide) box.setAttribute(name, value);
        else box.removeAttribute(name);
      }
    }
  }

  function mark(buttons, chosen) {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button === chosen));
  }

  function setTheme(name) {
    root.dataset.theme = name;
    stored("finetune-report-theme", name);
    draw();
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.dataset.axis) {
      axis = button.dataset.axis;
      mark(document.querySelectorAll("[data-axis]"), button);
      draw();
    } else if (button.dataset.log) {
      const key = button.dataset.log;
      logarithmic[key] = !logarithmic[key];
      button.setAttribute("aria-pressed", String(logarithmic[key]));
      draw();
    } else if (button.id === "theme") {
      setTheme(isDark() ? "light" : "dark");
    }
  });

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("resize", reachByKeyboard);
  document.addEventListener("toggle", reachByKeyboard, true);
  const theme = stored("finetune-report-theme");
  if (theme === "dark" || theme === "light") root.dataset.theme = theme;
  draw();

  // ------------------------------------------------------------ live
  const seconds = Number(root.dataset.refresh || 0);
  if (!seconds) return;

  async function refresh() {
    const note = document.getElementById("live");
    try {
      const answer = await fetch("data", { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      const fresh = await answer.json();
      state = fresh.data;
      replace(fresh.body);
      draw();
    } catch {
      if (note) note.textContent = "no answer from `finetune report --live`; trying again";
    }
    setTimeout(refresh, 1000 * seconds);
  }

  // What can have the focus, by the part of the page that it is in and its place there.
  function controls() {
    const found = new Map();
    for (const one of document.querySelectorAll("main button, main summary, main .scroll")) {
      const part = one.closest("[id]") ?? document.querySelector("main");
      found.set(`${part.id} ${one.tagName} ${[...part.querySelectorAll(one.tagName)].indexOf(one)}`, one);
    }
    return found;
  }

  // Charts, what is folded open, the buttons' states, and what has the focus stay as they are.
  function replace(body) {
    const main = document.querySelector("main");
    const charts = new Map([...main.querySelectorAll("[data-chart]")].map((box) => [box.dataset.chart, box]));
    const open = new Map([...main.querySelectorAll("details[id]")].map((part) => [part.id, part.open]));
    const there = window.scrollY, before = controls();
    const places = new Map([...before].map(([name, one]) => [name, one.scrollLeft]));
    const focused = [...before].find(([, one]) => one === document.activeElement)?.[0];
    main.innerHTML = body;
    for (const box of main.querySelectorAll("[data-chart]")) {
      const known = charts.get(box.dataset.chart);
      if (known) box.replaceWith(known);
    }
    for (const part of main.querySelectorAll("details[id]")) {
      if (open.has(part.id)) part.open = open.get(part.id);
    }
    mark(document.querySelectorAll("[data-axis]"), document.querySelector(`[data-axis="${axis}"]`));
    for (const button of document.querySelectorAll("[data-log]")) {
      button.setAttribute("aria-pressed", String(Boolean(logarithmic[button.dataset.log])));
    }
    reachByKeyboard();
    for (const [name, one] of controls()) {
      one.scrollLeft = places.get(name) ?? 0;
      if (name === focused) one.focus({ preventScroll: true });
    }
    window.scrollTo(0, there);
  }

  setTimeout(refresh, 1000 * seconds);
})();

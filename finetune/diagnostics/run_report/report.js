"use strict";
// Draws the charts of the page with Plotly, in the colours of its style. Nothing is fetched, unless the page is live.
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

  function color(name) {
    return getComputedStyle(root).getPropertyValue(`--${name}`).trim() || name;
  }

  function traceOf(curve, chart) {
    const stacked = curve.style === "stacked";
    const points = curve.style === "points" || curve.style === "cross";
    const single = curve.y.length === 1;
    const trace = {
      type: "scatter",
      name: curve.name,
      x: curve.x[axis],
      y: curve.y,
      mode: curve.style === "cross" ? "markers" : points || single ? "lines+markers" : "lines",
      line: {
        color: color(curve.color),
        width: curve.style === "faint" ? 1 : stacked ? 0.5 : 2,
        dash: curve.style === "dashed" ? "dash" : "solid",
      },
      marker: { color: color(curve.color), size: curve.style === "cross" ? 10 : 7, symbol: curve.style === "cross" ? "x" : "circle" },
      opacity: curve.style === "faint" ? 0.35 : 1,
      connectgaps: false,
      hovertemplate: `%{y:.5~g}${chart.unit ? " " + chart.unit : ""}`,
    };
    if (stacked) {
      trace.stackgroup = "one";
      trace.fillcolor = color(curve.color);
    }
    if (curve.texts.length) {
      trace.text = curve.texts;
      trace.hovertemplate = "%{text}<extra></extra>";
    }
    if (curve.style === "dashed") trace.hoverinfo = "skip", delete trace.hovertemplate;
    return trace;
  }

  // From 0, unless the run began far from there.
  function beginsAtZero(chart) {
    const ends = chart.curves.flatMap((curve) => [curve.x[axis][0], curve.x[axis].at(-1)]).filter((x) => x !== null && x !== undefined);
    const least = Math.min(...ends), most = Math.max(...ends);
    return least === most || least < 0.3 * most;
  }

  function layoutOf(chart, box) {
    const narrow = box.clientWidth < 480;
    const line = { gridcolor: color("grid"), linecolor: color("grid"), zerolinecolor: color("grid"), tickfont: { size: 11 } };
    const many = chart.curves.length > 1;
    return {
      autosize: true,
      margin: { l: narrow ? 46 : 58, r: 12, t: 8, b: 42 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "inherit", color: color("text"), size: 12 },
      hovermode: "x unified",
      hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("text") } },
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      showlegend: many,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", font: { size: 11 } },
      uirevision: `${axis}-${logarithmic[box.dataset.chart] ? "log" : "linear"}`,
      xaxis: { ...line, title: { text: state.axes[axis], font: { size: 11 }, standoff: 6 }, hoverformat: axis === "time" ? ".4~g" : ",d", nticks: narrow ? 5 : 8, rangemode: beginsAtZero(chart) ? "tozero" : "normal" },
      yaxis: {
        ...line,
        title: { text: narrow ? "" : chart.unit, font: { size: 11 } },
        type: logarithmic[box.dataset.chart] ? "log" : "linear",
        rangemode: chart.fromZero ? "tozero" : "normal",
        exponentformat: "power",
        minexponent: 5,
        separatethousands: true,
        // Small learning rates take more room than the left margin.
        automargin: true,
        nticks: 6,
      },
      shapes: chart.marks.map((mark) => ({
        type: "line", xref: "x", yref: "paper", x0: mark.x[axis], x1: mark.x[axis], y0: 0, y1: 1,
        line: { color: color("muted"), width: 1, dash: "dot" },
      })),
      annotations: chart.marks.map((mark) => ({
        xref: "x", yref: "paper", x: mark.x[axis], y: 1, text: mark.sign, hovertext: mark.label, showarrow: false,
        yanchor: "top", xanchor: "left", font: { color: color("muted"), size: 13 },
      })),
    };
  }

  function draw() {
    for (const box of document.querySelectorAll("[data-chart]")) {
      const chart = state.charts[box.dataset.chart];
      if (!chart) continue;
      const traces = chart.curves.map((curve) => traceOf(curve, chart));
      Plotly.react(box, traces, layoutOf(chart, box), { displaylogo: false, responsive: true, displayModeBar: false });
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

  // Charts, what is folded open, and the buttons' states stay as they are.
  function replace(body) {
    const main = document.querySelector("main");
    const charts = new Map([...main.querySelectorAll("[data-chart]")].map((box) => [box.dataset.chart, box]));
    const open = new Map([...main.querySelectorAll("details[id]")].map((part) => [part.id, part.open]));
    const there = window.scrollY;
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
    window.scrollTo(0, there);
  }

  setTimeout(refresh, 1000 * seconds);
})();

"use strict";
// Every text of a run reaches the page through textContent, never as markup.
const COLORS = ["#1d4ed8", "#c2410c", "#0f766e", "#7e22ce", "#a16207", "#be123c", "#4d7c0f", "#475569"];
const DASHES = ["", "7 2", "7 2 2 2", "2 2"];
const SECONDS = 2;
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 250, LEFT = 52, RIGHT = 12, TOP = 8, BOTTOM = 38;

const color = (index) => (index < 0 ? "#1a1a1a" : COLORS[index % COLORS.length]);

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

function number(value) {
  const size = Math.abs(value);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (size >= unit) return `${+(value / unit).toPrecision(3)}${letter}`;
  return `${+value.toPrecision(4)}`;
}

function ticks(low, high, most) {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const made = [];
  for (let tick = Math.ceil(low / step); tick * step <= high; tick++) made.push(tick * step);
  return made;
}

function range(values, from) {
  let low = from, high = from;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  return low < high ? [low, high] : [low, low + (Math.abs(low) || 1)];
}

function legend(series) {
  const made = element("figcaption");
  for (const one of series) {
    if (!one.label) continue;
    const line = shape("svg", { width: 26, height: 10 });
    line.append(curve(one, "M0 5H26"));
    const last = one.points[one.points.length - 1][1];
    made.append(element("span", "", line, element("b", ` ${number(last)} `), one.label));
  }
  return made;
}

function curve(one, path) {
  return shape("path", {
    d: path, fill: "none", stroke: color(one.color), "stroke-linejoin": "round",
    "stroke-width": one.thin ? 1 : 1.8, "stroke-opacity": one.thin ? 0.7 : 1,
    "stroke-dasharray": DASHES[Math.max(0, one.color) % DASHES.length],
  });
}

function figure(chart, width) {
  const end = Math.max(...chart.series.map((one) => one.points[one.points.length - 1][0]));
  const begin = end * (1 - Number(shown.value));
  const series = chart.series.map((one) => ({ ...one, points: one.points.filter(([x]) => x >= begin) }))
    .filter((one) => one.points.length);
  const points = series.flatMap((one) => one.points);
  const [x0, x1] = range(points.map((point) => point[0]), begin);
  const [y0, y1] = range(points.map((point) => point[1]), chart.from_zero ? 0 : points[0][1]);
  const x = (value) => LEFT + ((value - x0) / (x1 - x0)) * (width - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - y0) / (y1 - y0)) * (HEIGHT - TOP - BOTTOM);
  const svg = shape("svg", { width, height: HEIGHT, role: "img", "aria-label": chart.title });
  for (const tick of ticks(y0, y1, 5)) {
    svg.append(shape("path", { d: `M${LEFT} ${y(tick)}H${width - RIGHT}`, stroke: "#e2e2e2" }));
    svg.append(shape("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, number(tick)));
  }
  for (const tick of ticks(x0, x1, width / 90)) {
    const anchor = x(tick) > width - 30 ? "end" : "middle";
    svg.append(shape("text", { x: x(tick), y: HEIGHT - BOTTOM + 16, "text-anchor": anchor }, number(tick)));
  }
  svg.append(shape("text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 5, "text-anchor": "middle" }, chart.x));
  for (const one of series) {
    const path = one.points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
    svg.append(curve(one, one.points.length > 1 ? path : `${path}h0.1`));
    if (one.points.length === 1)
      svg.append(shape("circle", { cx: x(one.points[0][0]), cy: y(one.points[0][1]), r: 3, fill: color(one.color) }));
  }
  return element("figure", "", element("h3", chart.title), svg, legend(series));
}

function card(one) {
  const title = element("h2", one.title);
  if (one.color >= 0) {
    const dot = shape("svg", { width: 14, height: 14 });
    dot.append(shape("circle", { cx: 6, cy: 7, r: 6, fill: color(one.color) }));
    title.prepend(dot);
  }
  const made = element("section", "", title, element("p", one.standing));
  if (one.part !== null) {
    const bar = element("progress");
    bar.value = one.part;
    bar.setAttribute("aria-label", "the share of the run that is over");
    made.append(bar);
  }
  const list = element("dl");
  for (const [name, value] of Object.entries(one.facts)) {
    const fact = element("dd", value);
    fact.dataset.fact = name;
    const pair = element("div", "", element("dt", name), fact);
    if (value.length > 24) pair.className = "wide";
    list.append(pair);
  }
  made.append(list);
  if (one.rows.length) {
    const head = element("tr", "", ...one.columns.map((name) => element("th", name)));
    const rows = one.rows.map((row) => element("tr", "", ...row.map((cell) => element("td", cell))));
    const box = element("div", "", element("table", "", element("thead", "", head), element("tbody", "", ...rows)));
    box.className = "table";
    made.append(box);
  }
  return made;
}

const cards = document.getElementById("cards"), charts = document.getElementById("charts");
const note = document.getElementById("note"), shown = document.getElementById("shown");
let state = { charts: [], cards: [], note: "" };

function draw() {
  cards.replaceChildren(...state.cards.map(card));
  cards.className = state.cards.length > 1 ? "several" : "";
  const columns = getComputedStyle(charts).gridTemplateColumns.split(" ");
  const width = Math.floor(parseFloat(columns[0])) || 300;
  charts.replaceChildren(...state.charts.map((chart) => figure(chart, width)));
}

async function look() {
  if (!document.hidden) {
    try {
      const answer = await fetch("/state.json");
      if (!answer.ok) throw new Error(`the answer is ${answer.status}`);
      state = await answer.json();
      note.textContent = state.note;
      draw();
    } catch (error) {
      note.textContent = `No news since the last answer: diloco watch has ended, or can't be reached (${error.message}).`;
    }
  }
  setTimeout(look, 1000 * SECONDS);
}

addEventListener("resize", draw);
shown.addEventListener("change", draw);
look();

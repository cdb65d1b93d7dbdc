"use strict";
// Every text of a run reaches the page through textContent, never as markup.
const COLORS = ["#1d4ed8", "#c2410c", "#0f766e", "#7e22ce", "#a16207", "#be123c", "#4d7c0f", "#475569"];
const DASHES = ["", "7 2", "7 2 2 2", "2 2"];
const MARKS = { died: ["×", "#be123c"], replaced: ["◆", "#1a1a1a"], revoked: ["◆", "#be123c"], left: ["|", "#1a1a1a"] };
const SECONDS = 2;
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 250, LEFT = 52, RIGHT = 12, TOP = 8, BOTTOM = 38, LANE = 16, COLUMN = 336, GAP = 20, LETTER = 6.5;
const NAMES = 125, MOST_LETTERS = 20;

const color = (index) => (index < 0 ? "#1a1a1a" : COLORS[index % COLORS.length]);
const last = (list) => list[list.length - 1];
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

function element(name, text, ...children) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  made.append(...children);
  return made;
}

function classed(name, made) {
  made.className = name;
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
    if (size >= unit && size < 1e15) return `${+(value / unit).toPrecision(3)}${letter}`;
  if (size && (size < 1e-3 || size >= 1e15)) return value.toExponential(1).replace(".0e", "e").replace("+", "");
  return `${+value.toPrecision(4)}`;
}

function linearTicks(low, high, most) {
  const rough = (high - low) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const made = [];
  for (let tick = Math.ceil(low / step); tick * step <= high; tick++) made.push(tick * step);
  return made;
}

function logTicks(low, high, most) {
  const decades = Math.log10(high / low);
  if (decades < 0.5) return linearTicks(low, high, most);
  const every = Math.max(1, Math.ceil(decades / most));
  const made = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += every)
    for (const factor of decades < 2 ? [1, 2, 5] : [1]) made.push(factor * 10 ** power);
  return made.filter((tick) => tick >= low && tick <= high);
}

function range(values, from) {
  let low = from, high = from;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  return low < high ? [low, high] : low ? [low - Math.abs(low) / 2, low + Math.abs(low) / 2] : [0, 1];
}

// A function from values to places, and the ticks between the ends.
function axis([low, high], begin, end, isLog, most) {
  const form = isLog ? Math.log : (value) => value;
  const place = (value) => begin + ((form(value) - form(low)) / (form(high) - form(low))) * (end - begin);
  return [place, isLog ? logTicks(low, high, most) : linearTicks(low, high, most)];
}

function curve(one, path) {
  return shape("path", {
    d: path, fill: "none", stroke: color(one.color), "stroke-linejoin": "round",
    "stroke-width": one.thin ? 1 : 1.8, "stroke-opacity": one.thin ? 0.7 : 1,
    "stroke-dasharray": DASHES[Math.max(0, one.color) % DASHES.length],
  });
}

function legend(chart, series) {
  const made = classed("legend", element("div"));
  if (chart.legend && series.some((one) => one.label)) made.append(element("span", `${chart.legend}:`));
  for (const one of series) {
    if (!one.label) continue;
    const line = shape("svg", { width: 26, height: 10 });
    if (chart.lanes.length) line.append(shape("rect", { width: 26, height: 10, fill: color(one.color) }));
    else if (!chart.names.length) line.append(curve(one, "M0 5H26"));
    if (!chart.lanes.length && !chart.is_history)
      line.append(shape("circle", { cx: 13, cy: 5, r: 3, fill: color(one.color) }));
    const value = one.value || (chart.is_history && one.points.length ? number(last(one.points)[1]) : "");
    made.append(element("span", "", line, element("b", value ? ` ${value} ` : " "), one.label));
  }
  return made;
}

function frame(chart, width, height, left) {
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title });
  const middle = (left + width - RIGHT) / 2;
  svg.append(shape("text", { x: middle, y: height - 5, "text-anchor": "middle" }, chart.x));
  return svg;
}

function xTicks(svg, ticks, x, width, height, names) {
  for (const tick of ticks) {
    const anchor = x(tick) > width - 30 ? "end" : "middle";
    const text = names.length ? names[tick] : number(tick);
    svg.append(shape("text", { x: x(tick), y: height - BOTTOM + 16, "text-anchor": anchor }, text));
  }
}

function marks(svg, one, x, y) {
  for (const [a, b, low, high] of one.points) {
    const at = x(a), shade = color(one.color);
    if (low < high)
      svg.append(shape("path", { d: `M${at} ${y(low)}V${y(high)}M${at - 3} ${y(low)}h6M${at - 3} ${y(high)}h6`, stroke: shade }));
    svg.append(shape("circle", { cx: at, cy: y(b), r: 3, fill: shade }));
  }
}

function curves(chart, width) {
  const all = chart.series.filter((one) => one.points.length);
  const end = Math.max(...all.map((one) => last(one.points)[0]));
  const begin = chart.is_history ? end * (1 - Number(shown.value)) : -Infinity;
  const series = all.map((one) => ({ ...one, points: one.points.filter((point) => point[0] >= begin) }))
    .filter((one) => one.points.length);
  const points = series.flatMap((one) => one.points);
  const below = BOTTOM + (chart.names.length ? NAMES : 0), height = HEIGHT + below - BOTTOM;
  const svg = frame(chart, width, height, LEFT);
  const inX = chart.names.length ? [-0.5, chart.names.length - 0.5]
    : range(points.map((point) => point[0]), chart.is_history ? begin : points[0][0]);
  const inY = range(points.flatMap((point) => point.slice(1)), chart.from_zero ? 0 : points[0][1]);
  const pad = chart.is_history ? 0 : 10, bottom = height - below;
  const [x, across] = axis(inX, LEFT + pad, width - RIGHT - pad, chart.x_log, width / 90);
  const [y, up] = axis(inY, bottom - pad, TOP + pad, chart.y_log, 5);
  for (const tick of up) {
    svg.append(shape("path", { d: `M${LEFT} ${y(tick)}H${width - RIGHT}`, stroke: "#e2e2e2" }));
    svg.append(shape("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, number(tick)));
  }
  if (chart.names.length)
    chart.names.forEach((name, index) => svg.append(shape("text", {
      "text-anchor": "end", transform: `translate(${x(index) + 4} ${bottom + 12}) rotate(-60)`,
    }, cut(name, MOST_LETTERS))));
  else xTicks(svg, across, x, width, height, []);
  for (const one of series) {
    const path = one.points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
    if (!chart.names.length) svg.append(curve(one, one.points.length > 1 ? path : `${path}h0.1`));
    if (!chart.is_history || one.points.length === 1) marks(svg, one, x, y);
  }
  return [svg, legend(chart, series)];
}

function lanes(chart, width) {
  const bars = chart.lanes.flatMap((lane) => lane.bars);
  const height = TOP + LANE * chart.lanes.length + BOTTOM;
  const left = Math.min(width / 3, 12 + LETTER * Math.max(...chart.lanes.map((lane) => lane.label.length)));
  const svg = frame(chart, width, height, left);
  const ends = range(bars.flat(), bars.length ? bars[0][0] : 0);
  const [x, ticks] = axis(ends, left, width - RIGHT - 4, false, (width - left) / 90);
  for (const tick of ticks)
    svg.append(shape("path", { d: `M${x(tick)} ${TOP}V${height - BOTTOM}`, stroke: "#e2e2e2" }));
  xTicks(svg, ticks, x, width, height, []);
  chart.lanes.forEach((lane, index) => {
    const y = TOP + LANE * (index + 0.5), shade = color(lane.color);
    svg.append(shape("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, cut(lane.label, Math.floor((left - 6) / LETTER))));
    for (const [begin, end] of lane.bars)
      svg.append(shape("rect", {
        x: x(begin), y: y - LANE / 3, width: Math.max(1.5, x(end) - x(begin)), height: (2 * LANE) / 3, fill: shade, "fill-opacity": 0.3,
      }));
    for (const dot of lane.dots) svg.append(shape("circle", { cx: x(dot), cy: y, r: 2, fill: shade }));
    const [mark, markColor] = MARKS[lane.end] || [];
    if (mark) {
      const sign = shape("text", { x: x(last(lane.bars)[1]), y: y + 5, "text-anchor": "middle", "font-weight": "bold" }, mark);
      sign.style.fill = markColor;
      svg.append(sign);
    }
  });
  return [svg, legend(chart, chart.series)];
}

function figure(chart, width) {
  const [svg, names] = chart.lanes.length ? lanes(chart, width) : curves(chart, width);
  return element("figure", "", element("h3", chart.title), svg, element("figcaption", "", names, element("div", chart.about)));
}

function facts(values) {
  const list = element("dl");
  for (const [name, value] of Object.entries(values)) {
    const parts = value.split("_").flatMap((part, index) => (index ? ["_", element("wbr"), part] : [part]));
    const fact = element("dd", "", ...parts);
    fact.dataset.fact = name;
    const pair = element("div", "", element("dt", name), fact);
    if (value.length > 34) pair.className = "wide";
    list.append(pair);
  }
  return list;
}

function table({ columns, rows }) {
  const head = element("tr", "", ...columns.map((name) => element("th", name)));
  const body = rows.map((row) => element("tr", "", ...row.map((cell) => element("td", cell))));
  const made = element("table", "", element("thead", "", head), element("tbody", "", ...body));
  return classed("table", element("div", "", made));
}

function content(one, width) {
  const made = one.notes.map((text) => element("p", text));
  if (Object.keys(one.facts).length) made.push(facts(one.facts));
  const drawn = one.charts.filter((chart) => chart.lanes.length || chart.series.some((series) => series.points.length));
  if (drawn.length)
    made.push(classed("figures", element("div", "", ...drawn.map((chart) => figure(chart, width)))));
  if (one.table && one.table.rows.length) made.push(table(one.table));
  return made;
}

function section(one, width) {
  const title = element("h2", one.title);
  if (one.color >= 0) {
    const dot = shape("svg", { width: 14, height: 14 });
    dot.append(shape("circle", { cx: 6, cy: 7, r: 6, fill: color(one.color) }));
    title.prepend(dot);
  }
  const head = element("summary", "", title, classed("standing", element("span", one.standing)));
  if (one.part !== null && one.part < 1) {
    const bar = element("progress");
    bar.value = one.part;
    bar.setAttribute("aria-label", "the share of the run that is over");
    head.append(bar);
  }
  const made = element("details", "", head);
  made.open = unfolded.has(one.title) ? unfolded.get(one.title) : one.is_open;
  const fill = () => made.childElementCount > 1 || made.append(...content(one, width));
  if (made.open) fill();
  made.addEventListener("toggle", () => {
    unfolded.set(one.title, made.open);
    if (made.open) fill();
  });
  return made;
}

const main = document.querySelector("main"), note = document.getElementById("note");
const shown = document.getElementById("shown"), unfolded = new Map();
let page = { sections: [], note: "" };

function draw() {
  const whole = main.clientWidth;
  const columns = Math.max(1, Math.floor((whole + GAP) / (COLUMN + GAP)));
  const width = Math.floor((whole - GAP * (columns - 1)) / columns);
  note.textContent = page.note;
  shown.parentElement.hidden = !page.sections.some((one) => one.charts.some((chart) => chart.is_history));
  main.replaceChildren(...page.sections.map((one) => section(one, width)));
}

async function look() {
  if (!document.hidden) {
    try {
      const answer = await fetch(`${location.pathname.replace(/\/$/, "")}/page.json`);
      if (!answer.ok) throw new Error(`the answer is ${answer.status}`);
      page = await answer.json();
      draw();
    } catch (error) {
      note.textContent = `No news since the last answer: diloco watch has ended, or can't be reached (${error.message}).`;
    }
  }
  setTimeout(look, 1000 * SECONDS);
}

addEventListener("resize", draw);
shown.addEventListener("change", draw);
const frozen = document.getElementById("content");
if (frozen) {
  page = JSON.parse(frozen.textContent);
  draw();
} else look();

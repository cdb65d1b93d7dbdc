"use strict";
// Every text of a run reaches the page through textContent, never as markup.
// Colours are classes of page.css, which has a light and a dark one for each.
const NUM_COLORS = 8, DASHES = ["", "7 2", "7 2 2 2", "2 2"];
const MARKS = { died: ["×", "bad"], replaced: ["◆", "ink"], revoked: ["◆", "bad"], left: ["|", "ink"] };
const SECONDS = 2;
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 250, LEFT = 48, RIGHT = 12, TOP = 26, BOTTOM = 38, LANE = 16, COLUMN = 336, GAP = 20, LETTER = 6.7;
const NAMES = 125, MOST_LETTERS = 20;

const color = (index) => (index < 0 ? "ink" : `c${index % NUM_COLORS}`);
const dash = (index) => (index < 0 ? "" : DASHES[(index + Math.floor(index / NUM_COLORS)) % DASHES.length]);
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

// A number as legends show it: bytes and rates with their unit.
function valued(chart, value) {
  const [unit] = chart.y.split(",");
  if (unit === "bytes") return `${number(value)}B`.replace(/([TGMk]?)B$/, " $1B");
  return unit.endsWith("/s") ? `${number(value)} ${unit}` : number(value);
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
    d: path, class: color(one.color), fill: "none", stroke: "currentColor", "stroke-linejoin": "round",
    "stroke-width": one.thin ? 1 : 1.8, "stroke-opacity": one.thin ? 0.6 : 1, "stroke-dasharray": dash(one.color),
  });
}

// The name by which a curve is hidden, in all charts of its section: a run's thin curves go with the run's own.
function key(section, chart, one) {
  const named = one.label ? one : chart.series.find((other) => other.label && other.color === one.color) || one;
  return `${section.title}\n${named.label}`;
}

function legend(section, chart) {
  const made = classed("legend", element("div")), labelled = chart.series.filter((one) => one.label);
  if (chart.legend && labelled.length) made.append(element("span", `${chart.legend}:`));
  for (const one of labelled) {
    if (!chart.lanes.length && !one.points.length) continue;
    const line = shape("svg", { width: 26, height: 10 });
    if (chart.lanes.length) line.append(shape("rect", { width: 26, height: 10, class: color(one.color), fill: "currentColor" }));
    else if (!chart.names.length) line.append(curve(one, "M0 5H26"));
    if (!chart.lanes.length && !chart.is_history)
      line.append(shape("circle", { cx: 13, cy: 5, r: 3, class: color(one.color), fill: "currentColor" }));
    const value = one.value || (chart.is_history && one.points.length ? valued(chart, last(one.points)[1]) : "");
    const text = value ? ` ${value}` : "";
    const shownValue = element("b", text);
    shownValue.dataset.label = one.label;
    if (chart.lanes.length || labelled.length < 2) {
      made.append(element("span", "", line, one.label, shownValue));
      continue;
    }
    const name = key(section, chart, one), toggle = element("button", "", line, one.label, shownValue);
    toggle.dataset.key = `${chart.title}\n${name}`;
    toggle.setAttribute("aria-pressed", !hidden.has(name));
    toggle.title = hidden.has(name) ? "show it again" : "hide it";
    toggle.addEventListener("click", () => {
      if (!hidden.delete(name)) hidden.add(name);
      draw();
    });
    made.append(toggle);
  }
  return made;
}

function frame(chart, width, height, left) {
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": chart.title });
  const middle = (left + width - RIGHT) / 2;
  svg.append(shape("text", { x: middle, y: height - 5, "text-anchor": "middle" }, chart.x));
  if (chart.y) svg.append(shape("text", { x: 0, y: 12 }, chart.y));
  return svg;
}

// Labels that would touch the one before them are left out.
function xTicks(svg, ticks, x, width, height) {
  let free = -Infinity;
  for (const tick of ticks) {
    const text = number(tick), half = (LETTER * text.length) / 2;
    const middle = Math.min(x(tick), width - half - 1);
    if (middle - half < free) continue;
    free = middle + half + LETTER;
    svg.append(shape("text", { x: middle, y: height - BOTTOM + 16, "text-anchor": "middle" }, text));
  }
}

function marks(svg, one, x, y) {
  for (const [a, b, low, high] of one.points) {
    const at = x(a), shade = color(one.color);
    if (low < high)
      svg.append(shape("path", {
        d: `M${at} ${y(low)}V${y(high)}M${at - 3} ${y(low)}h6M${at - 3} ${y(high)}h6`, class: shade, stroke: "currentColor",
      }));
    svg.append(shape("circle", { cx: at, cy: y(b), r: 3, class: shade, fill: "currentColor" }));
  }
}

// The curves of a chart that are shown: not hidden, and only of the part of the run that is asked for.
function visible(section, chart) {
  const all = chart.series.filter((one) => one.points.length && !hidden.has(key(section, chart, one)));
  const end = Math.max(...all.map((one) => last(one.points)[0]));
  const begin = chart.is_history ? end * (1 - Number(shown.value)) : -Infinity;
  return all.map((one) => ({ ...one, points: one.points.filter((point) => point[0] >= begin) }))
    .filter((one) => one.points.length);
}

function ends(chart, series) {
  const points = series.flatMap((one) => one.points);
  if (!points.length) return null;
  const from = chart.is_history && shown.value === "1" && !chart.x_log ? 0 : points[0][0];
  const inX = chart.names.length ? [-0.5, chart.names.length - 0.5] : range(points.map((point) => point[0]), from);
  return [inX, range(points.flatMap((point) => point.slice(1)), chart.from_zero ? 0 : points[0][1])];
}

// A store's charts count outer steps where a run's count tokens.
const scaleOf = (chart) => `${chart.title} over ${chart.x}`;

// The ends of the axes of charts of one title and unit, over all runs.
function commonEnds() {
  const made = new Map();
  if (!common.checked) return made;
  for (const one of page.sections)
    for (const chart of one.charts.filter((chart) => chart.is_history && chart.series.length)) {
      const own = ends(chart, visible(one, chart)), before = made.get(scaleOf(chart));
      if (own) made.set(scaleOf(chart), before ? own.map(([low, high], i) =>
        [Math.min(low, before[i][0]), Math.max(high, before[i][1])]) : own);
    }
  return made;
}

function curves(section, chart, width, inCommon) {
  const series = visible(section, chart);
  const below = BOTTOM + (chart.names.length ? NAMES : 0), height = HEIGHT + below - BOTTOM;
  const svg = frame(chart, width, height, LEFT);
  const [inX, inY] = (chart.is_history && inCommon.get(scaleOf(chart))) || ends(chart, series) || [[0, 1], [0, 1]];
  const pad = chart.is_history ? 0 : 10, bottom = height - below;
  const [x, across] = axis(inX, LEFT + pad, width - RIGHT - pad, chart.x_log, width / 90);
  const [y, up] = axis(inY, bottom - pad, TOP + pad, chart.y_log, 5);
  for (const tick of up) {
    svg.append(shape("path", { d: `M${LEFT} ${y(tick)}H${width - RIGHT}`, class: "line", stroke: "currentColor" }));
    svg.append(shape("text", { x: LEFT - 6, y: y(tick) + 4, "text-anchor": "end" }, number(tick)));
  }
  if (chart.names.length)
    chart.names.forEach((name, index) => svg.append(shape("text", {
      "text-anchor": "end", transform: `translate(${x(index) + 4} ${bottom + 12}) rotate(-60)`,
    }, cut(name, MOST_LETTERS))));
  else xTicks(svg, across, x, width, height);
  for (const one of series) {
    const path = one.points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`).join("");
    if (!chart.names.length) svg.append(curve(one, one.points.length > 1 ? path : `${path}h0.1`));
    if (!chart.is_history || one.points.length === 1) marks(svg, one, x, y);
  }
  if (chart.is_history) svg.addEventListener("pointerleave", draw);
  if (chart.is_history) svg.addEventListener("pointermove", (event) => {
    const at = (event.offsetX / svg.clientWidth) * width;
    const nearest = (one) => one.points.reduce((a, b) => (Math.abs(x(b[0]) - at) < Math.abs(x(a[0]) - at) ? b : a));
    point(svg, chart, series.map((one) => [one, nearest(one)]), x, bottom);
  });
  return svg;
}

// A line where the pointer is, with the values of the curves there in the legend.
function point(svg, chart, at, x, bottom) {
  const places = at.map(([, [a]]) => a);
  if (!places.length) return;
  const end = Math.max(...places), line = svg.querySelector(".pointer") || shape("path", { class: "pointer ink", stroke: "currentColor" });
  line.setAttribute("d", `M${x(end)} ${TOP}V${bottom}`);
  svg.append(line);
  svg.querySelector("text").textContent = `${chart.x}: ${number(end)}`;
  for (const [one, [, value]] of at) {
    const shownValue = [...svg.parentElement.querySelectorAll(".legend b")].find((b) => b.dataset.label === one.label);
    if (one.label && shownValue) shownValue.textContent = ` ${valued(chart, value)}`;
  }
}

function lanes(chart, width) {
  const bars = chart.lanes.flatMap((lane) => lane.bars);
  const top = 4, height = top + LANE * chart.lanes.length + BOTTOM;
  const left = Math.min(width / 3, 12 + 1.1 * LETTER * Math.max(...chart.lanes.map((lane) => lane.label.length)));
  const svg = frame(chart, width, height, left);
  const span = range(bars.flat(), bars.length ? bars[0][0] : 0);
  const [x, ticks] = axis(span, left, width - RIGHT - 4, false, (width - left) / 90);
  for (const tick of ticks)
    svg.append(shape("path", { d: `M${x(tick)} ${top}V${height - BOTTOM}`, class: "line", stroke: "currentColor" }));
  xTicks(svg, ticks, x, width, height);
  chart.lanes.forEach((lane, index) => {
    const y = top + LANE * (index + 0.5), shade = color(lane.color);
    const name = shape("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, cut(lane.label, Math.floor((left - 6) / LETTER)));
    name.append(shape("title", {}, lane.label));
    svg.append(name);
    for (const [begin, end] of lane.bars)
      svg.append(shape("rect", {
        x: x(begin), y: y - LANE / 3, width: Math.max(1.5, x(end) - x(begin)), height: (2 * LANE) / 3, class: shade, fill: "currentColor", "fill-opacity": 0.35,
      }));
    for (const dot of lane.dots) svg.append(shape("circle", { cx: x(dot), cy: y, r: 2, class: shade, fill: "currentColor" }));
    const [mark, markColor] = MARKS[lane.end] || [];
    if (mark)
      svg.append(shape("text", { x: x(last(lane.bars)[1]), y: y + 5, "text-anchor": "middle", class: `mark ${markColor}` }, mark));
  });
  return svg;
}

function figure(section, chart, width, inCommon) {
  const svg = chart.lanes.length ? lanes(chart, width) : curves(section, chart, width, inCommon);
  const caption = element("figcaption", "", legend(section, chart), element("div", chart.about));
  return element("figure", "", element("h3", chart.title), svg, caption);
}

// Long names may break behind an underscore.
const breakable = (text) => text.split("_").flatMap((part, index) => (index ? ["_", element("wbr"), part] : [part]));

function facts(values, kind) {
  const list = element("dl");
  if (kind) list.className = kind;
  for (const [name, value] of Object.entries(values)) {
    const [result, ...more] = kind === "main" ? value.split(/(?= ± |, )/) : [];
    const shownAs = name === "command" ? [element("code", value)]
      : more.length ? [result, ...more.map((text) => element(text.startsWith(",") ? "i" : "small", text.replace(/^, /, "")))]
      : breakable(value);
    const fact = element("dd", "", ...shownAs);
    fact.dataset.fact = name;
    const pair = element("div", "", element("dt", name), fact);
    if (kind === "main" && !more.length && value.length > 18) pair.className = "long";
    else if (!kind && value.length > 34) pair.className = "wide";
    list.append(pair);
  }
  return list;
}

function dot(index) {
  const svg = shape("svg", { width: 12, height: 12 });
  svg.append(shape("circle", { cx: 6, cy: 6, r: 5, class: color(index), fill: "currentColor" }));
  return svg;
}

function table({ columns, rows, colors, meanings }) {
  const head = element("tr", "", ...columns.map((name) => element("th", "", ...breakable(name))));
  columns.forEach((name, index) => { if (meanings[name]) head.children[index].title = meanings[name]; });
  const body = rows.map((row, index) => {
    const cells = row.map((cell, column) => element("td", "", ...(column ? [cell] : breakable(cell))));
    if (colors.length) cells[0].prepend(dot(colors[index]));
    return element("tr", "", ...cells);
  });
  const made = element("table", "", element("thead", "", head), element("tbody", "", ...body));
  return classed("table", element("div", "", made));
}

function sample({ prompt, text }) {
  return element("blockquote", "", element("b", prompt), text);
}

function content(one, width, inCommon) {
  const made = one.headline ? [classed("lead", element("p", one.headline))] : [];
  made.push(...one.notes.map((text) => element("p", text)));
  const large = one.main.filter((name) => name in one.facts);
  if (large.length) made.push(facts(Object.fromEntries(large.map((name) => [name, one.facts[name]])), "main"));
  const rest = Object.entries(one.facts).filter(([name]) => !large.includes(name));
  if (!large.length && rest.length) made.push(facts(one.facts));
  if (one.table && one.table.rows.length && one.table.colors.length) made.push(table(one.table));
  if (Object.keys(one.setup).length) made.push(facts(one.setup, "setup"));
  const drawn = one.charts.filter((chart) => chart.lanes.length || chart.series.some((series) => series.points.length));
  if (drawn.length)
    made.push(classed("figures", element("div", "", ...drawn.map((chart) => figure(one, chart, width, inCommon)))));
  if (one.samples.length)
    made.push(element("h4", "The model writes"), classed("samples", element("div", "", ...one.samples.map(sample))));
  if (one.table && one.table.rows.length && !one.table.colors.length) made.push(table(one.table));
  if (large.length && rest.length) made.push(folded(`${one.title}\nall numbers`, false,
    element("summary", "All other numbers"), () => [facts(Object.fromEntries(rest))]));
  return made;
}

// Details whose content is made when it is first seen; what was opened or closed stays so when there is news.
function folded(name, isOpen, head, make) {
  const made = element("details", "", head);
  made.open = unfolded.has(name) ? unfolded.get(name) : isOpen;
  const fill = () => made.childElementCount > 1 || made.append(...make());
  if (made.open) fill();
  made.addEventListener("toggle", () => {
    unfolded.set(name, made.open);
    if (made.open) fill();
  });
  return made;
}

function section(one, width, inCommon) {
  const title = element("h2", one.title);
  if (one.color >= 0) title.prepend(dot(one.color));
  const head = element("summary", "", title);
  if (one.standing) head.append(classed("state", element("span", one.standing)));
  if (one.eta) head.append(classed("eta", element("span", `ETA ${one.eta}`)));
  if (one.part !== null && one.part < 1) {
    const bar = element("progress");
    bar.value = one.part;
    bar.setAttribute("aria-label", "the share of the run that is over");
    head.append(bar);
  }
  return folded(one.title, one.is_open, head, () => content(one, width, inCommon));
}

const main = document.querySelector("main"), note = document.getElementById("note");
const shown = document.getElementById("shown"), common = document.getElementById("common");
const unfolded = new Map(), hidden = new Set();
let page = { sections: [], note: "", date: "" };

function draw() {
  const whole = main.clientWidth, focused = document.activeElement.dataset.key;
  const columns = Math.max(1, Math.floor((whole + GAP) / (COLUMN + GAP)));
  const width = Math.floor((whole - GAP * (columns - 1)) / columns);
  note.textContent = [page.note, page.date].filter(Boolean).join("; ");
  const withCurves = page.sections.filter((one) => one.charts.some((chart) => chart.is_history));
  shown.parentElement.hidden = !withCurves.length;
  common.parentElement.hidden = withCurves.length < 2;
  const inCommon = commonEnds();
  main.replaceChildren(...page.sections.map((one) => section(one, width, inCommon)));
  if (focused) [...main.querySelectorAll("button")].find((one) => one.dataset.key === focused)?.focus();
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
for (const control of [shown, common]) control.addEventListener("change", draw);
const frozen = document.getElementById("content");
if (frozen) {
  page = JSON.parse(frozen.textContent);
  draw();
} else look();

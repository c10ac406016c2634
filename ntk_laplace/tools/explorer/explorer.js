"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const make = (tag, text, attributes = {}) => {
  const element = document.createElement(tag);
  if (text !== undefined && text !== null) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
};
const order = (size) => Math.floor(Math.log10(size));
// three digits, of the number or of the range of the numbers beside it, if there is one, and those before the point
const number = (value, spread = 0) => {
  if (value === null || value === undefined) return "not finite";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  const close = size > spread && spread > 1e-12 * size;
  const digits = Math.max(3 + (close ? order(size) - order(spread) : 0), size < 1e5 ? order(size) + 1 : 0);
  const short = Number.isInteger(value) ? String(value)
    : size < 1e-3 || (size >= 1e5 && digits <= order(size) + 1) ? value.toExponential(digits - 1)
      : String(Number(value.toPrecision(digits)));
  return short.replace("-", "−").replace("e-", "e−");
};
// of each output or target: one alone, or with their names if there are several
const responses = (values, words) => {
  const all = [values].flat();
  return all.map((value, i) => {
    const name = all.length > 1 && all.length === data.names.length ? `${data.names[i]} ` : "";
    return name + (value === null ? "missing" : words(value, i));
  }).join(", ");
};
const response = (value, i) => number(value, data.spreads.responses[i]);
const sizes = (deviations) => responses(deviations, (value) => number(value));
const means = (mean) => responses(mean, response);
const uncertain = ({ mean, deviation }) => responses(mean, (value, i) => `${response(value, i)} ± ${number(deviation[i])}`);
// what people type has hyphens where numbers have minus signs
const plain = (words) => words.toLowerCase().replaceAll("−", "-");
const signed = (value, spread) => (value > 0 ? "+" : value < 0 ? "−" : "") + number(Math.abs(value), spread);
const percent = (value) => (100 * value).toFixed(value > 0.999 || value < 0.001 ? 2 : 1) + " %";
const classes = data.kind !== "values";
// its name before a number, unless each of several has its own
const target = data.names.length > 1 && data.names.length === data.spreads.responses.length ? "" : `${data.targetName} `;
const nameOf = (truth) => (classes && Number.isInteger(truth) && truth in data.names ? data.names[truth] : means(truth));
const targetOf = (j) => (data.training.target[j] === null ? "missing" : nameOf(data.training.target[j]));
const inputName = (i) => (data.inputNames ? data.inputNames[i] : `#${i}`);
const trainingName = (j) => (data.trainingNames ? data.trainingNames[j] : `#${j}`);
// the one that has this name, or all with these words
function search(count, name, words, text) {
  const wanted = plain(text.trim()), all = Array.from({ length: count }, (_, i) => i);
  const named = all.filter((i) => plain(name(i)) === wanted);
  return named.length ? named : all.filter((i) => wanted.split(/\s+/).every((word) => plain(words(i)).includes(word)));
}
// what the removal effects are measured in
const unit = (point) => (classes ? `the logit of ${data.names[point.output]}` : data.names[point.output]);

// --- pictures and rows

function picture(sheet, slot, size, words) {
  const scale = size / Math.max(sheet.width, sheet.height);
  const element = make("span", null, { class: "picture", role: "img", "aria-label": words });
  const column = slot % sheet.columns, row = Math.floor(slot / sheet.columns);
  Object.assign(element.style, {
    width: `${sheet.width * scale}px`, height: `${sheet.height * scale}px`, backgroundImage: `url(${sheet.source})`,
    backgroundSize: `${sheet.width * sheet.columns * scale}px ${sheet.height * sheet.rows * scale}px`,
    backgroundPosition: `${-column * sheet.width * scale}px ${-row * sheet.height * scale}px`,
  });
  return element;
}
const pointPicture = (i, size) => (data.pictures ? picture(data.pictures.points, i, size, `input ${inputName(i)}`) : null);
const slots = data.pictures && data.pictures.training
  ? new Map(data.pictures.training.indices.map((index, slot) => [index, slot])) : new Map();
const trainingPicture = (j, size) =>
  slots.has(j) ? picture(data.pictures.training, slots.get(j), size, `training point ${trainingName(j)}`) : null;

const isNumber = (value) => typeof value === "number";
const valueOf = (value, i) => `${data.rows.features[i]} ${value === null ? "missing" : number(value, data.rows.spreads[i])}`;
const features = (values) => values.map(valueOf).join(", ") + (data.rows.others ? `, and ${data.rows.others} of less relevance` : "");
// relative to the range of the feature, whose units differ
const gap = (one, other, i) => (one === other ? 0 : isNumber(one) && isNumber(other) ? Math.abs(one - other) / data.rows.spreads[i] : 1);
const rows = data.rows ? [...data.rows.points, ...Object.values(data.rows.training || {})] : [];
const varies = data.rows ? data.rows.features.map((_, i) => rows.some((row) => row[i] !== rows[0][i])) : [];
// the features that are closest, of those that vary, within a quarter of their range
function alike(values, other) {
  const close = values.map((value, i) => ({ words: valueOf(value, i), gap: gap(value, other[i], i) }))
    .filter((feature, i) => varies[i] && feature.gap <= 0.25).sort((a, b) => a.gap - b.gap).slice(0, 4);
  return close.length ? `alike in ${close.map((feature) => feature.words).join(", ")}` : "alike in none of its values";
}

// --- the list of inputs

let selected = 0;
let visible = data.points.map((_, i) => i);
const said = (point) => (classes ? `${data.names[point.output]}, ${percent(point.prediction.probabilities[point.output])}`
  : uncertain(point.prediction));
const isWrong = (point) => classes && point.target !== undefined && point.target !== point.output;
const inWords = (i) => {
  const point = data.points[i];
  const truth = point.target === undefined ? "" : ` truth ${nameOf(point.target)}`;
  return `${inputName(i)} ${said(point)}${truth}${isWrong(point) ? " wrong" : ""}`;
};

function list() {
  visible = search(data.points.length, inputName, inWords, at("find").value);
  const items = visible.map((i) => {
    const point = data.points[i];
    const item = make("li", null, { role: "option", id: `point-${i}`, "aria-selected": String(i === selected) });
    const image = pointPicture(i, 40);
    if (image) item.append(image);
    const words = make("span");
    words.append(make("b", `${inputName(i)}: `), said(point));
    if (isWrong(point)) words.append(" ", make("span", `wrong, truth ${nameOf(point.target)}`, { class: "wrong" }));
    item.append(words);
    item.addEventListener("click", () => select(i));
    return item;
  });
  at("points").replaceChildren(...items);
  at("found").textContent = `${visible.length} of ${data.points.length} inputs`;
  at("points").setAttribute("aria-activedescendant", visible.includes(selected) ? `point-${selected}` : "");
}

function select(i) {
  selected = i;
  for (const item of at("points").children) item.setAttribute("aria-selected", String(item.id === `point-${i}`));
  at("points").setAttribute("aria-activedescendant", `point-${i}`);
  const item = at(`point-${i}`);
  if (item) item.scrollIntoView({ block: "nearest" });
  history.replaceState(null, "", `#${i}`);
  document.querySelector("input[name=leave][value=none]").checked = true;
  show();
}

if (!classes) document.querySelector("label[for=find]").textContent = "Find by number, name or prediction";
at("find").addEventListener("input", list);
at("points").addEventListener("keydown", (event) => {
  const place = visible.indexOf(selected), last = visible.length - 1;
  const to = { ArrowDown: Math.min(place + 1, last), ArrowUp: Math.max(place - 1, 0), Home: 0, End: last,
               PageDown: Math.min(place + 8, last), PageUp: Math.max(place - 8, 0) }[event.key];
  if (to === undefined || last < 0) return;
  event.preventDefault();
  select(visible[to]);
});

// --- one input

function bars(probabilities, other) {
  const box = make("div", null, { class: "bars" });
  const order = probabilities.map((_, c) => c).sort((a, b) => probabilities[b] - probabilities[a]).slice(0, 6);
  for (const c of order) {
    const track = make("div", null, { class: "track", "aria-hidden": "true" });
    const fill = make("div", null, { class: "fill" });
    fill.style.width = `${100 * probabilities[c]}%`;
    track.append(fill);
    const beside = other ? ` (${percent(other[c])})` : "";
    box.append(make("span", data.names[c], { class: "name" }), track, make("span", percent(probabilities[c]) + beside, { class: "value" }));
  }
  return box;
}

function prediction(point) {
  const box = at("prediction");
  box.replaceChildren();
  const head = make("div", null, { class: "head" });
  const image = pointPicture(selected, 112);
  if (image) head.append(image);
  const words = make("div");
  const truth = point.target === undefined ? "" : ` The truth is ${nameOf(point.target)}.`;
  if (classes) {
    const p = point.prediction.probabilities[point.output], q = point.network.probabilities[point.output];
    words.append(make("p", `${data.names[point.output]} with probability ${percent(p)}; the network alone says ${percent(q)}.${truth}`));
  } else {
    const { epistemic, aleatoric } = point.prediction;
    const parts = epistemic ? ` (of the model ${sizes(epistemic)}; of the data ${sizes(aleatoric)})` : "";
    const interval = point.prediction.interval;
    const inside = interval ? `; 90 % interval ${responses(interval[0], (low, i) => `${response(low, i)} to ${response(interval[1][i], i)}`)}` : "";
    words.append(make("p", `${target}${uncertain(point.prediction)}${parts}${inside}.${truth}`));
  }
  if (data.rows) words.append(make("p", features(data.rows.points[selected]), { class: "soft" }));
  head.append(words);
  if (classes) {
    const right = make("div");
    right.append(make("p", "Probabilities, the network's own in brackets", { class: "soft" }));
    right.append(bars(point.prediction.probabilities, point.network.probabilities));
    head.append(right);
  }
  box.append(head);
}

function decomposition(point) {
  const total = point.f[data.kind === "classes" ? point.output : Math.min(point.output, point.f.length - 1)];
  // which points pull which way is known where every contribution is; their sum is known everywhere
  const whole = point.total !== undefined;
  const middle = whole ? [["all points", point.total]] : [["points for", point.plus], ["points against", point.minus]];
  const steps = [["offset", point.offset], ...middle, ["gap", point.gap]];
  const height = 10 + 32 * (steps.length + 1);
  const origin = data.origins ? data.origins[point.output] : 0;  // where bars begin
  let sum = 0;
  const ends = [origin];
  for (const [, value] of steps) { sum += value; ends.push(sum); }
  const low = Math.min(...ends), high = Math.max(...ends), left = 116;
  const width = Math.max(300, Math.min(640, at("decomposition").clientWidth - 34));  // letters keep their size on a phone
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const spread = data.spreads.outputs[point.output];
  const told = (name, value) => (name === "prediction" || (name === "offset" && data.origins) ? number(value, spread)
    : signed(value, name === "gap" ? 0 : spread));
  const words = steps.map(([name, value]) => `${name} ${told(name, value)}`).join(", ");
  const longest = Math.max(...[...steps, ["prediction", total]].map(([name, value]) => told(name, value).length));
  const x = (value) => left + (value - low) / (high - low || 1) * (width - left - Math.max(86, 16 + 9 * longest));
  for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `${words}; together ${told("prediction", total)}` })) svg.setAttribute(name, value);
  svg.style.maxWidth = `${width}px`;
  const draw = (tag, attributes, text) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    svg.append(element);
  };
  draw("line", { x1: x(origin), x2: x(origin), y1: 4, y2: height - 4, stroke: "var(--neutral)" });
  [...steps, ["prediction", total]].forEach(([name, value], row) => {
    const [start, end] = name === "prediction" ? [origin, total] : ends.slice(row);
    const color = name === "prediction" ? "var(--accent)" : name === "points for" || (name === "all points" && value > 0)
      ? "var(--for)" : name === "points against" || name === "all points" ? "var(--against)" : "var(--neutral)";
    draw("rect", { x: Math.min(x(start), x(end)), y: 8 + 32 * row, height: 20, rx: 2, fill: color,
                   width: Math.max(1, Math.abs(x(end) - x(start))) });
    draw("text", { x: left - 12, y: 23 + 32 * row, "text-anchor": "end" }, name);
    draw("text", { x: Math.max(x(start), x(end)) + 6, y: 23 + 32 * row }, told(name, value));
  });
  at("decomposition").replaceChildren(make("h2", `Where ${unit(point)} comes from`), svg, make("p",
    "Offset: what the linearized network says at the prior mean. " + (whole ? "All points: the sum of all training points' " +
    "contributions" : "Points for and against: the sums of all training points' contributions") + (data.atOptimum
    ? ", at the optimum of the linearized network. Gap: from there to the network."
    : ". Gap: how far the weights are from an optimum.") + (data.origins ? ` The line is at ${number(origin, spread)}, the mean of the targets.` : ""),
    { class: "soft" }));
}

function side(name, point) {
  const box = at(`side-${name}`);
  const items = point[name].map(([j, effect, share]) => {
    const item = make("li");
    const image = trainingPicture(j, 48);
    if (image) item.append(image);
    const words = make("div");
    words.append(make("b", `${trainingName(j)}, ${classes ? "class " : target}${targetOf(j)}`));
    words.append(make("div", `removing it ${effect < 0 ? "lowers" : "raises"} ${unit(point)} by ${number(Math.abs(effect))}; contribution ${signed(share)}`));
    if (data.rows && data.rows.training) {
      words.append(make("div", alike(data.rows.training[j], data.rows.points[selected]), { class: "soft" }));
    }
    if (data.training.leverage[j] > data.flag) {
      words.append(make("div", `leverage ${number(data.training.leverage[j])}: ${
        data.approximate ? "the effect is of first order alone" : "too near 1 for one step to be trusted"}`, { class: "flag" }));
    }
    item.append(words);
    return item;
  });
  const title = name === "for" ? "Speak for it" : "Speak against it";
  const list = make("ol");
  list.append(...items);
  box.replaceChildren(make("h3", title), items.length ? list : make("p", "No training point does.", { class: "soft" }));
}

// by the network itself, if it was asked for
function again(point) {
  const box = at("again-rows");
  if (!box) return;
  at("again-unit").textContent = `Changes of ${unit(point)} if the point is left out.`;
  box.replaceChildren(...point.reranked.map(([j, linear, moving, before, disagrees, away, unfinished], place) => {
    const line = make("tr"), head = make("th", null, { scope: "row" }), image = trainingPicture(j, 32);
    if (image) head.append(image, " ");
    head.append(trainingName(j));
    const notes = [away && "does not come back", unfinished && "not at an optimum", disagrees && "disagree"].filter(Boolean);
    line.append(head, make("td", targetOf(j)), make("td", signed(linear)), make("td", String(before + 1)),
      make("td", signed(moving)), make("td", String(place + 1)), make("td", notes.join(", "), { class: notes.length ? "flag" : "" }));
    return line;
  }));
}

function whatIf() {
  const point = data.points[selected];
  const choice = document.querySelector("input[name=leave]:checked").value;
  const answer = at("answer");
  if (choice === "none") {
    answer.replaceChildren(make("p", "Choose a group to see the network's answer without it.", { class: "soft" }));
    return;
  }
  const count = choice === "both" ? point.for.length + point.against.length : point[choice].length;
  const now = point.without[choice];
  if (classes) {
    const output = point.output;
    const best = now.probabilities.indexOf(Math.max(...now.probabilities));
    const turn = best === output ? "The prediction stays." : `The prediction turns to ${data.names[best]}.`;
    answer.replaceChildren(
      make("p", `Without these ${count}: the network says ${data.names[output]} with ${percent(now.probabilities[output])} instead of ${percent(point.network.probabilities[output])}. ${turn}`),
      bars(now.probabilities, point.network.probabilities));
  } else {
    const change = (value, i) => `${response(value, i)} instead of ${response(point.network.mean[i], i)}`;
    answer.replaceChildren(make("p", `Without these ${count}: ${target}${responses(now.mean, change)}.`));
  }
  if (now.moving !== undefined) {
    const { probabilities, mean, away, unfinished } = now.moving;
    const said = classes ? `${data.names[point.output]} with ${percent(probabilities[point.output])}` : `${target}${means(mean)}`;
    const notes = (away ? " If they are put back, it does not come back." : "") + (unfinished ? " It is not at an optimum." : "");
    answer.append(make("p", `The network itself, at its own optimum without them, says ${said}.${notes}`));
  }
  if (now.held !== undefined) {
    answer.append(make("p", `Together they have a leverage of ${number(now.held)} in this approximate posterior: the change is of first order alone.`, { class: "flag" }));
  }
}

function show() {
  const point = data.points[selected];
  at("which").textContent = `Input ${data.inputNames ? data.inputNames[selected] : selected}`;
  prediction(point);
  decomposition(point);
  side("for", point);
  side("against", point);
  again(point);
  whatIf();
  if (data.sources) sources(point);
}
window.addEventListener("resize", () => decomposition(data.points[selected]));
for (const input of document.querySelectorAll("input[name=leave]")) input.addEventListener("change", whatIf);

// --- the training set

const columns = [
  { title: "Training point", value: (j) => j, words: trainingName },
  { title: classes ? "Class" : "Target", value: (j) => data.training.target[j], words: targetOf },
  { title: "Predicted by the others", value: (j) => data.training.without[j], words: (j) => nameOf(data.training.without[j]) },
  { title: "Log density by the others", value: (j) => data.training.logDensity[j], words: (j) => number(data.training.logDensity[j]) },
  { title: "Leverage", value: (j) => data.training.leverage[j], words: (j) => number(data.training.leverage[j]) },
  { title: "Self-influence", value: (j) => data.training.selfInfluence[j], words: (j) => number(data.training.selfInfluence[j]) },
  { title: "Information", value: (j) => data.training.information[j], words: (j) => number(data.training.information[j]) },
];
let sorted = { column: 3, down: false }, most = 25;

function head() {
  at("columns").replaceChildren(...columns.map((column, index) => {
    const cell = make("th", null, { scope: "col" });
    if (index === sorted.column) cell.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
    const button = make("button", column.title, { type: "button" });
    button.addEventListener("click", () => {
      sorted = { column: index, down: index === sorted.column ? !sorted.down : false };
      head();
      body();
      at("columns").children[index].firstChild.focus();
    });
    cell.append(button);
    return cell;
  }));
}

function body() {
  const inWords = (j) => columns.map((column) => column.words(j)).join(" ");
  const lines = search(data.examples, trainingName, inWords, at("search").value);
  const own = columns[sorted.column].value, output = data.points[selected].output;
  const value = (j) => (Array.isArray(own(j)) ? own(j)[output] ?? null : own(j));  // of several that which is explained
  const order = (a, b) => (a === b ? 0 : a === null ? 1 : b === null ? -1 : a < b ? -1 : 1);
  lines.sort((a, b) => (sorted.down ? -1 : 1) * order(value(a), value(b)) || a - b);
  at("rows").replaceChildren(...lines.slice(0, most).map((j) => {
    const line = make("tr");
    columns.forEach((column, index) => {
      const cell = make(index ? "td" : "th", null, index ? {} : { scope: "row" });
      const image = index ? null : trainingPicture(j, 32);
      if (image) cell.append(image, " ");
      cell.append(column.words(j));
      line.append(cell);
    });
    return line;
  }));
  at("shown").textContent = `${Math.min(most, lines.length)} of ${lines.length} training points, of ${data.examples} in all`;
  at("more").hidden = lines.length <= most;
}
at("search").addEventListener("input", () => { most = 25; body(); });
at("more").addEventListener("click", () => { most += 100; body(); });

const asked = Number(location.hash.slice(1));
if (location.hash && asked in data.points) selected = asked;
list();
show();
head();
body();

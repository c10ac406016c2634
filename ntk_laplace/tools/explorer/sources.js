
// --- sources

function sourceColumns(point) {
  const { names, points, own, without } = data.sources, found = point.sources;
  const after = (s) => (classes
    ? percent(found.p[s]) + (found.best[s] === point.output ? "" : `, turns to ${data.names[found.best[s]]}`)
    : means(found.mean[s]));
  const shown = [
    ["Source", (s) => names[s] + (data.sources.converged[s] ? "" : " (not converged)")],
    ["Points", (s) => number(points[s])],
    ["Effect of leaving it out", (s) => signed(found.effect[s])],
    ["Sum of single effects", (s) => signed(found.single[s])],
    [classes ? `Probability of ${data.names[point.output]} without it` : `${target || "prediction "}without it`, after],
  ];
  if (found.truth) shown.push(["Change of log p of the truth", (s) => signed(found.truth[s])]);
  return [...shown, ["Own log p with it", (s) => number(own[s])], ["Own log p without it", (s) => number(without[s])]];
}

function sources(point) {
  const found = point.sources, shown = sourceColumns(point);
  const order = found.effect.map((_, s) => s).sort((a, b) => Math.abs(found.effect[b]) - Math.abs(found.effect[a]) || a - b);
  const most = Math.abs(found.effect[order[0]]) || 1;
  const now = classes ? percent(point.network.probabilities[point.output]) : means(point.network.mean);
  at("source-caption").textContent = `Change of ${unit(point)} of input ${data.inputNames ? data.inputNames[selected] : selected}, largest first. With all sources the ` +
    `network says ${now}. log p is in nats.`;
  at("source-columns").replaceChildren(...shown.map(([title]) => make("th", title, { scope: "col" })));
  at("source-rows").replaceChildren(...order.map((s) => {
    const line = make("tr");
    shown.forEach(([, words], index) => {
      const cell = make(index ? "td" : "th", words(s), index ? {} : { scope: "row" });
      if (index === 2) {
        const bar = make("div", null, { class: found.effect[s] < 0 ? "effect for" : "effect against", "aria-hidden": "true" });
        bar.style.width = `${100 * Math.abs(found.effect[s]) / most}%`;
        cell.append(bar);
      }
      line.append(cell);
    });
    return line;
  }));
  at("source-promises").replaceChildren(...data.sources.guarantees.map((words) => make("li", words)));
}

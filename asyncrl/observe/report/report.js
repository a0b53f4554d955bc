// Draws the page's charts by uPlot. The legend has the values under the pointer; drag to zoom, double-click for all.
"use strict";

function number(value) {
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function tick(value) {
  const size = Math.abs(value), exact = Number(value.toPrecision(12));
  return size !== 0 && (size < 1e-4 || size >= 1e9) ? exact.toExponential() : exact.toLocaleString("en", { maximumFractionDigits: 12 });
}

// Rows of x with the place of each curve's point. A curve may have several points at one x, each in a row of its own.
function rowsOf(curves) {
  const rows = new Map();
  curves.forEach((curve, which) => {
    let again = 0;
    curve.x.forEach((x, place) => {
      again = place && x === curve.x[place - 1] ? again + 1 : 0;
      const key = `${x} ${again}`;
      if (!rows.has(key)) rows.set(key, { x, again, places: [] });
      rows.get(key).places[which] = place;
    });
  });
  return [...rows.values()].sort((a, b) => a.x - b.x || a.again - b.again);
}

// Distances of ticks among steps and versions.
const WHOLE = [0, 1, 2, 3, 4, 5, 6, 7, 8].flatMap((power) => [1, 2, 5].map((factor) => factor * 10 ** power));

// Bars of these widths, each centred on its x and as high as its value.
const bars = (widths) => (plot, which, first, last) => {
  const fill = new Path2D(), bottom = plot.valToPos(0, "y", true);
  for (let at = first; at <= last; at++) {
    const [x, y] = [plot.data[0][at], plot.data[which][at]];
    const [left, right] = [x - widths[at] / 2, x + widths[at] / 2].map((edge) => plot.valToPos(edge, "x", true));
    const top = plot.valToPos(y, "y", true);
    fill.rect(left, top, right - left, bottom - top);
  }
  return { stroke: null, fill, clip: null, band: null, gaps: null, flags: 0 };
};

function draw(figure) {
  const { stack, widths, zero, shares, unit, across, height, ...panel } = JSON.parse(figure.dataset.chart);
  const isTime = panel.origin !== null, rows = rowsOf(panel.curves);
  const tops = panel.curves.map((curve) => [...curve.y]);
  if (stack) for (let at = 1; at < tops.length; at++) tops[at] = tops[at].map((y, place) => y + tops[at - 1][place]);
  // The last curve of a stack has the highest tops: it is drawn first, and the others over it.
  const order = panel.curves.map((_, which) => (stack ? panel.curves.length - 1 - which : which));
  const places = (which) => rows.map((row) => row.places[which]);
  const x = rows.map((row) => row.x + (panel.origin ?? 0)), [first, last] = [x[0], x[x.length - 1]];
  // The margin keeps the border from cutting a dot.
  const margin = (last - first) / 100 || (Math.abs(first) / 10 || 1) * !widths.length;
  const edges = [first - (widths[0] / 2 || margin), last + (widths[widths.length - 1] / 2 || margin)];
  const clock = (seconds, from, to) => new Date(1000 * seconds).toISOString().slice(from, to).replace("T", " ");
  const axis = (label, size, space, values) => ({
    label, size, space, values, labelSize: 18, labelFont: "11px system-ui", font: "11px system-ui", stroke: "#555", grid: { stroke: "#eee", width: 1 }, ticks: { show: false },
  });
  const series = order.map((which) => {
    const { name, colour, marks, notes, y } = panel.curves[which], place = places(which);
    const value = (plot, _, __, at) => {
      if (at === null || place[at] === undefined) return "–";
      const note = notes[place[at]], shown = y[place[at]];
      return (shares ? `${(100 * shown).toFixed(1)} %` : number(shown)) + (note ? `, ${note}` : "");
    };
    return {
      label: name, stroke: stack ? undefined : colour, fill: stack ? colour : undefined, value, width: stack ? 0 : 1.7, spanGaps: true,
      dash: marks === "dashes" ? [6, 4] : undefined,
      paths: stack === "bars" ? bars(widths) : marks === "dots" ? () => null : undefined,
      points: { show: !stack && (marks.includes("dots") || y.length === 1), size: 6, width: 0, fill: colour },
    };
  });
  const plot = new uPlot({
    width: figure.clientWidth || 600, height,
    tzDate: (seconds) => uPlot.tzDate(new Date(1000 * seconds), "Etc/UTC"),
    // A curve without a value at the pointer's x shows none, not its nearest one.
    cursor: { y: false, dataIdx: (_, __, at) => at },
    legend: { markers: { width: 0, fill: (_, at) => panel.curves[order[at - 1]].colour } },
    scales: {
      x: { time: isTime, range: (_, low, high) => (low === first && high === last ? edges : [low, high]) },
      y: { range: (_, low, high) => (shares ? [0, 1] : uPlot.rangeNum(zero || stack ? Math.min(0, low) : low, zero || stack ? Math.max(0, high) : high, 0.05, zero)) },
    },
    axes: [
      { incrs: isTime ? undefined : WHOLE, ...axis(across, 30, 80, (_, splits) => splits.map((at) => !isTime ? tick(at) : last - first > 86400 ? clock(at, 5, 16) : last - first < 600 ? clock(at, 11, 19) : clock(at, 11, 16))) },
      axis(unit, 58, 30, (_, splits) => splits.map((at) => (shares ? `${Math.round(100 * at)}%` : tick(at)))),
    ],
    series: [{ label: across, value: (_, at, __, place) => (place === null ? "–" : isTime ? clock(at, 0, 19) : number(at)) }, ...series],
  }, [x, ...order.map((which) => places(which).map((place) => (place === undefined ? undefined : tops[which][place])))], figure);
  figure.classList.toggle("stacked", Boolean(stack));
  new ResizeObserver(() => plot.setSize({ width: figure.clientWidth, height })).observe(figure);
}

document.querySelectorAll("figure.chart").forEach(draw);

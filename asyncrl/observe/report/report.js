// Says the values under the pointer, and zooms: drag over a stretch of a chart, double-click for all of it.
"use strict";

function number(value) {
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle; else high = middle;
  }
  return Math.abs(sorted[low] - value) <= Math.abs(sorted[high] - value) ? sorted[low] : sorted[high];
}

for (const chart of document.querySelectorAll("figure.chart")) {
  const told = JSON.parse(chart.dataset.told);
  const [plot, pad, cursor, tip] = [".plot", ".pad", ".cursor", ".tip"].map((each) => chart.querySelector(each));
  const [left, width] = ["x", "width"].map((name) => Number(pad.getAttribute(name)));
  const height = Number(pad.getAttribute("height"));
  const all = [...new Set(told.curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const byX = told.curves.map((curve) => new Map(curve.x.map((x, index) => [x, [curve.y[index], curve.notes[index]]])));
  const clock = (x, from, to) => new Date(1000 * (told.origin + x)).toISOString().slice(from, to).replace("T", " ");
  const labels = [...chart.querySelectorAll("text.x")].map((label) => [label, label.textContent]);
  let [low, high] = told.x, begun = null;

  const share = (event) => {
    const box = pad.getBoundingClientRect();
    return Math.max(0, Math.min(1, (event.clientX - box.left) / box.width));
  };

  function mark(from, to) {
    cursor.setAttribute("x", left + from * width);
    cursor.setAttribute("width", Math.max(1, (to - from) * width));
  }

  function show(from, to) {
    const [first, last] = told.x, scale = width / (last - first);
    [low, high] = [from, to];
    plot.setAttribute("viewBox", `${(from - first) * scale} 0 ${(to - from) * scale} ${height}`);
    for (const [label, whole] of labels) {
      const x = from + Number(label.dataset.at) * (to - from);
      label.textContent = from === first && to === last ? whole : told.origin === null ? number(x) : clock(x, 11, 19);
    }
    chart.classList.toggle("zoomed", from !== first || to !== last);
  }

  function say(event) {
    const x = nearest(all, low + share(event) * (high - low)), at = (x - low) / (high - low);
    if (at < 0 || at > 1) return;
    mark(at, at);
    tip.replaceChildren(...[told.origin === null ? `${told.across} ${number(x)}` : clock(x, 0, 19)]);
    told.curves.forEach((curve, index) => {
      const [value, note] = byX[index].get(x) ?? [];
      if (value === undefined || (told.shares && value === 0)) return;
      const line = document.createElement("div"), dot = document.createElement("i");
      dot.style.background = curve.colour;
      line.append(dot, `${curve.name} ${told.shares ? (100 * value).toFixed(1) + " %" : number(value)}`, note ? `, ${note}` : "");
      tip.append(line);
    });
    const box = chart.getBoundingClientRect(), right = event.clientX - box.left > box.width / 2;
    tip.style.left = right ? "auto" : `${event.clientX - box.left + 14}px`;
    tip.style.right = right ? `${box.right - event.clientX + 14}px` : "auto";
    tip.style.top = `${event.clientY - box.top + 10}px`;
    tip.hidden = false;
  }

  pad.addEventListener("pointerdown", (event) => {
    begun = share(event);
    pad.setPointerCapture(event.pointerId);
  });
  pad.addEventListener("pointermove", (event) => {
    if (begun === null) return say(event);
    tip.hidden = true;
    mark(Math.min(begun, share(event)), Math.max(begun, share(event)));
  });
  pad.addEventListener("pointerup", (event) => {
    const [from, to] = [Math.min(begun, share(event)), Math.max(begun, share(event))];
    begun = null;
    mark(0, 0);
    cursor.setAttribute("width", 0);
    if (to - from > 0.01) show(low + from * (high - low), low + to * (high - low));
  });
  pad.addEventListener("pointerleave", () => {
    tip.hidden = true;
    if (begun === null) cursor.setAttribute("width", 0);
  });
  pad.addEventListener("dblclick", () => show(...told.x));
}

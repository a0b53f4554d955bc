"use strict";
/* The page of asyncrl-view. Its state, apart from a list of "same prompt", is in the fragment of the URL, so each view
   has a link. Data of a run becomes text nodes and attributes alone: no function here takes markup. */

const POLL_MS = 3000;
const PAGE = 100;
const SORTS = { reward: -1, length: -1, staleness: -1, surprise: -1, order: 0 };
const COLOURS = { logprob: "log-prob", entropy: "entropy", ratio: "ratio", drift: "drift", version: "version", role: "role" };
const OF_LEARNER = ["entropy", "ratio", "drift"];
const LEGENDS = {
    logprob: "green: certain; red: log-prob of -6 nats or less", entropy: "green: certain; red: entropy of 3 nats or more",
    ratio: "probability at training over that at sampling; blue: 2 or more, orange: 1/2 or less",
    drift: "difference of the two log-probs; red: 1 nat or more",
};
const embedded = document.getElementById("data") && JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
let shown = {};  // By part of the page, what it shows; a part is drawn again only if that changes.
let hits = null;  // The search or the prompt that the list of places is about.

// --- state ---

const state = () => Object.fromEntries(new URLSearchParams(location.hash.slice(1)));

function link(changes) {
    const next = { ...state(), ...changes };
    for (const key of Object.keys(next)) if (next[key] === null || next[key] === undefined || next[key] === "") delete next[key];
    return "#" + new URLSearchParams(next);
}

function go(changes) { location.hash = link(changes); }

// --- data ---

async function get(name, parameters) {
    const given = Object.entries(parameters).filter(([, value]) => value !== undefined && value !== "" && value !== null);
    const path = name + "?" + new URLSearchParams(given.map(([key, value]) => [key, String(value)]).sort());
    if (embedded) {
        if (!(path in embedded)) throw new Error("this page holds one step alone; asyncrl-view shows the others");
        return embedded[path];
    }
    const response = await fetch("api/" + path);
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.error);
    return answer;
}

// --- elements ---

function make(tag, fields, ...children) {
    const element = document.createElement(tag);
    for (const [key, value] of Object.entries(fields || {})) {
        if (key === "onclick") element.addEventListener("click", value);
        else if (value !== undefined && value !== false) element.setAttribute(key, value);
    }
    element.append(...children.filter(child => child !== null && child !== undefined).map(child => child instanceof Node ? child : String(child)));
    return element;
}

function fill(part, ...children) {
    // What had the focus gets it again.
    const focus = part.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    part.replaceChildren(...children.filter(Boolean));
    if (focus) [...part.querySelectorAll("a")].find(each => each.getAttribute("href") === focus)?.focus();
}

// Whole digits are never cut.
const number = (value, digits = 3) => value === null || value === undefined ? "–" : String(Math.abs(value) >= 1000 ? Math.round(value) : Number(value.toPrecision(digits)));

// --- steps ---

const WHOLE = [0, 1, 2, 3, 4, 5, 6].flatMap(power => [1, 2, 5].map(factor => factor * 10 ** power));

function chart(steps) {
    const rows = steps.filter(each => typeof each.reward === "number").reverse();
    if (rows.length < 2) return null;
    const element = make("div", null), { color } = getComputedStyle(document.body);
    const axis = (size, label) => ({ size, label, labelSize: 14, stroke: color, font: "11px system-ui", labelFont: "11px system-ui", grid: { width: 0.3, stroke: color }, ticks: { show: false } });
    const plot = new uPlot({
        width: 280, height: 120, legend: { show: false }, cursor: { y: false, drag: { x: false, click: () => {} } }, scales: { x: { time: false } },
        axes: [{ ...axis(22), incrs: WHOLE }, axis(44, "reward")], series: [{}, { stroke: "#3b6fb6", width: 1.5 }],
    }, [rows.map(each => each.step), rows.map(each => each.reward)], element);
    plot.over.addEventListener("click", () => go({ step: rows[plot.cursor.idx].step, uid: null, sample: null }));
    return element;
}

async function drawSteps(at) {
    const page = await get("steps", { run: at.run, until: at.until, count: PAGE });
    if (!changed("steps", [page, at.run, at.step, at.until])) return page;
    const head = make("tr", null, ...["step", "reward", "stale", "length", "failed"].map(name => make("th", { scope: "col" }, name)));
    const chosen = step => String(step) === at.step && { class: "chosen", "aria-current": "true" };
    const rows = page.steps.map(each => make("tr", chosen(each.step),
        make("td", null, make("a", { href: link({ step: each.step, uid: null, sample: null }) }, each.step)),
        make("td", null, number(each.reward)), make("td", null, number(each.staleness)), make("td", null, number(each.length)),
        make("td", { class: each.failures > 0 ? "bad" : undefined }, number(each.failures))));
    if (page.before === 0 && !embedded) rows.push(make("tr", chosen(0),
        make("td", null, make("a", { href: link({ step: 0, uid: null, sample: null }) }, 0)), make("td", { class: "weak", colspan: 4 }, "before training")));
    const jump = make("input", { type: "number", min: 0, placeholder: "step", "aria-label": "go to step", size: 6 });
    jump.addEventListener("change", () => go({ step: jump.value, until: Number(jump.value) + PAGE / 2, uid: null, sample: null }));
    const oldest = page.steps.length ? page.steps[page.steps.length - 1].step : 0;
    fill($("steps"), make("div", { class: "bar" }, make("span", null, page.count + " steps"), embedded ? null : jump),
        chart(page.steps), make("table", null, head, ...rows),
        make("div", { class: "bar" }, at.until ? make("a", { href: link({ until: null }) }, "newest") : null,
            page.before > 0 && !embedded ? make("a", { href: link({ until: oldest - 1 }) }, "older") : null));
    return page;
}

// --- groups ---

function sorted(trajectories, sort) {
    const sign = SORTS[sort];
    if (!sign) return trajectories;
    // Unknown values come last.
    return [...trajectories].sort((a, b) => (a[sort] === null) - (b[sort] === null) || sign * (a[sort] - b[sort]));
}

async function drawGroups(at) {
    const answer = await get("groups", { run: at.run, step: at.step });
    const sort = at.sort in SORTS ? at.sort : "reward";
    if (!changed("groups", [answer, at.run, at.uid, at.sample, sort])) return;
    const mean = group => { const known = group.trajectories.map(each => each[sort]).filter(value => value !== null); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null; };
    const groups = sorted(answer.groups.map(group => ({ group, [sort]: sort === "order" ? 0 : mean(group) })), sort).map(each => each.group);
    const chosen = make("select", { "aria-label": "sort by" }, ...Object.keys(SORTS).map(name => make("option", { value: name, ...(name === sort ? { selected: "" } : {}) }, name)));
    chosen.addEventListener("change", () => go({ sort: chosen.value }));
    const kinds = groups.map(group => make("section", { class: "group" },
        make("h3", null, group.title), group.prompt ? make("span", { class: "excerpt" }, group.prompt) : null,
        ...sorted(group.trajectories, sort).map(each => make("a", {
            class: "row" + (each.uid === at.uid && String(each.sample) === at.sample ? " chosen" : ""),
            href: link({ uid: each.uid, sample: each.sample }) },
        [`reward ${number(each.reward)}`, `${each.length ?? "–"} tokens`, each.finish_reason, each.staleness > 0 ? `${each.staleness} stale` : "",
            each.surprise === null ? "" : `${number(each.surprise, 2)} nats`].filter(Boolean).join(" · "),
        make("span", { class: "excerpt" }, each.excerpt || "[empty]")))));
    fill($("groups"), make("div", { class: "bar" }, make("h2", null, "step " + answer.step), make("label", null, "sort ", chosen)),
        groups.length ? null : make("p", { class: "weak" }, "This step has no recorded groups (run.samples_per_step)."),
        ...kinds, answer.left_out ? make("p", { class: "weak" }, answer.left_out + " more groups are left out") : null);
    $("groups").querySelector(".chosen")?.scrollIntoView({ block: "nearest" });
}

// --- a trajectory ---

function marked(text, query) {
    const element = make("pre", null);
    const found = query ? text.toLowerCase().indexOf(query.toLowerCase()) : -1;
    if (found < 0) element.append(text);
    else element.append(text.slice(0, found), make("mark", null, text.slice(found, found + query.length)), text.slice(found + query.length));
    return element;
}

function conversation(each, query) {
    const message = (role, name, ...parts) => make("section", { class: "message " + (["assistant", "tool"].includes(role) ? role : "") }, make("h3", null, role + (name ? " " + name : "")), ...parts);
    const judged = each.judgement ? [make("section", { class: "message judge" }, make("h3", null, "the judge’s words"), marked(each.judgement, query))] : [];
    if (!each.messages.length) return [message("prompt", "", marked(each.prompt, query)), message("assistant", "", marked(each.text || "[empty]", query)), ...judged];
    const parts = each.messages.map(one => message(one.role, one.name, ...one.parts.map(part => part.kind === "text" ? marked(part.text, query)
        : make("div", { class: part.kind }, make("span", { class: "weak" }, part.title), marked(part.text, query)))));
    if (each.left_out) parts.push(make("p", { class: "weak" }, each.left_out + " messages are left out"));
    return [...parts, ...judged];
}

const isNumber = value => typeof value === "number";
const heat = share => `hsl(${Math.round(120 * Math.max(0, 1 - share))} 75% 78%)`;

function colour(mode, [, , logprob, version, role, learner, entropy], range) {
    const gap = isNumber(logprob) && isNumber(learner) ? learner - logprob : null;
    if (mode === "logprob") return isNumber(logprob) ? heat(-logprob / 6) : "";
    if (mode === "entropy") return isNumber(entropy) ? heat(entropy / 3) : "";
    if (mode === "drift") return gap === null ? "" : heat(Math.abs(gap));
    if (mode === "ratio") return gap === null ? "" : `hsl(${gap > 0 ? 210 : 30} 85% ${Math.round(94 - 30 * Math.min(1, Math.abs(gap) / Math.LN2))}%)`;
    if (mode === "version") return version < 0 ? "" : `hsl(${Math.round(210 - 170 * (range[1] > range[0] ? (range[1] - version) / (range[1] - range[0]) : 0))} 75% 80%)`;
    return { sampled: "hsl(140 60% 80%)", repeated: "hsl(45 80% 80%)" }[role] || "";
}

function token(each, mode, range) {
    const [id, text, logprob, version, role, learner, entropy] = each;
    const label = text === null ? id + " " : text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥\t") || "∅";
    const facts = [`token ${id}`, role];
    if (isNumber(logprob)) facts.push(`log-prob ${number(logprob, 4)}, p ${number(Math.exp(logprob))}`);
    if (isNumber(logprob) && isNumber(learner)) facts.push(`at training ${number(learner, 4)}, ratio ${number(Math.exp(learner - logprob), 4)}`);
    if (isNumber(entropy)) facts.push(`entropy ${number(entropy)} nats`);
    if (version >= 0) facts.push(`version ${version}`);
    const element = make("span", { title: facts.join("\n"), class: role === "sampled" ? undefined : "context" }, label);
    const background = colour(mode, each, range);
    if (background) element.style.backgroundColor = background;
    return element;
}

async function tokens(each, place, at) {
    const lacks = value => OF_LEARNER.includes(value) && !each.sequences.some(sequence => sequence.scored);
    const mode = at.colour in COLOURS && !lacks(at.colour) ? at.colour : "logprob";
    const chosen = make("select", { "aria-label": "colour by" }, ...Object.entries(COLOURS).map(([value, label]) =>
        make("option", { value, ...(value === mode ? { selected: "" } : {}), ...(lacks(value) ? { disabled: "", title: "not recorded" } : {}) }, label)));
    chosen.addEventListener("change", () => go({ colour: chosen.value }));
    const parts = [make("div", { class: "bar" }, make("label", null, "colour ", chosen),
        LEGENDS[mode] ? make("span", { class: "weak" }, LEGENDS[mode]) : null)];
    for (const [index, sequence] of each.sequences.entries()) {
        const versions = sequence.spans.map(span => span[0]).filter(version => version >= 0);
        const range = [Math.min(...versions), Math.max(...versions)];
        const element = make("pre", { class: "tokens" });
        const more = async start => {
            const answer = await get("tokens", { ...place, sequence: index, start });
            const next = answer.start + answer.tokens.length;
            element.append(...answer.tokens.map(one => token(one, mode, range)));
            if (answer.tokens.length && next < answer.count) {
                const button = make("button", { onclick: () => { button.remove(); report(more(next)); } }, `${answer.count - next} more tokens`);
                element.append(button);
            }
        };
        parts.push(make("h3", null, `sequence ${index + 1} of ${each.sequences.length}, ${sequence.tokens} tokens`), element);
        await more(0);
    }
    if (!each.sequences.length) parts.push(make("p", { class: "weak" }, "No tokens are recorded."));
    return parts;
}

async function drawTrajectory(part, at, suffix) {
    const place = { run: at["run" + suffix], step: at["step" + suffix], uid: at["uid" + suffix], sample: at["sample" + suffix] };
    if (!place.uid) {
        changed("trajectory" + suffix, null);
        $(part).hidden = Boolean(suffix);
        return fill($(part), make("p", { class: "weak" }, "Choose a trajectory."));
    }
    const view = at.view === "tokens" ? "tokens" : "";
    if (!changed("trajectory" + suffix, [place, view, at.colour, at.q])) return;
    let each;
    try {
        each = await get("trajectory", place);
    } catch (error) {
        fill($(part));
        throw error;
    }
    const fact = (name, value) => value === null || value === undefined || value === "" ? null : make("span", null, make("span", { class: "weak" }, name + " "), value);
    const spans = each.sequences.flatMap(sequence => sequence.spans).filter(span => span[0] >= 0).map(([version, start, end]) => `v${version}: ${start}–${end}`);
    const others = make("div", { class: "bar" }, ...each.samples.map(sample => make("a", { href: link({ ["sample" + suffix]: sample }), class: sample === each.sample ? "chosen" : undefined }, "#" + sample)));
    const body = view ? await tokens(each, place, at) : conversation(each, at.q);
    const buttons = suffix ? [make("a", { href: link({ run2: null, step2: null, uid2: null, sample2: null }) }, "close")]
        : [make("a", { href: link({ view: view ? null : "tokens" }) }, view ? "conversation" : "tokens"),
            make("a", { href: beside(at) }, "compare"), embedded ? null : make("button", { onclick: () => report(samePrompt(state())) }, "same prompt")];
    $(part).hidden = false;
    fill($(part), make("h2", null, `${each.run}: ${each.title}`), make("div", { class: "bar" }, ...buttons.filter(Boolean)), others,
        make("div", { class: "bar" }, fact("reward", number(each.reward, 5)), ...Object.entries(each.components).map(([name, value]) => fact(name, number(value, 4))),
            fact("ended", each.finish_reason), fact("tokens", each.length), fact("turns", each.turns || null), fact("staleness", each.staleness),
            fact("surprise", each.surprise === null ? null : number(each.surprise) + " nats"), fact("resumes", each.resumes || null)),
        spans.length ? make("div", { class: "bar weak" }, "tokens by version: " + spans.slice(0, 40).join(", ") + (spans.length > 40 ? ` and ${spans.length - 40} more` : "")) : null,
        ...body);
    $(part).scrollTop = 0;
}

const beside = at => link({ run2: at.run, step2: at.step, uid2: at.uid, sample2: at.sample });

// --- places found ---

async function findMore(name, parameters, list, href) {
    let after;
    for (const mine = hits; mine === hits;) {
        const answer = await get(name, { ...parameters, after });
        if (mine !== hits) return;
        for (const hit of answer.hits) {
            list.append(make("a", { class: "row", href: href(hit) }, `step ${hit.step}  ${hit.kind}  ${hit.uid}` + (hit.sample === null ? "" : ` #${hit.sample}`),
                make("span", { class: "excerpt" }, ...(hit.match === undefined ? [hit.title] : [hit.before, make("mark", null, hit.match), hit.after]))));
        }
        after = answer.next;
        if (!after) return list.append(make("p", { class: "weak" }, list.childElementCount ? "That is all." : "Nothing was found."));
        if (list.childElementCount >= 200) {
            const button = make("button", { onclick: () => { button.remove(); report(more()); } }, "more");
            const more = () => findMore(name, { ...parameters, after }, list, href);
            return list.append(button);
        }
    }
}

function openHits(title, ...lists) {
    hits = {};
    $("hits").hidden = false;
    fill($("hits"), make("div", { class: "bar" }, make("h2", null, title), make("button", { onclick: closeHits }, "close")), ...lists);
}

function closeHits() { hits = null; shown.hits = undefined; $("hits").hidden = true; if (state().q) go({ q: null }); }

function drawSearch(at) {
    if (document.activeElement !== $("query")) $("query").value = at.q || "";
    if (!changed("hits", [at.q, at.q && at.run])) return;
    if (!at.q) { $("hits").hidden = true; hits = null; return; }
    const list = make("div");
    openHits(`“${at.q}”`, list);
    report(findMore("search", { run: at.run, q: at.q }, list, hit => link({ step: hit.step, uid: hit.uid, sample: hit.sample, until: hit.step + PAGE / 2 })));
}

async function samePrompt(at) {
    if (!at.uid) return;
    const { runs } = await get("runs", {});
    const lists = runs.map(() => make("div"));
    openHits("same prompt", ...runs.flatMap((name, index) => [make("h3", null, name), lists[index]]));
    const href = hit => link({ run2: hit.run, step2: hit.step, uid2: hit.uid, sample2: null });
    await Promise.all(runs.map((_, other) => findMore("same", { run: at.run, step: at.step, uid: at.uid, other }, lists[other], href)));
}

// --- the page ---

function changed(part, value) {
    const text = JSON.stringify(value);
    if (shown[part] === text) return false;
    shown[part] = text;
    return true;
}

async function drawRuns(at) {
    const { runs } = await get("runs", {});
    if (!changed("runs", [runs, at.run])) return;
    document.title = runs[at.run || 0] + " – asyncrl-view";
    fill($("runs"), ...runs.map((name, index) => runs.length === 1 ? make("span", null, name)
        : make("a", { href: link({ run: index || null, step: null, uid: null, sample: null, until: null }), class: index === Number(at.run || 0) ? "chosen" : undefined }, name)),
    embedded ? null : make("a", { href: `report?run=${at.run || 0}` }, "report"));
}

async function report(work) {
    try {
        await work;
        $("problem").hidden = true;
    } catch (error) {
        $("problem").textContent = error instanceof TypeError ? "asyncrl-view does not answer: " + error.message : error.message;
        $("problem").hidden = false;
    }
}

async function draw(polling) {
    const at = state();
    drawSearch(at);
    await drawRuns(at);
    const page = await drawSteps(at);
    // A live run has new steps all the time, so the link names the newest step of now.
    if (at.step === undefined && page.steps.length) return location.replace(link({ step: page.steps[0].step }));
    // Groups of the newest step may still be added.
    const settled = at.until || (page.steps.length && Number(at.step) < page.steps[0].step);
    if (at.step !== undefined && !(polling && settled && shown.groups)) await drawGroups(at);
    await drawTrajectory("first", at, "");
    await drawTrajectory("second", at, "2");
    document.body.dataset.drawn = location.hash;
}

let drawing = Promise.resolve();

function redraw(polling) {
    drawing = drawing.then(() => report(draw(polling).catch(error => {
        // What could not be drawn is drawn the next time.
        shown = { hits: shown.hits };
        throw error;
    })));
}

function move(list, by) {
    const rows = [...$(list).querySelectorAll(list === "steps" ? "td a" : "a.row")];
    const at = rows.findIndex(row => row.closest(".chosen"));
    const next = rows[at < 0 ? 0 : at + by];
    if (next) { location.hash = next.getAttribute("href"); next.scrollIntoView({ block: "nearest" }); }
}

const KEYS = {
    j: () => move("groups", 1), k: () => move("groups", -1), "]": () => move("steps", -1), "[": () => move("steps", 1),
    t: () => go({ view: state().view ? null : "tokens" }), c: () => { if (state().uid) location.hash = beside(state()); },
    s: () => { if (!embedded) report(samePrompt(state())); }, "/": () => $("query").focus(),
    Escape: () => $("hits").hidden ? go({ run2: null, step2: null, uid2: null, sample2: null }) : closeHits(),
};

addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select")) {
        if (event.key === "Escape") event.target.blur();
        return;
    }
    if (event.key in KEYS) { event.preventDefault(); KEYS[event.key](); }
});
$("search").addEventListener("submit", event => { event.preventDefault(); $("query").blur(); go({ q: $("query").value }); });
addEventListener("hashchange", () => redraw());
if (embedded) $("search").hidden = true;
else setInterval(() => { if (!document.hidden) redraw(true); }, POLL_MS);
redraw();

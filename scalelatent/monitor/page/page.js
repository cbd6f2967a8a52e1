"use strict";
(() => {
  const ROOT = document.getElementById("scalelatent");
  const byId = (id) => document.getElementById(id);
  const SHOWN_JOBS = 10, TIMEOUT = 10000;
  // The page asks for new data every PERIOD ms. If an answer is slow, the page waits PATIENCE times its
  // duration, at most LONGEST ms, so that a viewer takes at most a few per cent of the scheduler's time.
  const PERIOD = 1000, LONGEST = 5000, PATIENCE = 40;
  const BLUE = "#2f7fc9", GREY = "#9aa3ad", AMBER = "#d98e2b";
  const state = { all: false, stage: null, tip: null };

  // -- text ---------------------------------------------------------------------------------------------
  const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
  const known = (value) => value !== null && value !== undefined;
  const count = (value) => (known(value) ? whole.format(value) : "–");
  const percent = (value) => (known(value) ? `${(100 * value).toFixed(value < 0.1 ? 2 : 1)} %` : "–");
  function figure(value) {
    if (!known(value)) return "–";
    const size = Math.abs(value);
    return size !== 0 && (size < 1e-4 || size >= 1e7) ? value.toExponential(3) : String(+value.toPrecision(5));
  }
  function duration(seconds) {
    if (!known(seconds)) return "–";
    if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
    const s = Math.round(seconds), m = Math.floor(s / 60), h = Math.floor(m / 60);
    if (s < 60) return `${s} s`;
    if (m < 60) return `${m} min ${String(s % 60).padStart(2, "0")} s`;
    return h < 48 ? `${h} h ${String(m % 60).padStart(2, "0")} min` : `${Math.floor(h / 24)} d ${h % 24} h`;
  }
  function bytes(value) {
    if (!known(value)) return "–";
    const units = ["B", "kiB", "MiB", "GiB", "TiB"];
    let unit = 0;
    while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
    return `${value.toFixed(value < 10 && unit > 2 ? 1 : 0)} ${units[unit]}`;
  }
  const clock = (time) => new Date(time).toLocaleTimeString("en-GB");

  // -- elements; text from jobs is never parsed as HTML ------------------------------------------------------
  function el(tag, attributes, ...children) {
    const node = tag.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
      : document.createElement(tag);
    for (const [key, value] of Object.entries(attributes || {})) {
      if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (known(value) && value !== false) node.setAttribute(key, value);
    }
    node.append(...children.filter(known));
    return node;
  }
  // Replace the content of an element. Keep the focus and the scroll positions of the old content. Replace
  // nothing while the viewer selects text in it, or points at a chart.
  function swap(place, ...nodes) {
    const fresh = el("div", {}, ...nodes);
    const same = place.firstChild && place.firstChild.isEqualNode(fresh);
    const held = getSelection().type === "Range" && getSelection().containsNode(place, true);
    if (same || held || (place.firstChild && place.querySelector("svg:hover"))) return;
    const scrolled = [...place.querySelectorAll(".scroll, .events")].map((node) => [node.scrollLeft, node.scrollTop]);
    const focus = place.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    if (place.querySelector("svg")) tip(null);
    place.replaceChildren(fresh);
    place.querySelectorAll(".scroll, .events").forEach((node, i) => {
      if (scrolled[i]) [node.scrollLeft, node.scrollTop] = scrolled[i];
    });
    if (focus) for (const link of place.querySelectorAll("a")) if (link.getAttribute("href") === focus) link.focus();
  }
  const stateOf = (job) => (known(job.silent_seconds) ? "silent" : job.state);
  function pill(job) {
    const name = stateOf(job);
    const title = name === "silent" ? `its driver has sent no message for ${duration(job.silent_seconds)}` : null;
    return el("span", { class: `state ${name}`, title }, name);
  }
  function bar(share, hot) {
    const width = Math.max(0, Math.min(1, share || 0)) * 100;
    return el("span", { class: hot ? "bar hot" : "bar" }, el("i", { style: `width:${width.toFixed(1)}%` }));
  }
  function table(columns, rows) {
    const head = columns.map(([name, kind]) => el("th", { class: kind, scope: "col" }, name));
    return el("div", { class: "scroll" },
      el("table", {}, el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...rows)));
  }

  // -- the table of jobs -------------------------------------------------------------------------------------
  const chosenId = () => new URLSearchParams(location.hash.slice(1)).get("job");
  const passOf = (job) => (known(job.pass) ? count(job.pass) + (known(job.max_passes) ? ` / ${count(job.max_passes)}` : "") : "–");
  function leftOf(job) {
    if (job.state !== "running") return known(job.seconds) ? `took ${duration(job.seconds)}` : "";
    return known(job.seconds_left) ? `≤ ${duration(job.seconds_left)} left` : "–";
  }
  function reportLink(job, words) {
    return el("a", { href: `scalelatent/report?job=${encodeURIComponent(job.id)}`, class: "report", target: "_blank", rel: "noopener",
      title: job.report, onclick: (event) => event.stopPropagation() }, words);
  }
  function jobRow(job, chosen) {
    const running = job.state === "running";
    const link = el("a", { href: `#job=${encodeURIComponent(job.id)}`, class: "job-name", title: job.run }, job.name);
    const done = known(job.overall) ? job.overall : job.progress;
    const share = running && known(done) ? [bar(done), el("span", { class: "muted" }, `${Math.floor(100 * done)} %`)] : [];
    return el("tr", { class: chosen ? "chosen" : null, onclick: () => { location.hash = link.hash; } },
      el("td", {}, link, el("span", { class: "muted" }, job.model)),
      el("td", {}, pill(job)),
      el("td", { class: "num" }, passOf(job)),
      el("td", { class: "num wide" }, figure(job.objective)),
      el("td", { class: "num" }, percent(job.validation_error)),
      el("td", { class: "num wide" }, running ? count(job.rows_per_s) : ""),
      el("td", {}, ...(job.report ? [reportLink(job, "report")] : share)),
      el("td", { class: "num" }, leftOf(job)));
  }
  function drawJobs(jobs, chosen) {
    if (!jobs.length) {
      const how = el("div", { class: "card empty" }, "No job yet. Send one with ", el("code", {}, "scalelatent submit job.toml"));
      swap(byId("jobs"), how);
      return;
    }
    const shown = state.all ? jobs : jobs.filter((job, i) => i < SHOWN_JOBS || job.id === chosen);
    const card = el("div", { class: "card" }, table(
      [["Job"], ["State"], ["Pass", "num"], ["Objective", "num wide"], ["Validation error", "num"], ["Rows/s", "num wide"],
        ["Progress"], ["Time", "num"]],
      shown.map((job) => jobRow(job, job.id === chosen))));
    if (jobs.length > SHOWN_JOBS) {
      const words = state.all ? "show fewer" : `show all ${jobs.length} jobs`;
      card.append(el("button", { onclick: () => { state.all = !state.all; drawJobs(jobs, chosen); } }, words));
    }
    swap(byId("jobs"), card);
  }

  // -- charts ----------------------------------------------------------------------------------------------
  function ticks(low, high, wanted) {
    const raw = (high - low) / wanted || 1, power = 10 ** Math.floor(Math.log10(raw));
    const step = power * ([1, 2, 2.5, 5, 10].find((m) => m * power >= raw) || 10);
    const out = [];
    for (let t = Math.ceil(low / step) * step; t <= high + step * 1e-9; t += step) out.push(+t.toPrecision(12));
    return out;
  }
  // Return the width of a chart in pixels, and whether it spans the row: the last of three charts spans the
  // second row if the page has two columns.
  function chartPlace(last) {
    const wide = byId("charts").clientWidth || 1200, n = Math.max(1, Math.min(3, Math.floor((wide + 16) / 316)));
    const spans = Boolean(last) && n === 2;
    return [(spans ? wide : Math.floor((wide - 16 * (n - 1)) / n)) - 2, spans];
  }
  function quantile(values, share) {
    const sorted = values.slice().sort((a, b) => a - b);
    return sorted[Math.floor(share * (sorted.length - 1))];
  }
  // Return [first x, last x, round, nu] for each round (consecutive passes with one threshold nu) of a curve;
  // return an empty list if the curve has only one round.
  function roundsOf(curve) {
    const rounds = [];
    if (!curve.round) return rounds;
    curve.x.forEach((x, i) => {
      const last = rounds[rounds.length - 1];
      if (last && last[2] === curve.round[i]) last[1] = x;
      else rounds.push([x, x, curve.round[i], curve.nu && curve.nu[i]]);
    });
    return rounds.length > 1 ? rounds : [];
  }
  // Draw a chart of curves. Options: floor (lowest value of the vertical axis), clip (this quantile of the
  // values limits the axis), rounds (shade them), last (this chart is the last one of the page).
  function chart(title, note, curve, series, say, tick, options = {}) {
    // For a single point, an axis around its value would suggest changes, so the axis starts at zero.
    const floor = known(options.floor) || !curve || curve.x.length > 1 ? options.floor : 0;
    series = series.filter((s) => curve && curve[s.key]);
    const keys = series.length > 1 ? series.map((s) => [el("i", { class: "key", style: `background:${s.color}` }), s.name]).flat() : [];
    const [W, spans] = chartPlace(options.last);
    const card = el("section", { class: spans ? "card chart spans" : "card chart" }, el("h3", {}, title, el("small", {}, note || "", ...keys)));
    if (!series.length) { card.append(el("p", { class: "empty" }, "not measured yet")); return card; }
    const H = 220, L = 58, R = 18, T = 12, B = 30;
    // The axis ignores the first tenth of a long fit, whose large values would make the later curve look flat.
    const from = curve.x.length > 20 ? Math.floor(curve.x.length / 10) : 0;
    const values = series.flatMap((s) => curve[s.key].slice(from).filter(known));
    let low = Math.min(...values), high = Math.max(...values);
    if (options.clip && values.length > 4) {
      // One very fast pass, for example a resumed one, would make the curve of all other passes look flat.
      high = Math.min(high, 1.25 * quantile(values, options.clip));
    }
    if (known(floor)) low = Math.min(low, floor);
    const pad = (high - low) * 0.06 || Math.abs(high) * 0.05 || 1;
    if (!known(floor)) low -= pad;
    high += pad;
    const x0 = curve.x[0], x1 = Math.max(curve.x[curve.x.length - 1], x0 + 1);
    const X = (x) => L + ((x - x0) / (x1 - x0)) * (W - L - R), Y = (y) => T + ((high - y) / (high - low)) * (H - T - B);
    const svg = el("svg:svg", { viewBox: `0 0 ${W} ${H}`, role: "img",
      "aria-label": `${title}: ${series.map((s) => `${s.name} ${say(curve[s.key].filter(known).pop())}`).join(", ")}` });
    const rounds = options.rounds ? roundsOf(curve) : [];
    rounds.forEach(([first, , number, nu], i) => {
      const left = i ? X(first) : L, right = i + 1 < rounds.length ? X(rounds[i + 1][0]) : W - R;
      if (i % 2) svg.append(el("svg:rect", { class: "round", x: left, y: T, width: Math.max(0, right - left), height: H - T - B, "data-round": number }));
      if (known(nu) && right - left > 44) svg.append(el("svg:text", { class: "nu", x: (left + right) / 2, y: T - 2, "text-anchor": "middle" }, `ν ${figure(+nu.toPrecision(2))}`));
    });
    for (const t of ticks(low, high, 5)) {
      svg.append(el("svg:line", { class: "grid", x1: L, x2: W - R, y1: Y(t), y2: Y(t) }),
        el("svg:text", { x: L - 7, y: Y(t) + 4, "text-anchor": "end" }, tick(t)));
    }
    const along = ticks(x0, x1, 5).filter(Number.isInteger);
    for (const t of along[0] - x0 > (x1 - x0) / 7 ? [x0, ...along] : along) {
      svg.append(el("svg:text", { x: X(t), y: H - 10, "text-anchor": "middle" }, count(t)));
    }
    const clip = `clip-${title.replaceAll(" ", "-")}`;
    svg.append(el("svg:clipPath", { id: clip }, el("svg:rect", { x: L, y: 2, width: W - L, height: H - B })));
    for (const s of series.slice().reverse()) {
      const points = curve.x.map((x, i) => [x, curve[s.key][i]]).filter(([, y]) => known(y));
      const d = points.map(([x, y], i) => `${i ? "L" : "M"}${X(x).toFixed(1)} ${Y(y).toFixed(1)}`).join("");
      const [lx, ly] = points[points.length - 1];
      svg.append(el("svg:path", { class: "line", d, "clip-path": `url(#${clip})`, stroke: s.color, "stroke-width": points.length > 150 ? 1.3 : 2, "data-series": s.key, "data-points": points.length }),
        el("svg:circle", { cx: X(lx), cy: Math.max(Y(ly), T), r: 3.2, fill: s.color }));
    }
    const cross = el("svg:line", { class: "cross", y1: T, y2: H - B, visibility: "hidden" });
    svg.append(cross);
    svg.addEventListener("pointermove", (event) => {
      const box = svg.getBoundingClientRect(), at = x0 + (((event.clientX - box.left) / box.width) * W - L) / (W - L - R) * (x1 - x0);
      let i = 0;
      curve.x.forEach((x, j) => { if (Math.abs(x - at) < Math.abs(curve.x[i] - at)) i = j; });
      cross.setAttribute("x1", X(curve.x[i]));
      cross.setAttribute("x2", X(curve.x[i]));
      cross.setAttribute("visibility", "visible");
      const lines = series.filter((s) => known(curve[s.key][i])).map((s) => `${s.name}  ${say(curve[s.key][i])}`);
      tip([`${curve.axis === "steps" ? "step" : "pass"} ${count(curve.x[i])}`, ...lines].join("\n"), event);
    });
    svg.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); tip(null); });
    card.append(svg);
    return card;
  }
  function tip(text, event) {
    state.tip = state.tip || ROOT.appendChild(el("div", { class: "tip" }));
    state.tip.style.display = text ? "block" : "none";
    if (!text) return;
    state.tip.textContent = text;
    state.tip.style.left = `${Math.min(event.clientX + 14, innerWidth - 180)}px`;
    state.tip.style.top = `${event.clientY + 14}px`;
  }

  // -- one job ------------------------------------------------------------------------------------------------
  function fact(name, value, unit, bad) {
    return el("div", { class: bad ? "bad" : null }, el("dt", {}, name), el("dd", {}, value), el("dd", { class: "note" }, unit || ""));
  }
  function errorNote(job) {
    if (known(job.mean_member_validation_error)) return `mean of the members ${percent(job.mean_member_validation_error)}`;
    return known(job.train_error) ? `training ${percent(job.train_error)}` : "";
  }
  function facts(job) {
    const out = [
      fact("Pass", count(job.pass), known(job.max_passes) ? `of at most ${count(job.max_passes)}` : ""),
      fact("Objective", figure(job.objective)),
      known(job.weights_on) ? fact("Weights on", count(job.weights_on), known(job.weights_changed) ? `${count(job.weights_changed)} changed sign` : "")
        : fact("Validation error", percent(job.validation_error), errorNote(job)),
      fact("Rows/s", count(job.rows_per_s)),
      fact("Read", known(job.mb_per_s) ? figure(+job.mb_per_s.toPrecision(3)) : "–", known(job.mb_per_s) ? "MB/s" : ""),
      known(job.ended) ? fact("Took", duration(job.seconds))
        : fact("Time left", duration(job.seconds_left), known(job.seconds_left) && !AFTER_FIT.includes(job.stage) ? "at most" : ""),
      fact("Spans redone", count(job.spans_redone)),
      fact("Workers lost", count(job.workers_lost), "", job.workers_lost > 0),
    ];
    if (job.shards_quarantined) out.push(fact("Bad shards", count(job.shards_quarantined), "", true));
    return el("dl", { class: "facts" }, ...out);
  }
  const AFTER_FIT = ["saving", "scoring", "report"];
  function fitBar(job) {
    if (job.state !== "running" || !known(job.overall)) return null;
    const after = AFTER_FIT.includes(job.stage), at = `${Math.floor(100 * job.overall)} %`;
    const most = known(job.max_passes) && known(job.pass) && !after ? `pass ${count(job.pass)} of at most ${count(job.max_passes)}` : job.part || "";
    return el("div", { class: "pass" }, bar(job.overall),
      el("p", {}, el("span", {}, [after ? "fit done" : `fit: ${at}`, most].filter(Boolean).join(", ")),
        el("span", {}, known(job.seconds_left) && !after ? `at most ${duration(job.seconds_left)} left` : "")));
  }
  function passBar(job) {
    if (job.state !== "running" || !job.rows_total) return null;
    const left = known(job.pass_seconds_left) ? `${duration(job.pass_seconds_left)} left in this ${AFTER_FIT.includes(job.stage) ? "stage" : "pass"}` : "";
    const kept = known(job.checkpoint_seconds_ago) ? `checkpoint ${duration(job.checkpoint_seconds_ago)} ago` : "";
    return el("div", { class: "pass thin" }, bar(job.progress),
      el("p", {}, el("span", {}, `${[job.stage || "pass", job.part].filter(Boolean).join(", ")}: ${count(job.rows_done)} of ${count(job.rows_total)} rows`),
        el("span", {}, [left, kept].filter(Boolean).join(" · "))));
  }
  function charts(job) {
    // The horizontal axis has passes, or, for a model that learns from minibatches, steps.
    const measured = job.curves.filter((c) => c.objective || c.validation_error || c.train_error || c.mean_member_train_error);
    const pool = measured.length ? measured : job.curves;
    const curve = pool[pool.length - 1];
    if (!curve) return null;
    const against = `against ${curve.axis === "steps" ? "steps" : "passes"}`;
    return el("div", { class: "charts" },
      curve.weights_on && !curve.objective ? null : chart("Objective", against, curve, [{ key: "objective", name: "objective", color: BLUE }], figure, figure, { rounds: true }),
      curve.weights_on ? chart("Weights", "", curve, [{ key: "weights_on", name: "on", color: BLUE },
        { key: "weights_changed", name: "changed sign", color: GREY }], count, short, { floor: 0 }) : null,
      curve.weights_on ? null : chart("Error", "", curve, [{ key: "validation_error", name: "validation", color: BLUE },
        { key: "train_error", name: "training", color: GREY },
        { key: "mean_member_validation_error", name: "mean member, validation", color: AMBER },
        { key: "mean_member_train_error", name: "mean member, training", color: GREY }], percent, (value) => `${figure(+(100 * value).toPrecision(6))} %`, { rounds: true }),
      chart("Rows per second", against, curve, [{ key: "rows_per_s", name: "rows/s", color: BLUE }], short, short, { floor: 0, clip: 0.95, last: true }));
  }
  function short(value) {
    if (!known(value)) return "–";
    if (value >= 1e6) return `${+(value / 1e6).toPrecision(3)} M`;
    return value >= 1e4 ? `${+(value / 1e3).toPrecision(3)} k` : figure(+value.toPrecision(3));
  }
  function gpuMemory(worker) {
    if (!known(worker.gpu_total)) return el("td", {}, "–");
    const share = worker.gpu_used / worker.gpu_total;
    const rows = worker.gpu_rows ? `, ${bytes(worker.gpu_rows)} rows` : "";
    return el("td", { title: "memory of the GPU in use by all processes, and rows that this worker keeps there between passes" },
      bar(share, share > 0.97), el("span", {}, bytes(worker.gpu_used), el("span", { class: "muted" }, ` of ${bytes(worker.gpu_total)}${rows}`)));
  }
  function workerRow(worker, fastest, gpus) {
    const limit = worker.memory_limit, memory = known(worker.memory) ? worker.memory : worker.rss;
    const share = limit ? memory / limit : null;
    const device = (worker.pool || "cpu").toUpperCase();
    return el("tr", { class: worker.lost ? "gone" : null, title: worker.worker },
      el("td", {}, worker.name || worker.worker, worker.lost ? el("span", { class: "state lost", style: "margin-left:8px" }, "lost") : null),
      el("td", {}, device),
      el("td", {}, worker.lost || !known(worker.rows_per_s) ? "–" : bar(worker.rows_per_s / fastest), worker.lost || !known(worker.rows_per_s) ? null : el("span", {}, count(worker.rows_per_s))),
      el("td", {}, limit && known(memory) ? bar(share, share > 0.85) : null, el("span", {}, bytes(memory), limit && known(memory) ? el("span", { class: "muted" }, ` of ${bytes(limit)}`) : null)),
      gpus ? gpuMemory(worker) : null,
      el("td", { class: "num" }, count(worker.spans)),
      el("td", { class: "part" }, worker.last_span || "–"),
      el("td", { class: "num muted wide" }, known(worker.seconds_ago) ? `${duration(worker.seconds_ago)} ago` : ""));
  }
  function workers(job) {
    const rows = job.worker_rows;
    if (!rows.length) return null;
    const fastest = Math.max(1, ...rows.map((w) => w.rows_per_s || 0));
    const gpus = rows.some((w) => known(w.gpu_total));
    const pools = job.pools.length > 1
      ? job.pools.map((p) => `${count(p.workers)} ${p.pool.toUpperCase()}: ${count(p.rows_per_s)} rows/s`).join(" · ") : "";
    const card = el("section", { class: "card" }, el("h3", {}, "Workers", el("small", {}, pools)), table(
      [["Worker"], ["Device"], ["Rows/s"], ["Memory"], ...(gpus ? [["GPU memory"]] : []), ["Spans", "num"], ["Last span"], ["", "num wide"]],
      rows.map((worker) => workerRow(worker, fastest, gpus))));
    if (job.worker_rows_hidden) {
      card.append(el("p", { class: "muted more" }, `and ${count(job.worker_rows_hidden)} more`));
    }
    return card;
  }
  const BAD = new Set(["worker_lost", "span_redone", "shard_quarantined", "checkpoint_failed", "checkpoint_unreadable"]);
  function events(job) {
    if (!job.events.length) return null;
    const items = job.events.slice().reverse().map((event) => el("li", {},
      el("time", {}, clock(event.time)), el("span", { class: BAD.has(event.name) ? "warn" : null }, event.name.replaceAll("_", " ")), el("span", {}, event.text)));
    return el("section", { class: "card" }, el("h3", {}, "Events"), el("ul", { class: "events" }, ...items));
  }
  function drawJob(job) {
    if (!job) { byId("job").hidden = true; return; }
    byId("job").hidden = false;
    swap(byId("head"), el("div", { class: "card" },
      el("div", { class: "head" }, el("h2", {}, job.name), pill(job), el("span", { class: "muted" }, job.model),
        el("span", { class: "mono", title: "run folder" }, job.run)),
      facts(job), job.error ? el("p", { class: "error" }, job.error) : null,
      job.report ? el("p", { class: "links" }, reportLink(job, "Report"), el("span", { class: "mono" }, job.report)) : null,
      fitBar(job), passBar(job)));
    swap(byId("charts"), charts(job));
    swap(byId("workers"), workers(job));
    swap(byId("events"), events(job));
  }

  // -- regular updates --------------------------------------------------------------------------------------
  function drawCluster(cluster, jobs) {
    const many = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;
    const words = [many(cluster.workers, "worker"), many(cluster.threads, "thread")];
    if (cluster.gpus) words.push(many(cluster.gpus, "GPU"));
    if (cluster.workers_lost) words.push(`${many(cluster.workers_lost, "worker")} lost`);
    const running = jobs.filter((job) => job.state === "running").length;
    words.push(`${count(running)} of ${many(jobs.length, "job")} running`);
    byId("cluster").textContent = words.join(" · ");
  }
  function live(text, off) {
    byId("live").textContent = text;
    byId("live").className = off ? "off" : "";
  }
  async function ask(id) {
    const response = await fetch(`scalelatent.json${id ? `?job=${encodeURIComponent(id)}` : ""}`,
      { signal: AbortSignal.timeout(TIMEOUT), cache: "no-store" });
    if (response.status === 404 && id) return ask(null);
    if (!response.ok) throw new Error(`the scheduler answered ${response.status}`);
    return response.json();
  }
  let drawn = 0, turn = 0, timer = null;
  async function beat() {
    const mine = ++turn, begin = performance.now(); // answers to older requests are not drawn
    clearTimeout(timer);
    try {
      let answer = await ask(chosenId() || state.last);
      if (!answer.job && answer.jobs.length) {
        state.last = answer.jobs[0].id;
        answer = await ask(state.last);
      }
      if (mine !== turn) return;
      drawCluster(answer.cluster, answer.jobs);
      drawJobs(answer.jobs, answer.job && answer.job.id);
      drawJob(answer.job);
      drawn = Date.now();
      live("live");
    } catch (error) {
      live(drawn ? `scheduler not reached for ${duration((Date.now() - drawn) / 1000)}` : "scheduler not reached", true);
    } finally {
      const wait = Math.min(LONGEST, Math.max(PERIOD, PATIENCE * (performance.now() - begin)));
      if (mine === turn && !document.hidden) timer = setTimeout(beat, wait);
    }
  }
  addEventListener("hashchange", beat);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) beat(); });
  for (const link of document.querySelectorAll(".navbar a")) {
    if (link.getAttribute("href") === "scalelatent") link.closest("li").classList.add("active");
  }
  // Leave room for the navigation bar of Dask, which has a fixed position, and two rows in a narrow window.
  const navigation = document.querySelector(".navbar");
  function clearBar() {
    if (!navigation) return;
    ROOT.style.marginTop = "";
    const top = ROOT.getBoundingClientRect().top + scrollY;
    ROOT.style.marginTop = `${Math.max(0, navigation.offsetHeight - top)}px`;
  }
  addEventListener("resize", clearBar);
  clearBar();
  beat();
})();
